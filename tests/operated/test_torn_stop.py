"""A checkpoint that is to stop a stack and reaches some of its cells only: a stack is stopped as a whole or not at
all, and it is said which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects.kube import CHECKPOINTS, EVENTS, PODS
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_rig.virtual import now
from gym_rig.writes import at_any_write
from gym_servers.engine.rows import counter_rows
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import StorageError

CELLS = 2
SLOWLY = 2.0  # so that there is work left when a stop is over


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Cells whose records cannot be written."""
    create, cells = DirectoryStore.create, set[int]()

    def creating(self: DirectoryStore, key: str, data: bytes) -> None:
        if "manifest" in key and any(f"/cell-{index}/" in self.uri for index in cells):
            raise StorageError("the bucket is full")
        create(self, key, data)

    monkeypatch.setattr(DirectoryStore, "create", creating)
    return cells


def stack(tmp_path: Path, order: str = "OneByOne") -> dict[str, Any]:
    return {
        "cells": CELLS,
        "checkpoints": {"storage": {"directory": str(tmp_path / "checkpoints")}, "cellOrder": order},
    }


def stages(rig: OperatedRig) -> list[str]:
    return [rig.record(cell).get("stage", "") for cell in range(CELLS)]


def said(rig: OperatedRig) -> list[str]:
    events = [body for (kind, _, _), body in rig.kube.objects.items() if kind == EVENTS]
    return [event["message"] for event in events if event["reason"] == "GoingOn"]


async def goes_on(rig: OperatedRig) -> None:
    """All cells are at work, and nobody is closed."""
    await rig.until(lambda: stages(rig) == ["running"] * CELLS and rig.phases() == {"idle"}, "at work")
    assert "stoppedBy" not in rig.status()
    await rig.until(lambda: rig.conditions()["Ready"]["status"] == "True", "ready")


@pytest.mark.parametrize("order", ["OneByOne", "Together"])
@pytest.mark.parametrize("lost", [0, 1])
async def test_a_stop_that_failed_in_one_cell_sets_the_other_going_again(
    tmp_path: Path, full: set[int], lost: int, order: str
) -> None:
    async with operated(tmp_path, counter_rows(6, 1), rate=SLOWLY, **stack(tmp_path, order)) as rig:
        await rig.until(rig.all_in_service, "in service")
        full.add(lost)
        rig.checkpoint("last", stopAfter=True)
        await rig.until(lambda: "stopped" in stages(rig), "one stands stopped")
        await rig.until(lambda: rig.final("last"), "final")
        status = rig.status(CHECKPOINTS, "last")
        assert [part["phase"] for part in status["cells"]][lost] == "Failed"
        assert [part["phase"] for part in status["cells"]][1 - lost] == "Succeeded"
        assert status["message"].startswith(f"cell {1 - lost} published what their own recovery continues from")
        await goes_on(rig)
        assert [message for message in said(rig) if f"cell {1 - lost}" in message and "last" in message]
        assert max(rig.record(cell).get("attempt", 0) for cell in range(CELLS)) == 0, "the same processes go on"


async def test_a_stop_while_one_cell_is_down_sets_the_other_going_again(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(6, 1), rate=SLOWLY, **stack(tmp_path)) as rig:
        await rig.until(rig.all_in_service, "in service")
        rig.held_back.add(1)
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-env-1")
        await rig.until(lambda: not rig.in_service(cell=1), "down")
        rig.checkpoint("last", stopAfter=True)
        await rig.until(lambda: stages(rig)[0] == "stopped", "one stands stopped")
        began = now()
        await rig.until(lambda: rig.final("last"), "final")
        await rig.until(lambda: stages(rig)[0] == "running", "it goes on")
        assert now() - began < 120
        rig.held_back.clear()
        await goes_on(rig)


@pytest.mark.parametrize("died", [0, 1])
async def test_a_death_in_either_cell_of_a_stack_that_is_being_stopped_ends_it_stopped_or_at_work(
    tmp_path: Path, died: int
) -> None:
    async with operated(tmp_path, counter_rows(6, 1), rate=SLOWLY, **stack(tmp_path)) as rig:
        await rig.until(rig.all_in_service, "in service")
        rig.cell.network.latency = 0.1
        rig.checkpoint("last", stopAfter=True)
        await rig.until(lambda: stages(rig)[0] == "stopped", "one stands stopped")
        assert stages(rig)[1] == "running"
        rig.kube.remove(PODS, IDENTITY.namespace, f"rig-agent-{died}")
        await rig.until(lambda: rig.final("last"), "final")
        await ends_as_it_says(rig)


@at_any_write(20, 6)
async def test_c1_an_operator_killed_at_any_write_of_a_torn_stop_leaves_all_at_work(
    tmp_path: Path, full: set[int], write: int, after: bool
) -> None:
    async with operated(tmp_path, counter_rows(6, 1), rate=SLOWLY, **stack(tmp_path)) as rig:
        await rig.until(rig.all_in_service, "in service")
        full.add(1)
        began = now()
        await rig.replace_operator(
            write,
            lambda: rig.checkpoint("last", stopAfter=True),
            after=after,
            ended=lambda: rig.final("last") and now() - began > 30,
        )
        await rig.until(lambda: rig.final("last"), "final")
        full.clear()
        await ends_as_it_says(rig)


async def ends_as_it_says(rig: OperatedRig) -> None:
    status = rig.status(CHECKPOINTS, "last")
    if status["phase"] == "Succeeded":
        await rig.until(lambda: stages(rig) == ["stopped"] * CELLS, "all stand stopped")
        await rig.until(lambda: rig.status().get("stoppedBy") == "last", "and it is said")
    else:
        await goes_on(rig)
