"""`inspect`: what is inside of a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from gym_operator.plugin.reading import part_of
from gym_operator.plugin.screen import Output, Screen
from gym_operator.plugin.sources import Source
from gym_operator.plugin.views import inspection as views


async def inspect(
    screen: Screen, wanted: str, sources: Sequence[Source], output: Output, wall: Callable[[], float]
) -> None:
    """Show it. `wanted`: how it was asked for. Raises PluginError, ProtocolError, StorageError."""
    document = views.document_of(wanted, [await asyncio.to_thread(part_of, source) for source in sources])
    now = wall()
    screen.show(output, document, lambda wide: views.tables_of(document, now, wide=wide))
