"""What is said of a restore while it goes on and when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_operator.api.restore import RestoreStatus


def status_of(body: Mapping[str, Any]) -> RestoreStatus:
    """The status of a GymRestore, also of one that this version would refuse."""
    return RestoreStatus.model_validate(body.get("status") or {})


def progress_of(body: Mapping[str, Any]) -> str:
    """A line about one that goes on."""
    status = status_of(body)
    return f"{status.phase or 'Pending'}: {status.message or 'waits for the operator'}"


def outcome_of(body: Mapping[str, Any]) -> str:
    """A line about one that has succeeded."""
    status = status_of(body)
    name = status.checkpoint.name if status.checkpoint is not None else "the checkpoint"
    attempts = ", ".join(f"cell {cell.index} under attempt {cell.attempt}" for cell in status.cells)
    return f"rollouts that continue from {name}: {status.continued_count}; {attempts}"


def failure_of(body: Mapping[str, Any]) -> str:
    """Why one has failed."""
    status = status_of(body)
    return ": ".join(text for text in (status.reason, status.message) if text) or "without a reason"
