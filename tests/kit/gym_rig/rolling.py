"""What tests of planned replacements look at: where a cell stands, what its attempts continued from, what is told."""

from __future__ import annotations

from gym_operator.rules.cell_record import from_document
from gym_rig.operated import OperatedRig
from gym_servers.coordination.record import Recovery

SLOW = 12.0  # tokens a second: work is left when something happens


def recoveries(rig: OperatedRig, cell: int = 0) -> list[Recovery]:
    record = from_document(rig.record(cell))
    return record.recoveries if record is not None else []


def stage(rig: OperatedRig) -> str:
    """Where the first cell is: the stage that all begin in is not written down."""
    return str(rig.record().get("stage", "starting"))


def sources(rig: OperatedRig, cell: int = 0) -> list[str]:
    """The checkpoints that a cell's attempts continued from, by name."""
    return [one.checkpoint.name if one.checkpoint is not None else "the input" for one in recoveries(rig, cell)]


def up_to_date(rig: OperatedRig) -> tuple[str, str, str]:
    found = rig.conditions().get("UpToDate", {})
    return str(found.get("status")), str(found.get("reason")), str(found.get("message", ""))


def nothing_was_done_twice(rig: OperatedRig) -> None:
    """Where everything continues from a cut behind which nobody worked, each tool is called once."""
    calls = [entry["call_id"] for entry in rig.cell.journal() if entry["kind"] == "effect"]
    assert len(calls) == len(set(calls))
