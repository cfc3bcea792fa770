"""Conditions: what holds of an object now, for people, `kubectl wait` and GitOps tools.

`Ready` speaks for the long-lived stack and schedule, `Succeeded` for the one-time checkpoint and restore. `Stalled`
is set when an object will not get further by itself: without it, tools wait for a failed object for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from gym_operator.api.objects import StatusModel, Timestamp, clip, format_time
from gym_servers.storage.store import StorageProblem

ConditionStatus = Literal["True", "False", "Unknown"]


class ConditionType(StrEnum):
    """The conditions in use."""

    READY = "Ready"
    RECOVERING = "Recovering"
    CHECKPOINTING = "Checkpointing"
    STORAGE_READY = "StorageReady"
    SUCCEEDED = "Succeeded"
    STALLED = "Stalled"
    UP_TO_DATE = "UpToDate"
    ENGINE_READY = "EngineReady"


class ConditionReason(StrEnum):
    """Why a condition has its status: one word for programs, next to a message for people."""

    # The stack
    INVALID_SPEC = "InvalidSpec"
    NAME_CONFLICT = "NameConflict"
    PODS_STARTING = "PodsStarting"
    RUNNING = "Running"
    COLLECTION_COMPLETE = "CollectionComplete"
    SUSPENDED = "Suspended"
    STOPPED_BY_CHECKPOINT = "StoppedByCheckpoint"
    GOING_ON = "GoingOn"
    PARTICIPANT_DIED = "ParticipantDied"
    RESTORING = "Restoring"
    RECOVERED = "Recovered"
    RESTARTED_FROM_INPUT = "RestartedFromInput"
    CODE_MISMATCH = "CodeMismatch"
    RECOVERY_HELD = "RecoveryHeld"
    UP_TO_DATE = "UpToDate"
    ROLLING_OUT = "RollingOut"
    PODS_NOT_STARTING = "PodsNotStarting"
    BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
    CONTROL_SECRET_INVALID = "ControlSecretInvalid"
    # Its engine
    ENGINE_SERVES = "EngineServes"
    ENGINE_NOT_READY = "EngineNotReady"
    # Its storage: these, and what is wrong with it in the words of StorageProblem.
    STORAGE_UNPROVED = "StorageUnproved"
    STORAGE_REACHABLE = "StorageReachable"
    CHECKPOINTS_DISABLED = "CheckpointsDisabled"
    CHECKPOINT_RUNNING = "CheckpointRunning"
    IDLE = "Idle"
    # A checkpoint
    QUEUED = "Queued"
    IN_PROGRESS = "InProgress"
    PUBLISHED = "Published"
    STACK_NOT_FOUND = "StackNotFound"
    STACK_NOT_READY = "StackNotReady"
    PREPARE_TIMED_OUT = "PrepareTimedOut"
    COMMIT_FAILED = "CommitFailed"
    PUBLISH_FAILED = "PublishFailed"
    PARTICIPANT_REFUSED = "ParticipantRefused"
    ABANDONED = "Abandoned"
    SOURCE_INVALID = "SourceInvalid"
    DELETED = "Deleted"
    HELD = "Held"
    REMOVING = "Removing"
    # A restore
    CHECKPOINT_NOT_FOUND = "CheckpointNotFound"
    CHECKPOINT_NOT_READY = "CheckpointNotReady"
    CHECKPOINT_FAILED = "CheckpointFailed"
    CHECKPOINT_DELETED = "CheckpointDeleted"
    MISFIT = "Misfit"
    RECORDS_REFUSED = "RecordsRefused"
    RESTORED = "Restored"
    SUPERSEDED = "Superseded"
    # A schedule
    SCHEDULED = "Scheduled"
    OVERLAP = "Overlap"
    TOO_LATE = "TooLate"


AnyReason = ConditionReason | StorageProblem
"""Also what is wrong with a storage, which has words of its own."""


class Condition(StatusModel):
    """One observation of an object."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    """What is observed."""
    status: ConditionStatus
    """Whether it holds."""
    reason: Annotated[str, StringConstraints(pattern=r"^[A-Z][A-Za-z0-9]*$", max_length=128)]
    """Why, in one word."""
    message: Annotated[str, StringConstraints(max_length=1024)] = ""
    """Why, for people."""
    last_transition_time: Timestamp
    """Since when the status is what it is."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """The generation of the spec this was observed for."""


def set_condition(
    conditions: Sequence[Condition],
    type: ConditionType,
    status: ConditionStatus,
    reason: ConditionReason,
    message: str,
    observed_generation: int,
    now: float,
) -> tuple[Condition, ...]:
    """The conditions with one of them replaced or added; the others keep their place.

    `now` is in Unix seconds. The transition time moves only when the status changes, so that it says how long
    a state has lasted however often the same is observed.
    """
    old = get_condition(conditions, type)
    unchanged = old is not None and old.status == status
    new = Condition(
        type=type.value,
        status=status,
        reason=reason.value,
        message=clip(message),
        last_transition_time=old.last_transition_time if old and unchanged else format_time(now),
        observed_generation=observed_generation,
    )
    if old is None:
        return (*conditions, new)
    return tuple(new if condition.type == type else condition for condition in conditions)


def get_condition(conditions: Sequence[Condition], type: ConditionType) -> Condition | None:
    """The condition of a type, if it has been observed."""
    return next((condition for condition in conditions if condition.type == type), None)


def is_true(conditions: Sequence[Condition], type: ConditionType) -> bool:
    """Whether a condition is known to hold."""
    condition = get_condition(conditions, type)
    return condition is not None and condition.status == "True"
