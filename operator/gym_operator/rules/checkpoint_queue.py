"""Which of a stack's GymCheckpoints is next, and what to do about each cell's part of it. One checkpoint at a time,
in order of creation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gym_operator.api.checkpoint import CheckpointPhase, CheckpointStatus
from gym_operator.api.conditions import AnyReason, ConditionReason
from gym_operator.rules.checkpoint_phases import OPEN
from gym_servers.coordination.record import Stage

PATIENCE_SECONDS: Final = 60.0
"""How long a checkpoint waits for something that only a person can mend, and how long all other cells' parts wait for
the last cells."""


Obstacle = tuple[AnyReason, str]
"""What only a person can mend: in a word, and for people."""


@dataclass(frozen=True)
class Situation:
    """A cell, as far as a checkpoint depends on it. `open_id` is the checkpoint that the cell's record has open;
    `given_up`: the record says that it must not be published any more. `obstacle` is what only a person can mend, and
    the reason for it; `free`: nothing else goes on in the cell. `storage_proved`: it was found to do what checkpoints
    stand on. `elsewhere`: another operator is at work on the cell, and has the say about its part."""

    enabled: bool
    stage: Stage | None
    free: bool
    open_id: str | None
    obstacle: Obstacle | None
    storage_proved: bool = True
    elsewhere: bool = False
    given_up: bool = False


@dataclass(frozen=True)
class Take:
    """Begin it."""


@dataclass(frozen=True)
class Adopt:
    """The record has it open although its status does not say so yet: write that first."""


@dataclass(frozen=True)
class Resolve:
    """It was begun by an operator that is gone, and the record has no part of it any more: what landed in storage is
    the truth."""


@dataclass(frozen=True)
class Forsake:
    """Let the record, which has it open, say that it is not to be published any more."""


@dataclass(frozen=True)
class Hold:
    """Nothing to do yet. `reason` is None where its status says enough."""

    reason: AnyReason | None = None
    message: str = ""


@dataclass(frozen=True)
class Fail:
    """Give it up."""

    reason: AnyReason
    message: str


Move = Take | Adopt | Resolve | Forsake | Hold | Fail


def in_order(checkpoints: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """GymCheckpoints as the API server holds them, oldest first; names decide within a second."""
    return sorted(checkpoints, key=lambda each: (each["metadata"]["creationTimestamp"], each["metadata"]["name"]))


def hinders(situation: Situation, last: bool, *, unwanted: bool = False) -> bool:
    """Whether time runs against a part. `last`: other parts are done, and nothing is left that could be done but to
    wait for this one. `unwanted`: its GymCheckpoint was deleted."""
    if situation.elsewhere:
        return False
    return unwanted or situation.obstacle is not None or (last and situation.stage is not Stage.RUNNING)


def next_move(
    phase: CheckpointPhase,
    id: str,
    hindered: float,
    situation: Situation,
    *,
    last: bool = False,
    unwanted: bool = False,
) -> Move:
    """What to do about a cell's part of the first in the queue. `hindered`: for how many seconds something in
    `hinders` has been so."""
    if not situation.enabled:
        return Fail(
            ConditionReason.CHECKPOINTS_DISABLED,
            "checkpoints are turned off in this stack; set spec.checkpoints.enabled and create another GymCheckpoint",
        )
    if situation.elsewhere:
        return Hold()
    if phase in OPEN:
        # What the record has open is settled by the cell's controller, which knows what may still be published.
        is_open = situation.open_id == id
        if unwanted and hindered > PATIENCE_SECONDS:
            if is_open and not situation.given_up:
                return Forsake()
            # Nobody publishes it any more: a deletion does not wait for a storage that takes no tombstone.
            return Fail(ConditionReason.DELETED, "the GymCheckpoint was deleted before it was finished")
        return Hold() if is_open else Resolve()
    if situation.open_id == id:
        return Adopt()
    if situation.obstacle is not None:
        reason, message = situation.obstacle
        return Fail(reason, message) if hindered > PATIENCE_SECONDS else Hold(reason, message)
    if situation.stage is not Stage.RUNNING:
        if last and hindered > PATIENCE_SECONDS:
            message = "the cell was not in service, and all others are done"
            return Fail(ConditionReason.STACK_NOT_READY, message)
        return Hold(ConditionReason.STACK_NOT_READY, "waits until the stack runs")
    if not situation.storage_proved:
        return Hold(ConditionReason.STORAGE_UNPROVED, "waits until the storage has been tried")
    return Take() if situation.free else Hold(ConditionReason.QUEUED, "waits for what goes on in the stack")


def without_stack(status: CheckpointStatus, stack: str, age: float) -> Hold | Fail:
    """What to do about a checkpoint whose stack does not exist. `age` in seconds."""
    if status.phase in OPEN:
        return Fail(ConditionReason.STACK_NOT_FOUND, f"GymStack {stack} was deleted while it was being taken")
    message = f"there is no GymStack {stack} in this namespace; create it, or name another in a new GymCheckpoint"
    if age > PATIENCE_SECONDS:
        return Fail(ConditionReason.STACK_NOT_FOUND, message)
    return Hold(ConditionReason.STACK_NOT_FOUND, message)
