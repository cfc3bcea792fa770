"""A checkpoint of a whole cell that a test takes itself, step by step, and what it finds there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gym_rig.cell import GRACE, Rig, cell
from gym_servers.coordination.checkpoint import Checkpoint, Progress, Request
from gym_servers.engine.rows import counter_rows
from gym_servers.protocol.phases import Phase
from gym_servers.storage.cells import directory_name
from gym_servers.storage.locate import join, open_store
from gym_servers.storage.manifest import CHECKPOINT, read_publication


@asynccontextmanager
async def collecting(folder: Path, rollouts: int = 3) -> AsyncIterator[Rig]:
    """A cell in the middle of its work."""
    async with cell(folder, counter_rows(rollouts, 2)) as rig:
        await rig.until(lambda: rig.effects() >= rollouts)
        yield rig


async def quiet(_: Progress) -> None:
    """Hears of a checkpoint's progress, and does nothing."""


def checkpoint(rig: Rig, name: str = "cp", tell: Any = quiet, **options: Any) -> Checkpoint:
    """A checkpoint that the test takes itself, so that no look goes on beside it."""
    record = rig.controller.record
    uri = join(rig.root, directory_name(record.attempt, 90, name))
    sessions = {participant: pin.session for participant, pin in record.pins.items()}
    request = Request(name, name, uri, "rig-uid", 0, record.attempt, 90, sessions, lease_grace=GRACE, **options)
    return Checkpoint([rig.client(one) for one in record.pins], request, open_store(uri), tell, rig.wall)


def phases(rig: Rig) -> set[Phase]:
    return {one.server.participant.gate.phase for one in rig.processes_by_name.values()}


def stored(rig: Rig) -> list[str]:
    """The states of the checkpoints in the bucket."""
    return sorted(read_publication(path.read_bytes()).state for path in Path(rig.root).rglob(CHECKPOINT))


def live(rig: Rig) -> list[str]:
    """The keys of the episodes at work."""
    return sorted(rig.participant("env")._live)


async def to_the_end(rig: Rig, rollouts: int = 3, continued: int | None = None) -> None:
    """All rows are there, right, and nothing was done twice."""
    await rig.until(rig.complete)
    counted = rig.account(rollouts)
    assert counted.problems == []
    assert (counted.rows, counted.reward_mean) == (rollouts, 1.0)
    if continued is not None:
        assert counted.continued == continued
