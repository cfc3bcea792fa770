"""A coordinator as a process of its own beside a cell: it looks again and again, and it can die at any moment.

Killed, nothing of it has any effect any more: its calls go nowhere, its storage and its record do not hear it. Its
successor knows what it had saved, and nothing else. A successor may come while it lives: then whoever finds that the
record was saved by somebody else ends, as an operator does whose write conflicts; until then both act.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from gym_rig.cell import Rig
from gym_rig.network import Alive
from gym_servers.coordination.cell_host import Process, View
from gym_servers.coordination.controller import CellController
from gym_servers.coordination.record import CellRecord
from gym_servers.storage.store import StorageError


class CoordinatorProcess:
    """Implements `CellHost` over a rig. `save_faults`: what becomes of its next saves, `before` they land or
    `after`."""

    def __init__(self, rig: Rig, record: CellRecord | None, look_seconds: float, **settings: Any) -> None:
        self.rig = rig
        self.alive = Alive("coordinator")
        self.save_faults: list[Literal["before", "after"]] = []
        self.view: View | None = None
        self._look_seconds = look_seconds
        self._saves_known = len(rig.saved)
        self.controller = CellController(
            self,
            rig.cell_settings(**settings),
            rig.opener(self.alive),
            rig.network.client(self.alive),
            record,
            wall=rig.wall,
        )
        self.looking = asyncio.get_running_loop().create_task(self._look(), context=self.alive.context())

    async def _look(self) -> None:
        while True:
            with suppress(StorageError, ConnectionError):  # the next look decides again
                self.view = await self.controller.look()
            await asyncio.sleep(self._look_seconds)

    @property
    def is_behind(self) -> bool:
        """Whether somebody else has saved the record since: its own next save ends it."""
        return self._saves_known != len(self.rig.saved)

    def kill(self) -> None:
        self.alive.kill()

    async def processes(self) -> Sequence[Process]:
        await self._living()
        return await self.rig.processes()

    async def end(self, processes: Mapping[str, str]) -> None:
        await self._living()
        await self.rig.end(processes)

    async def save(self, record: CellRecord) -> None:
        await asyncio.sleep(0.005)
        if self.is_behind:
            self.kill()
        await self._living()
        fault = self.save_faults.pop(0) if self.save_faults else None
        if fault == "before":
            raise ConnectionError("the record was not saved")
        await self.rig.save(record)
        self._saves_known = len(self.rig.saved)
        if fault == "after":
            raise ConnectionError("the record was saved, but the answer was lost")

    async def announce(self, level: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        await self._living()
        await self.rig.announce(level, reason, message)

    async def _living(self) -> None:
        if self.alive.died.is_set():
            await asyncio.get_running_loop().create_future()
