"""Which attempt of a cell may still generate: streams of a lower one are stopped, and new ones refused.

A model server whose process has ended took its connections with it, and the engine stopped by itself. One that is cut
off from its cluster has not: it, or a proxy between, may hold a stream open for as long as a generation takes.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from gym_servers.protocol.errors import ProtocolError

if TYPE_CHECKING:
    from starlette.types import Message, Receive

REMEMBERED = 4096  # cells; the one that was heard of least recently is forgotten


class Caller(NamedTuple):
    """Whose stream it is: the folder of its cell, and the cell's attempt."""

    folder: str
    attempt: int

    @property
    def header(self) -> str:
        return f"{self.folder};{self.attempt}"


def caller_of(header: str) -> Caller:
    """Raises `invalid_request`."""
    folder, _, attempt = header.rpartition(";")
    if not folder or not attempt.isdecimal() or len(attempt) > 9:
        raise ProtocolError("invalid_request", "the header does not say which cell and attempt the call is of")
    return Caller(folder, int(attempt))


class Attempts:
    """The highest attempt of each cell that was heard of, and the streams of all."""

    def __init__(self) -> None:
        self._highest: OrderedDict[str, int] = OrderedDict()
        self._streams: dict[asyncio.Event, Caller] = {}

    def begin(self, caller: Caller) -> asyncio.Event:
        """A stream begins; what is set when it has to stop. Raises `stale_attempt`."""
        highest = self._highest.get(caller.folder, caller.attempt)
        if caller.attempt < highest:
            raise ProtocolError("stale_attempt", f"attempt {highest} of {caller.folder} has begun")
        self.raise_to(caller)
        stop = asyncio.Event()
        self._streams[stop] = caller
        return stop

    def end(self, stop: asyncio.Event) -> None:
        self._streams.pop(stop, None)

    def raise_to(self, caller: Caller) -> int:
        """Stop what is of a lower attempt of the cell; how many streams that were."""
        self._highest[caller.folder] = max(caller.attempt, self._highest.get(caller.folder, 0))
        self._highest.move_to_end(caller.folder)
        while len(self._highest) > REMEMBERED:
            self._highest.popitem(last=False)
        lower = [
            stop
            for stop, other in self._streams.items()
            if other.folder == caller.folder and other.attempt < caller.attempt and not stop.is_set()
        ]
        for stop in lower:
            stop.set()
        return len(lower)


def until(stop: asyncio.Event, receive: Receive) -> Receive:
    """`receive`, until it has to stop: from then on the caller has gone away."""

    async def receiving() -> Message:
        coming, stopped = asyncio.ensure_future(receive()), asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({coming, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return {"type": "http.disconnect"} if stop.is_set() else coming.result()
        finally:
            coming.cancel()
            stopped.cancel()

    return receiving
