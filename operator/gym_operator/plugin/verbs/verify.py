"""`verify`: whether a checkpoint is whole, by reading all of it again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gym_operator.plugin.exits import NotDone
from gym_operator.plugin.reading import check
from gym_operator.plugin.screen import Output, Screen
from gym_operator.plugin.sources import Source
from gym_operator.plugin.views import verification as views
from gym_operator.plugin.views.text import size


async def verify(screen: Screen, wanted: str, sources: Sequence[Source], output: Output) -> None:
    """Check every digest and show what came of it. Raises NotDone where something does not verify, and PluginError,
    ProtocolError, StorageError."""
    digests: dict[str, str] = {}
    checked: list[views.Checked] = []
    for source in sources:
        found = check(source, digests.__setitem__)
        while (one := await asyncio.to_thread(next, found, None)) is not None:
            screen.tell(f"cell {one.cell}, {one.participant}: {size(one.bytes)} read")
            checked.append(one)
    document = views.document_of(wanted, digests, checked)
    screen.show(output, document, lambda wide: views.tables_of(document, wide=wide))
    if failure := views.failure_of(document):
        raise NotDone(failure)
