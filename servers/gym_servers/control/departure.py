"""When a process ends that was told to (SIGTERM).

At once, by itself: what it holds is in a checkpoint or it is not. Where whoever ends it leaves it time, a process in
service waits for a last checkpoint that stops it. So a pod that somebody deletes, or that is evicted, costs nothing:
its coordinator sees that it is about to go, and takes that checkpoint meanwhile.

It waits for as long as a checkpoint is open, whoever takes it, and for `AWAITED_SECONDS` where none is; it ends when
its coordinator has no use for it any more (`end`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from gym_servers.control.plane import ControlPlane
from gym_servers.protocol.phases import Phase

AWAITED_SECONDS = 30.0
"""How long a last checkpoint may take to begin: its coordinator may be at another one, or just be started again."""


class Departure:
    """The end of one process. `patient`: whoever ends it leaves it time."""

    def __init__(self, plane: ControlPlane, *, patient: bool) -> None:
        self._plane, self._patient = plane, patient
        self._told = False
        self._parking: asyncio.Task[None] | None = None

    def told(self) -> Coroutine[Any, Any, None] | None:
        """What is to be waited for now that it was told to end; None where nothing is. Told again it waits for no
        checkpoint."""
        again, self._told = self._told, True
        waits = self._patient and not again and not self._plane.dismissed and self._in_service()
        if not waits:
            self._park()
            return self._parked() if self._parking is not None else None
        return self._wait()

    def _in_service(self) -> bool:
        """Whether a checkpoint of it would hold what none does yet."""
        gate = self._plane.gate
        return (gate.is_open or gate.checkpoint_open) and not self._plane.stopped

    async def _wait(self) -> None:
        plane = self._plane
        while not plane.dismissed:
            if plane.gate.checkpoint_open:
                self._park()  # a resume takes it back
                await plane.gate.wait_change()
            elif plane.gate.phase is not Phase.IDLE or not await self._begins():
                break
        self._park()
        await self._parked()

    async def _begins(self) -> bool:
        """Whether a checkpoint begins in time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(AWAITED_SECONDS):
                await self._plane.gate.wait_until(lambda: self._plane.dismissed or not self._plane.gate.is_open)
        return self._plane.dismissed or not self._plane.gate.is_open

    def _park(self) -> None:
        parking = self._plane.parking()
        if parking is not None:
            self._parking = asyncio.ensure_future(parking)

    async def _parked(self) -> None:
        if self._parking is not None:
            await asyncio.shield(self._parking)
