"""A stack that runs on this machine as processes of its own while a test does something to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from gym_servers.coordination.cell_host import View
from gym_servers.coordination.record import Stage
from gym_servers.local.runner import Runner, running
from gym_servers.local.stack import local_stack


@dataclass
class Followed:
    """A runner that looks, the task in which it does, and what it has announced so far."""

    runner: Runner
    loop: asyncio.Task[None]
    said: list[tuple[str, str]]


@asynccontextmanager
async def followed(document: dict[str, Any], folder: Path) -> AsyncIterator[Followed]:
    """Run a manifest in `folder`; its processes are ended on the way out."""
    said: list[tuple[str, str]] = []

    async def watch(_: View) -> None:
        return None

    async with running(
        local_stack(document, folder), folder, lambda _, reason, text: said.append((reason, text))
    ) as runner:
        loop = asyncio.create_task(runner.run(watch))
        try:
            yield Followed(runner, loop, said)
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)


@dataclass
class LocalRun:
    """What a test waits for. `patience` and `pause` in seconds."""

    patience: ClassVar[float] = 100.0
    pause: ClassVar[float] = 0.05

    folder: Path
    cell: Followed
    rollouts: int

    @property
    def runner(self) -> Runner:
        return self.cell.runner

    @property
    def said(self) -> list[tuple[str, str]]:
        return self.cell.said

    async def until(self, what: str, condition: Callable[[], object]) -> None:
        """Poll a condition; fails with where the run stood."""
        give_up = time.monotonic() + self.patience
        while not condition():
            if self.cell.loop.done():
                self.cell.loop.result()
            record = self.runner.controller.record
            if record.stage is Stage.STALLED or time.monotonic() > give_up:
                raise AssertionError(f"{what}: {record.stage}, {self.runner.progress()}, {self.said[-8:]}")
            await asyncio.sleep(self.pause)

    async def in_service(self, attempt: int) -> None:
        def holds() -> bool:
            record = self.runner.controller.record
            return record.stage is Stage.RUNNING and record.attempt >= attempt

        await self.until(f"attempt {attempt}", holds)
