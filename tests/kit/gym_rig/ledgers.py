"""Calls that a model server keeps in files: until they are there, while they are read, and hurt."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import pytest

from gym_rig.virtual import settle
from gym_servers.capture import segments, store
from gym_servers.capture.segments import Place
from gym_servers.capture.store import Kept, LedgerStore


async def spilled(ledgers: LedgerStore) -> None:
    """Until what is more than the cache's bound is in files."""
    await settle()
    while ledgers._spilling is not None:  # noqa: ASYNC110 - another's work
        await asyncio.sleep(0.01)


class HeldReads:
    """No file is read before `go_on`; `begun` ends once somebody wants to. No time passes in between."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._begun, self._go_on = asyncio.Event(), threading.Event()
        self.begun, self.go_on = self._begun.wait, self._go_on.set
        loop = asyncio.get_running_loop()

        def late(place: Place) -> bytes:
            loop.call_soon_threadsafe(self._begun.set)
            assert self._go_on.wait(30)
            return segments.read(place)

        monkeypatch.setattr(store, "read", late)


def hurt(ledgers: LedgerStore, kept: Kept, how: str) -> set[str]:
    """Damage the file that a call is in, in one of these ways; the capture keys of those that lose calls by it."""
    assert kept.place is not None
    path, at, end = kept.place.segment.path, kept.place.offset, kept.place.offset + kept.place.size
    whole = path.read_bytes()
    first, last = HURTS[how](path, whole, at, end)
    return {
        key
        for key in ledgers
        for one in ledgers.calls(key)
        if (place := one.place) is not None
        and place.segment is kept.place.segment
        and place.offset < last
        and place.offset + place.size > first
    }


def _changed(path: Path, whole: bytes, at: int, end: int) -> tuple[int, int]:
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    return at, at + 1


def _cut(path: Path, whole: bytes, at: int, end: int) -> tuple[int, int]:
    path.write_bytes(whole[: end - 1])
    return end - 1, len(whole)


def _removed(path: Path, whole: bytes, at: int, end: int) -> tuple[int, int]:
    path.unlink()
    return 0, len(whole)


def _unreadable(path: Path, whole: bytes, at: int, end: int) -> tuple[int, int]:
    path.unlink()
    path.mkdir()
    return 0, len(whole)


HURTS: Final[Mapping[str, Callable[[Path, bytes, int, int], tuple[int, int]]]] = {
    "changed": _changed,
    "cut": _cut,
    "removed": _removed,
    "unreadable": _unreadable,
}
"""What happens to a file, given what is in it and where one call is: from where to where its bytes are gone."""
