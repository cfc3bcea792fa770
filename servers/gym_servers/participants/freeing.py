"""What a restore that was given up had built, being freed behind it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

log = logging.getLogger("gym_servers")


class Freeing:
    """Frees states by name, with `free`. One that cannot be freed is logged; it ends with its process.

    What comes next may have the same names: freed late, its state would be gone. So it waits for `done`."""

    def __init__(self, free: Callable[[str], Awaitable[None]]) -> None:
        self._free = free
        self._under_way: set[asyncio.Future[None]] = set()

    def begin(self, names: Iterable[str]) -> None:
        freeing = asyncio.ensure_future(self._all(list(names)))
        self._under_way.add(freeing)
        freeing.add_done_callback(self._under_way.discard)

    async def done(self) -> None:
        """Until nothing is being freed."""
        while self._under_way:
            await asyncio.wait(self._under_way)

    async def _all(self, names: list[str]) -> None:
        for outcome in await asyncio.gather(*map(self._free, names), return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("a session's state could not be freed", exc_info=outcome)
