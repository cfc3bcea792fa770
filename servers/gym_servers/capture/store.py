"""The ledgers of one process: small heads always in memory, calls as bytes in a bounded cache, the rest on disk.

A delivered call never changes, so it is encoded once, when it is delivered: what it takes is known to the byte, and
it is written at most once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from gym_servers.capture.ledger import CallRecord, Ledger, decode, encode
from gym_servers.capture.parents import parent_of
from gym_servers.capture.segments import SEGMENT_BYTES, Place, Segments, read

log = logging.getLogger("gym_servers")

CACHE_BYTES = 256 * 1024 * 1024


@dataclass(eq=False, slots=True)
class Kept:
    """One call: what it is found by, and the rest where it is now, in memory or in a file."""

    position: str
    digest: str
    parent: str
    turn: str
    chain: str
    thoughts: tuple[str, ...]
    data: bytes | None
    place: Place | None = None


def kept_of(key: str, record: CallRecord) -> Kept:
    """A call as it is kept, in memory so far. For many calls it takes long, and may be done in a thread."""
    data = encode(key, Ledger([record]))
    return Kept(record.position, record.digest, record.parent, record.turn, record.chain, record.thoughts, data)


class Source(NamedTuple):
    """Where a call is, as of one moment; it stays there for as long as `LedgerStore.reading` holds it."""

    data: bytes | None
    place: Place | None

    def read(self) -> CallRecord:
        """Raises `checkpoint_error` where its file cannot be used."""
        if (data := self.data) is None:
            assert self.place is not None  # what is not in memory was written first
            data = read(self.place)
        _, ledger = decode("in memory", data)
        return ledger.calls[0]


@dataclass(slots=True)
class _Entry:
    calls: list[Kept] = field(default_factory=list)
    by_position: dict[str, Kept] = field(default_factory=dict)
    by_turn: dict[str, list[Kept]] = field(default_factory=dict)


class LedgerStore:
    """Ledgers by capture key. `cache_bytes` bounds what calls take in memory, heads apart; `folder` is where the rest
    goes."""

    def __init__(self, cache_bytes: int = CACHE_BYTES, folder: Path | None = None) -> None:
        self._bound, self._segments = cache_bytes, Segments(folder)
        self._entries: dict[str, _Entry] = {}
        self._cached: OrderedDict[int, Kept] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._spilling: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._entries))

    @property
    def cached_bytes(self) -> int:
        """What is in memory now."""
        return self._bytes

    # ---- finding ------------------------------------------------------------------------------------------

    def at(self, key: str, position: str) -> Kept | None:
        """The call that was delivered at a position, None for one without a position."""
        entry = self._entries.get(key)
        return entry.by_position.get(position) if entry is not None and position else None

    def parent(self, key: str, turns: Sequence[str], thoughts: Sequence[str] = ()) -> Kept | None:
        """The call whose reply a conversation goes on from: see `gym_servers.capture.parents`."""
        entry = self._entries.get(key)
        return parent_of(entry.by_turn, turns, thoughts) if entry is not None else None

    def calls(self, key: str) -> list[Kept]:
        entry = self._entries.get(key)
        return list(entry.calls) if entry is not None else []

    def holds(self, key: str, kept: Kept) -> bool:
        """Whether this call was not freed since it was found."""
        return any(one is kept for one in self.calls(key))

    @contextmanager
    def reading(self, *keys: str) -> Iterator[dict[str, list[Source]]]:
        """Where all calls of these episodes are now, for threads: they stay there to the end of the block, also where
        they are freed meanwhile."""
        found = {key: [Source(kept.data, kept.place) for kept in self.calls(key)] for key in keys}
        with self._held(source for sources in found.values() for source in sources):
            yield found

    async def record(self, kept: Kept) -> CallRecord:
        """A call in full, as long as it is held here. Raises `checkpoint_error` where its file cannot be used."""
        if id(kept) in self._cached:
            self._cached.move_to_end(id(kept))
        source = Source(kept.data, kept.place)
        with self._held([source]):
            return source.read() if source.data is not None else await asyncio.to_thread(source.read)

    async def ledger(self, key: str) -> Ledger:
        """All calls of an episode in full, as of now; no waiting where all are in memory. Raises `checkpoint_error`
        where a file cannot be used."""
        with self.reading(key) as found:
            if all(source.data is not None for source in found[key]):
                return assembled(found[key])
            return await asyncio.to_thread(assembled, found[key])

    @contextmanager
    def _held(self, sources: Iterable[Source]) -> Iterator[None]:
        places = [source.place for source in sources if source.data is None and source.place is not None]
        for place in places:
            self._segments.hold(place)
        try:
            yield
        finally:
            for place in places:
                self._segments.free(place)

    # ---- keeping ------------------------------------------------------------------------------------------

    def append(self, key: str, record: CallRecord) -> Kept:
        """A call was delivered."""
        kept = kept_of(key, record)
        self._keep(key, kept)
        return kept

    def install(self, key: str, calls: Iterable[Kept]) -> None:
        """Calls that another process had delivered, in their order."""
        for kept in calls:
            self._keep(key, kept)

    def _keep(self, key: str, kept: Kept) -> None:
        entry = self._entries.setdefault(key, _Entry())
        entry.calls.append(kept)
        if kept.position:
            entry.by_position[kept.position] = kept
        if kept.turn:
            entry.by_turn.setdefault(kept.turn, []).append(kept)
        self._cached[id(kept)] = kept
        self._bytes += len(kept.data or b"")
        if self._bytes > self._bound and self._spilling is None:
            self._spilling = asyncio.ensure_future(self._spill())

    def drop(self, key: str) -> None:
        """Free an episode's calls and their files."""
        entry = self._entries.pop(key, None)
        for kept in entry.calls if entry is not None else ():
            self._forget(kept)
            if kept.place is not None:
                self._segments.free(kept.place)

    def clear(self) -> None:
        for key in list(self._entries):
            self.drop(key)

    # ---- the cache ----------------------------------------------------------------------------------------

    def _forget(self, kept: Kept) -> None:
        if self._cached.pop(id(kept), None) is not None and kept.data is not None:
            self._bytes -= len(kept.data)

    async def _spill(self) -> None:
        """Move what was not used for longest out of memory, until the bound holds."""
        try:
            while self._bytes > self._bound and self._cached:
                batch = self._oldest()
                places = await asyncio.to_thread(self._segments.write, [kept.data or b"" for kept in batch])
                for kept, place in zip(batch, places, strict=True):
                    if id(kept) in self._cached:
                        self._forget(kept)
                        kept.place, kept.data = place, None
                    else:
                        self._segments.free(place)  # it was freed while it was being written
        except OSError as error:
            # What cannot be written stays in memory: too much of it is better than a call that is lost.
            log.warning("ledgers cannot be moved out of memory: %s", error.strerror)
        finally:
            self._spilling = None

    def _oldest(self) -> list[Kept]:
        """So many as make a file."""
        batch: list[Kept] = []
        size = 0
        for kept in self._cached.values():
            if size >= SEGMENT_BYTES:
                break
            batch.append(kept)
            size += len(kept.data or b"")
        return batch


def assembled(sources: Sequence[Source]) -> Ledger:
    """The calls in full, in order. Raises Damaged, or `checkpoint_error` where a file cannot be read just now."""
    return Ledger([source.read() for source in sources])
