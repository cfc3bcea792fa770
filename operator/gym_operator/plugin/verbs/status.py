"""`status`: how a stack is, once or again and again."""

from __future__ import annotations

import asyncio
from typing import Final

from gym_operator.effects.kube import CHECKPOINTS
from gym_operator.plugin.cluster import Cluster
from gym_operator.plugin.mirror import Mirror
from gym_operator.plugin.screen import Output, Screen
from gym_operator.plugin.views import status as views

LOOK_SECONDS: Final = 2.0
"""Between looks of a watch."""


async def status(cluster: Cluster, screen: Screen, stack: str, output: Output, *, watch: bool) -> None:
    """Show it; with `watch` until the user ends it, or the stack is gone. Raises PluginError."""
    checkpoints = Mirror(cluster, CHECKPOINTS)
    show = screen.update if watch else screen.show
    try:
        while True:
            body = await cluster.stack(stack)
            document = views.document_of(body, await checkpoints.look())
            now = cluster.wall()
            show(output, document, lambda wide, d=document, at=now: views.tables_of(d, at, wide=wide))  # type: ignore[misc]
            if not watch:
                return
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        screen.close()
