"""`restore`: bring a stack to a checkpoint, and wait until it continues from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_operator.api import names
from gym_operator.api.restore import RESTORE_TERMINAL
from gym_operator.effects.kube import CHECKPOINTS, RESTORES, Body
from gym_operator.plugin.cluster import Cluster
from gym_operator.plugin.exits import NotDone, Unusable
from gym_operator.plugin.screen import Screen
from gym_operator.plugin.views import restores as views
from gym_operator.plugin.views.requests import dated_name, new_restore, source_of
from gym_operator.plugin.waits import until_final
from gym_operator.rules.restores import Labelled, Refuse, Wait, by_checkpoint


async def restore(
    cluster: Cluster,
    screen: Screen,
    stack: str,
    wanted: str,
    *,
    digest: str | None,
    name: str | None,
    wait: float | None,
) -> None:
    """Make a GymRestore. `wanted`: the name of a GymCheckpoint, labels, or a place with its `digest`. `wait`: for so
    many seconds until it is final; None: not at all. Raises PluginError."""
    source = source_of(wanted, digest)
    body = new_restore(name or dated_name(f"{stack}-restore", cluster.wall()), stack, source)
    await refuse_in_vain(cluster, await cluster.stack(stack), source)
    made = await cluster.create(RESTORES, names.RESTORE_KIND, body)
    screen.line(f"gymrestore.{names.GROUP}/{made['metadata']['name']} created")
    if wait is None:
        return
    done = await until_final(cluster, screen, made, RESTORES, RESTORE_TERMINAL, views.progress_of, wait)
    if done["status"]["phase"] != "Succeeded":
        raise NotDone(f"restore {done['metadata']['name']} failed: {views.failure_of(done)}")
    screen.line(f"restore {done['metadata']['name']} succeeded: {views.outcome_of(done)}")


async def refuse_in_vain(cluster: Cluster, stack: Body, source: Mapping[str, Any]) -> None:
    """Raise Unusable for a source of which nothing can come: the operator would wait a minute to say so."""
    if "checkpointRef" in source:
        name = source["checkpointRef"]["name"]
        found: object = by_checkpoint(await cluster.checkpoint(name), name)
    elif "labels" in source:
        metadata = stack["metadata"]
        search = Labelled(source["labels"], metadata["name"], metadata["uid"])
        found = search.seen(await cluster.list(CHECKPOINTS)).found()
    else:
        return
    match found:
        case Refuse(_, message) | Wait(_, message, False):
            raise Unusable(message)
