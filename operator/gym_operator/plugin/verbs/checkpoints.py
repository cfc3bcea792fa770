"""`checkpoints`: the checkpoints of a stack."""

from __future__ import annotations

from gym_operator.effects.kube import CHECKPOINTS
from gym_operator.plugin.cluster import Cluster
from gym_operator.plugin.screen import Output, Screen
from gym_operator.plugin.views import checkpoints as views


async def checkpoints(cluster: Cluster, screen: Screen, stack: str, output: Output) -> None:
    """Show them, also where the stack itself is gone. Raises PluginError."""
    document = views.document_of(stack, await cluster.list(CHECKPOINTS))
    if not document["checkpoints"]:
        await cluster.stack(stack)  # a name that is wrong is told
        screen.tell(f"stack {stack} has no checkpoints yet: kubectl gym checkpoint {stack} takes one")
    now = cluster.wall()
    screen.show(output, document, lambda wide: views.tables_of(document, now, wide=wide))
