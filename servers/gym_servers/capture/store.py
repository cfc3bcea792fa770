"""The ledgers of one process: small heads always in memory, tokens and replies in a bounded cache, the rest on disk.

A delivered call never changes, so it is written at most once, into a file of its own that appears whole or not at
all. Files are this process's alone: what a dead one left is of no use, since a fresh one restores a checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gym_servers.capture.ledger import CallRecord, Ledger, decode, encode
from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError

log = logging.getLogger("gym_servers")

PREFIX = "gym-ledgers-"
STRIPES = 64  # locks for all keys together: their number must not grow with the rollouts
CACHE_BYTES = 256 * 1024 * 1024
OVERHEAD_BYTES = 1024  # of a call besides its arrays and its reply, roughly


@dataclass
class _File:
    path: Path
    digest: str


@dataclass(eq=False)
class Kept:
    """One call: what it is found by, and the rest where it is now - in memory, in a file, or in both."""

    position: str
    digest: str
    parent: str
    turn: str
    chain: str
    size: int
    record: CallRecord | None
    file: _File | None = None


@dataclass
class _Entry:
    calls: list[Kept] = field(default_factory=list)
    by_position: dict[str, Kept] = field(default_factory=dict)
    by_turn: dict[str, Kept] = field(default_factory=dict)


class LedgerStore:
    """Ledgers by capture key. `cache_bytes` bounds what tokens and replies take in memory; `folder` is where the rest
    goes, a temporary one by default, made when it is first needed."""

    def __init__(self, cache_bytes: int = CACHE_BYTES, folder: Path | None = None) -> None:
        self._bound, self._folder = cache_bytes, folder
        self._own: Path | None = None
        self._entries: dict[str, _Entry] = {}
        self._cached: OrderedDict[int, tuple[str, Kept]] = OrderedDict()  # least recently used first
        self._bytes = 0
        self._locks = tuple(asyncio.Lock() for _ in range(STRIPES))
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

    def parent(self, key: str, turns: tuple[str, ...]) -> Kept | None:
        """The call whose reply a conversation goes on from: the latest of its turns that we gave."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        return next((kept for turn in reversed(turns) if (kept := entry.by_turn.get(turn)) is not None), None)

    def calls(self, key: str) -> list[Kept]:
        entry = self._entries.get(key)
        return list(entry.calls) if entry is not None else []

    async def record(self, key: str, kept: Kept) -> CallRecord:
        """A call in full. Raises `checkpoint_error` where its file cannot be used."""
        if kept.record is not None:
            self._use(kept)
            return kept.record
        async with self._lock(key):
            record = kept.record
            if record is None:
                assert kept.file is not None  # what is not in memory was written first
                record = kept.record = await asyncio.to_thread(_read, kept.file)
                self._cache(key, kept)
        return record

    async def ledger(self, key: str) -> Ledger:
        """All calls of an episode in full; no waiting where all are in memory."""
        return Ledger([kept.record or await self.record(key, kept) for kept in self.calls(key)])

    # ---- keeping ------------------------------------------------------------------------------------------

    def append(self, key: str, record: CallRecord) -> Kept:
        """A call was delivered."""
        size = 4 * (len(record.prompt_ids) + 2 * len(record.ids)) + _size(record) + OVERHEAD_BYTES
        kept = Kept(record.position, record.digest, record.parent, record.turn, record.chain, size, record)
        entry = self._entries.setdefault(key, _Entry())
        entry.calls.append(kept)
        if kept.position:
            entry.by_position[kept.position] = kept
        if kept.turn:
            entry.by_turn[kept.turn] = kept
        self._cache(key, kept)
        return kept

    def install(self, key: str, ledger: Ledger) -> None:
        for record in ledger.calls:
            self.append(key, record)

    def drop(self, key: str) -> None:
        """Free an episode's calls and their files."""
        entry = self._entries.pop(key, None)
        for kept in entry.calls if entry is not None else ():
            self._forget(kept)
            if kept.file is not None:
                kept.file.path.unlink(missing_ok=True)

    def clear(self) -> None:
        for key in list(self._entries):
            self.drop(key)
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._own = None

    # ---- the cache ----------------------------------------------------------------------------------------

    def _lock(self, key: str) -> asyncio.Lock:
        return self._locks[hash(key) % STRIPES]

    def _cache(self, key: str, kept: Kept) -> None:
        self._cached[id(kept)] = (key, kept)
        self._bytes += kept.size
        if self._bytes > self._bound and self._spilling is None:
            self._spilling = asyncio.ensure_future(self._spill())

    def _use(self, kept: Kept) -> None:
        if id(kept) in self._cached:
            self._cached.move_to_end(id(kept))

    def _forget(self, kept: Kept) -> None:
        if self._cached.pop(id(kept), None) is not None:
            self._bytes -= kept.size

    async def _spill(self) -> None:
        """Move what was not used for longest out of memory, until the bound holds."""
        try:
            while self._bytes > self._bound and self._cached:
                key, kept = next(iter(self._cached.values()))
                async with self._lock(key):
                    if kept.file is None and kept.record is not None:
                        data = encode(key, Ledger([kept.record]))
                        kept.file = await asyncio.to_thread(_write, self._place(), data)
                self._forget(kept)
                kept.record = None
                if key not in self._entries or kept not in self._entries[key].calls:
                    assert kept.file is not None
                    kept.file.path.unlink(missing_ok=True)  # it was freed while it was being written
        except OSError as error:
            # What cannot be written stays in memory: too much of it is better than a call that is lost.
            log.warning("ledgers cannot be moved out of memory: %s", error.strerror)
        finally:
            self._spilling = None

    def _place(self) -> Path:
        if self._own is None:
            parent = self._folder or Path(tempfile.gettempdir())
            parent.mkdir(parents=True, exist_ok=True)
            for left in parent.glob(f"{PREFIX}*"):
                if _is_left_over(left.name):
                    shutil.rmtree(left, ignore_errors=True)
            self._own = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
        return self._own


def _is_left_over(name: str) -> bool:
    """Whether a folder is of a process that has ended: one is killed without notice, and cleans nothing up."""
    number = name.removeprefix(PREFIX).partition("-")[0]
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OSError):
        return False
    return False


def _size(record: CallRecord) -> int:
    """About what a reply takes: its texts."""
    output = record.response.get("output")
    return len(str(output)) if output is not None else 0


def _write(folder: Path, data: bytes) -> _File:
    path = folder / uuid.uuid4().hex
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    return _File(path, sha256(data))


def _read(file: _File) -> CallRecord:
    try:
        data = file.path.read_bytes()
    except OSError as error:
        raise ProtocolError("checkpoint_error", f"a ledger's file cannot be read: {error.strerror}") from error
    if sha256(data) != file.digest:
        raise ProtocolError("checkpoint_error", "a ledger's file does not match its digest")
    _, ledger = decode(file.path.name, data)
    return ledger.calls[0]
