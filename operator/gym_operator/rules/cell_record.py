"""A cell's record as it stands in the stack's status, and back.

What comes back is compared with what was written to notice another operator, so both go through here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from gym_servers.coordination.record import CellRecord, Stage


def to_document(record: CellRecord) -> dict[str, Any]:
    """The record as JSON, without empty parts: status is read by people, and its size counts."""
    return record.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)


def from_document(document: Mapping[str, Any] | None) -> CellRecord | None:
    """The record, None where there is none. One that cannot be read raises ValueError: to begin anew instead would
    use attempt numbers twice."""
    if document is None:
        return None
    # An absent checkpoint is left out of the document, but the record wants it named.
    recoveries = [{"checkpoint": None, **recovery} for recovery in document.get("recoveries", ())]
    try:
        return CellRecord.model_validate({**document, "recoveries": recoveries})
    except ValidationError as error:
        raise ValueError("the cell's record in the status is not of a form this version reads") from error


def stopped_by(record: CellRecord | None) -> str | None:
    """The name of the checkpoint that a cell stands stopped under until somebody asks it to go on."""
    if record is None or record.stage is not Stage.STOPPED or record.stopped is None or not record.stopped.stays:
        return None
    return record.stopped.name


def how_to_go_on(checkpoint: str) -> str:
    """Why a stopped stack does not run, for people, and what to do about it."""
    return (
        f"checkpoint {checkpoint} stopped the stack; to go on from it set spec.suspend to true, and to false again "
        "once its phase is Suspended"
    )
