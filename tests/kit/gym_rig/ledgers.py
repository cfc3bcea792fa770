"""Calls that a model server keeps in files: until they are there, while they are read, and hurt."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gym_rig.virtual import settle
from gym_servers.capture import segments, store
from gym_servers.capture.segments import Place
from gym_servers.capture.store import LedgerStore


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
