"""`drill`: whether a checkpoint can be restored, tried out on a copy of its stack that is deleted afterwards."""

from __future__ import annotations

import secrets
from typing import Final

from gym_operator.api.restore import RESTORE_TERMINAL
from gym_operator.effects.kube import CHECKPOINTS, RESTORES, Body
from gym_operator.plugin.cluster import Cluster
from gym_operator.plugin.exits import NotDone, Unusable
from gym_operator.plugin.scratch import Scratch
from gym_operator.plugin.screen import Screen
from gym_operator.plugin.views import restores as views
from gym_operator.plugin.views.checkpoints import status_of
from gym_operator.plugin.views.places import places_of
from gym_operator.plugin.views.scratch import scratch_stack
from gym_operator.plugin.waits import until_final
from gym_operator.rules.restores import Found, by_checkpoint, newest_good

SUFFIX: Final = "drill"


async def drill(
    cluster: Cluster,
    screen: Screen,
    stack: str,
    *,
    wanted: str | None,
    name: str | None,
    own_classes: bool,
    seconds: float,
) -> None:
    """Restore a checkpoint of a stack into a copy of it. `wanted`: the name of a GymCheckpoint, by default the
    stack's newest; `seconds`: how long the restore may take. Whatever happens, the copy is deleted. Raises
    PluginError."""
    original = await cluster.stack(stack)
    checkpoint = await _chosen(cluster, original, wanted)
    source, drill_id = checkpoint["metadata"]["name"], secrets.token_hex(16)
    body = scratch_stack(
        original, name or f"{stack}-{SUFFIX}", places_of(checkpoint), drill_id, own_classes=own_classes
    )
    scratch = Scratch(cluster, screen, body, source, drill_id)
    await scratch.check()
    screen.tell(f"checkpoint {source} is restored into GymStack {body['metadata']['name']}, which is deleted then")
    try:
        made = await scratch.begin()
        done = await until_final(
            *(cluster, screen, made, RESTORES, RESTORE_TERMINAL, views.progress_of, seconds), after="it is given up"
        )
    finally:
        await scratch.end()
    if done["status"]["phase"] != "Succeeded":
        raise NotDone(f"checkpoint {source} could not be restored: {views.failure_of(done)}")
    would, there = views.status_of(done).continued_count, status_of(checkpoint).episodes
    if would != there:
        raise NotDone(f"checkpoint {source} has {there} rollouts, and {would} were restored")
    screen.line(f"checkpoint {source} can be restored: rollouts that would continue: {would}")


async def _chosen(cluster: Cluster, stack: Body, wanted: str | None) -> Body:
    """The GymCheckpoint that is tried. Raises Unusable for one that has not succeeded."""
    metadata = stack["metadata"]
    if wanted is None:
        newest = newest_good(await cluster.list(CHECKPOINTS), metadata["name"], metadata["uid"])
        if newest is None:
            raise Unusable(
                f"stack {metadata['name']} has no checkpoint that succeeded: kubectl gym checkpoint "
                f"{metadata['name']} takes one"
            )
        return dict(newest)
    found = await cluster.checkpoint(wanted)
    match by_checkpoint(found, wanted):
        case Found():
            return found
        case other:
            raise Unusable(other.message)
