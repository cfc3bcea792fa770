"""GymRestores that a test makes, and what became of them."""

from __future__ import annotations

from typing import Any

from gym_operator.api.restore import RESTORE_TERMINAL
from gym_operator.effects.kube import RESTORES
from gym_operator.rules.cell_record import from_document
from gym_rig import collecting
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig
from gym_servers.local.demo import account_of


async def taken(rig: OperatedRig, name: str, **spec: Any) -> dict[str, Any]:
    """The status of a checkpoint that succeeded, with more work in it than in the one before."""
    await rig.until(rig.in_service, "in service")
    effects = rig.cell.effects()
    await rig.until(lambda: rig.cell.effects() >= effects + 2, "it goes on")
    status = await collecting.taken(rig, name, **spec)
    assert status["phase"] == "Succeeded", status
    return status


def restore(rig: OperatedRig, name: str = "back", **spec: Any) -> None:
    whole = {"stackRef": {"name": IDENTITY.name}, **spec}
    rig.kube.put(RESTORES, IDENTITY.namespace, {"metadata": {"name": name}, "spec": whole})


async def final(rig: OperatedRig, name: str, phase: str) -> dict[str, Any]:
    await rig.until(lambda: rig.status(RESTORES, name).get("phase") in RESTORE_TERMINAL, f"{name} is final")
    status = rig.status(RESTORES, name)
    assert status["phase"] == phase, status
    return status


def sources(rig: OperatedRig) -> list[str | None]:
    """What each recovery of the first cell continued from."""
    return [each.get("checkpoint") for each in rig.status()["cells"][0].get("recoveries", ())]


def sources_of(rig: OperatedRig, cell: int) -> list[str | None]:
    return [each.get("checkpoint") for each in rig.part(cell).get("recoveries", ())]


async def to_the_end(rig: OperatedRig) -> None:
    """All rows are there, and no tool effect of the surviving history happened twice or not at all."""
    await rig.until(rig.complete, "complete")
    record = from_document(rig.record())
    assert record is not None
    counted = account_of(rig.cell.folder, record, collecting.ROWS)
    assert counted.ok, counted.problems
