"""What becomes of the data of a GymCheckpoint that is deleted: when it is held, when it is removed, when given up."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from gym_operator.api.checkpoint import CheckpointStatus
from gym_operator.rules.checkpoint_entries import Entry
from gym_servers.stack.durations import LONGEST_SECONDS
from gym_servers.storage.removal import Claim
from gym_servers.storage.store import StorageProblem

PATIENCE_SECONDS: Final = 600.0
"""How long a storage that does not answer may hold an object up; then its data is left where it is."""
NO_WAY_IN_SECONDS: Final = 60.0
"""As above, where the credentials are gone: with the namespace, most likely."""

SAFE_SECONDS: Final = 3600.0
"""How long after its end nobody is left who might still write or read for a checkpoint: more than a request to a
bucket takes with all its repeats."""
LONGEST_WRITE_SECONDS: Final = LONGEST_SECONDS + SAFE_SECONDS
"""The same where it is not known how long its servers were given for their records."""


class Duty(StrEnum):
    """What is to be done about a GymCheckpoint beside taking it."""

    TIE = "tie"
    """Put our finalizer on: its data is to go with it."""
    LOOSE = "loose"
    """Take our finalizer off: its data is to stay."""
    DISPOSE = "dispose"
    """Remove its data, then take our finalizer off."""
    OBSERVE = "observe"
    """Say that a change of how it is kept has been seen."""
    CLEAR = "clear"
    """Remove what it has left in storage: it has failed, and its stack is gone."""


def duty_of(entry: Entry) -> Duty | None:
    """What is to be done now; None where nothing is."""
    if entry.deleting:
        # One that is being taken is given up first: whoever takes it brings it to an end.
        return Duty.DISPOSE if entry.tied and entry.over else None
    if entry.tied != (entry.policy == "Delete"):
        return Duty.LOOSE if entry.tied else Duty.TIE
    if entry.final and entry.observed != entry.generation:
        return Duty.OBSERVE
    return None


def is_dead(entry: Entry, now: float) -> bool:
    """Whether what was written for the parts of a checkpoint that failed can serve nobody any more."""
    lost = any(not part.published for part in entry.parts)
    over = entry.phase == "Failed" and not entry.deleting and not entry.adopted and entry.ended is not None
    return over and lost and now >= (entry.ended or 0.0) + entry.commit_seconds + SAFE_SECONDS


def claims_of(status: CheckpointStatus, uid: str) -> list[tuple[str, Claim]]:
    """What is to be removed with the GymCheckpoint of this UID: where, and what proves that it is its own."""
    if status.stack_uid is None or status.checkpoint_id is None:
        return []
    return [
        (cell.uri, Claim(status.stack_uid, status.checkpoint_id, cell.digest, uid))
        for cell in status.cells
        if cell.uri is not None
    ]


def written_until(entry: Entry) -> float:
    """When the last of what was never published is written, in Unix seconds: its servers may still be at it."""
    return (entry.ended or 0.0) + min(entry.commit_seconds, PATIENCE_SECONDS)


def gives_up(failing_for: float, problem: StorageProblem) -> bool:
    """Whether a storage has failed for long enough, in seconds."""
    gone = problem is StorageProblem.CREDENTIALS_MISSING
    return failing_for >= (NO_WAY_IN_SECONDS if gone else PATIENCE_SECONDS)
