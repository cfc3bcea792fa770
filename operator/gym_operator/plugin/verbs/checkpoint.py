"""`checkpoint`: ask for a checkpoint of a stack, and wait for it."""

from __future__ import annotations

from collections.abc import Sequence

from gym_operator.api import names
from gym_operator.api.checkpoint import TERMINAL
from gym_operator.effects.kube import CHECKPOINTS
from gym_operator.plugin.cluster import Cluster
from gym_operator.plugin.exits import NotDone
from gym_operator.plugin.screen import Screen
from gym_operator.plugin.views import checkpoints as views
from gym_operator.plugin.views.requests import dated_name, labels_of, new_checkpoint
from gym_operator.plugin.views.status import blocker_table
from gym_operator.plugin.views.table import rendered
from gym_operator.plugin.waits import until_final


async def checkpoint(
    cluster: Cluster,
    screen: Screen,
    stack: str,
    *,
    name: str | None,
    labels: Sequence[str],
    stop_after: bool,
    wait: float | None,
) -> None:
    """Make a GymCheckpoint. `wait`: for so many seconds until it is final; None: not at all. Raises PluginError."""
    body = new_checkpoint(name or dated_name(stack, cluster.wall()), stack, labels_of(labels), stop_after=stop_after)
    await cluster.stack(stack)  # a checkpoint of no stack would wait a minute to say so
    made = await cluster.create(CHECKPOINTS, names.CHECKPOINT_KIND, body)
    screen.line(f"gymcheckpoint.{names.GROUP}/{made['metadata']['name']} created")
    if wait is None:
        return
    done = await until_final(cluster, screen, made, CHECKPOINTS, TERMINAL, views.progress_of, wait)
    if done["status"]["phase"] != "Succeeded":
        if table := rendered([blocker_table(views.blockers_of(done), cluster.wall())]):
            screen.tell(table)
        raise NotDone(f"checkpoint {done['metadata']['name']} failed: {views.failure_of(done)}")
    screen.line(f"checkpoint {done['metadata']['name']} succeeded: {views.outcome_of(done)}")
