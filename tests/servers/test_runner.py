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
from gym_servers.coordination.record import CellRecord, Stage
from gym_servers.local import runner as module
from gym_servers.local.demo import manifest
from gym_servers.local.stack import local_stack
from gym_servers.storage.store import StorageError


class Cell:
    """Stands for a runner's cell: its checkpoints fail one after the other, and then it is complete."""

    def __init__(self, *failures: Exception) -> None:
        self.failures = list(failures)
        self.record = CellRecord()
        self.counts = {"rows": 1, "expected": 1}

    async def run(self, watch: Any) -> None:
        while True:
            await watch(SimpleNamespace(record=self.record))
            await asyncio.sleep(1)

    async def checkpoint(self, name: str) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def progress(self) -> dict[str, int]:
        return {**self.counts, "ended": int(not self.failures)}

    @property
    def controller(self) -> Cell:
        return self


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
    warned = [words for words in said if words[0] == "Warning"]
    assert warned == [("Warning", "StorageError", "the disk is full"), ("Warning", "Refused", "no")]


@pytest.mark.parametrize("stage", Stage)
async def test_a_run_that_goes_on_in_its_folder_is_another_try(tmp_path: Path, stage: Stage) -> None:
    """Also where the one before had given up, which is said; and what it recovers from is no failure."""
    said: list[tuple[str, str, str]] = []
    document = manifest(tmp_path, "http://127.0.0.1:1", tmp_path / "tasks.jsonl", 1)
    document["spec"]["recovery"] = {"backoffLimit": 0}
    record = CellRecord(stage=stage, attempt=3, failures=1)
    (tmp_path / "cell.json").write_text(record.model_dump_json(by_alias=True))
    async with module.running(local_stack(document, tmp_path), tmp_path, lambda *words: said.append(words)) as runner:
        continued = runner.controller.record
        assert continued.stage is (Stage.RUNNING if stage is Stage.STALLED else stage)
        assert (continued.attempt, continued.failures) == (3, -1)
    assert [reason for _, reason, _ in said] == (["TriedAgain"] if stage is Stage.STALLED else [])


async def test_a_run_that_is_complete_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[tuple[str, str, str]] = []
    cell = Cell()
    cell.counts = {"rows": 3, "expected": 3, "failed": 0}
    runs(monkeypatch, cell)
    assert await module.up(SimpleNamespace(), tmp_path, lambda *words: said.append(words), every=None)  # type: ignore[arg-type]
    assert said[-1][:2] == ("Normal", "Complete")
    assert said[-1][2].startswith("all 3 rows are there")


@pytest.mark.parametrize(
    ("stage", "says"),
    [
        (Stage.STALLED, "1 of 3 rows are there; the cell has given up: correct what ends its servers"),
        (Stage.RUNNING, "1 of 3 rows are there, 2 rollouts failed"),
    ],
)
async def test_a_run_that_ends_before_all_rows_are_there_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: Stage, says: str
) -> None:
    said: list[tuple[str, str, str]] = []
    cell = Cell()
    cell.record = CellRecord(stage=stage)
    cell.counts = {"rows": 1, "expected": 3, "failed": 2}
    runs(monkeypatch, cell)
    assert not await module.up(SimpleNamespace(), tmp_path, lambda *words: said.append(words), every=None)  # type: ignore[arg-type]
    assert said[-1][:2] == ("Warning", "Incomplete")
    assert said[-1][2].startswith(says)
