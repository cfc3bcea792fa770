"""The local runner around its cell: what it says, and when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gym_servers.coordination.checkpoint import CheckpointFailed
from gym_servers.coordination.record import CellRecord
from gym_servers.local import runner as module
from gym_servers.storage.store import StorageError


class Cell:
    """Stands for a runner's cell: its checkpoints fail one after the other, and then it is complete."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.record = CellRecord()

    async def run(self, watch: Any) -> None:
        while True:
            await watch(SimpleNamespace(record=self.record))
            await asyncio.sleep(1)

    async def checkpoint(self, name: str) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def progress(self) -> dict[str, int]:
        return {"rows": 1, "expected": 1, "ended": int(not self.failures)}


def runs(monkeypatch: pytest.MonkeyPatch, cell: Cell) -> None:
    @asynccontextmanager
    async def running(*_: Any) -> AsyncIterator[Cell]:
        yield cell

    monkeypatch.setattr(module, "running", running)


async def test_a_checkpoint_that_fails_is_said_and_the_next_one_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it was given up, or could not even begin."""
    said: list[tuple[str, str, str]] = []
    runs(monkeypatch, Cell(StorageError("the disk is full"), CheckpointFailed("Refused", "no")))
    assert await module.up(SimpleNamespace(), tmp_path, lambda *words: said.append(words), every=10)  # type: ignore[arg-type]
    assert said[:2] == [("Warning", "StorageError", "the disk is full"), ("Warning", "Refused", "no")]
