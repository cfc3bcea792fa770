"""What a schedule does now, and what its status says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gym_operator.api import names
from gym_operator.api.checkpoint import TERMINAL
from gym_operator.api.conditions import ConditionReason, ConditionStatus, ConditionType
from gym_operator.api.objects import clip, format_time, parse_time
from gym_operator.api.schedule import GymCheckpointSchedule, ScheduleStatus, Skipped
from gym_operator.rules.conditions import put
from gym_operator.rules.schedule_times import Times
from gym_servers.stack.durations import parse_duration

Obstacle = tuple[ConditionReason, str]
"""What keeps checkpoints of a stack from being worth anything, in a word and for people."""


@dataclass(frozen=True)
class Make:
    """Make the GymCheckpoint of this time."""

    time: float


@dataclass(frozen=True)
class Made:
    """It stands already: whoever made it could not say so any more."""

    time: float
    name: str


@dataclass(frozen=True)
class Skip:
    """Let this time, and those before it, go by."""

    time: float
    reason: ConditionReason
    message: str


@dataclass(frozen=True)
class Rest:
    """Nothing is due before `until`; None: before somebody changes something."""

    until: float | None


Move = Make | Made | Skip | Rest


def due(schedule: GymCheckpointSchedule, times: Times, now: float) -> float | None:
    """The time to deal with now: the newest that has come, whatever was missed before it. The status must be
    `counted`."""
    return None if schedule.spec.suspend else times.latest(dealt_with(schedule), now)


def in_short(child: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of a GymCheckpoint what `next_move` asks for: a schedule may have thousands."""
    phase = (child.get("status") or {}).get("phase")
    return {"metadata": {"name": child["metadata"]["name"]}, "status": {"phase": phase}}


def next_move(
    schedule: GymCheckpointSchedule,
    times: Times,
    now: float,
    children: Sequence[Mapping[str, Any]],
    obstacle: Obstacle | None,
) -> Move:
    """What to do. `children` are the schedule's GymCheckpoints that there are, `obstacle` is what the stack lacks."""
    if schedule.spec.suspend:
        return Rest(None)
    time = due(schedule, times, now)
    if time is None:
        return Rest(times.following(now))
    name = names.scheduled_checkpoint(schedule.metadata.name, format_time(time))
    if any(child["metadata"]["name"] == name for child in children):
        return Made(time, name)
    if obstacle is not None:
        return Skip(time, *obstacle)
    if (active := active_among(children)) is not None:
        return Skip(time, ConditionReason.OVERLAP, f"GymCheckpoint {active} of this schedule is not finished")
    deadline = schedule.spec.starting_deadline
    if deadline is not None and now - time > parse_duration(deadline):
        return Skip(time, ConditionReason.TOO_LATE, f"it could not be begun within {deadline}")
    return Make(time)


def dealt_with(schedule: GymCheckpointSchedule) -> float:
    """Times up to this one are done with."""
    status = schedule.status
    skipped = status.last_skipped.time if status.last_skipped is not None else None
    known = (schedule.metadata.creation_timestamp, status.counted_from, status.last_schedule_time, skipped)
    return max(parse_time(time) for time in known if time is not None)


def counted(schedule: GymCheckpointSchedule, now: float) -> ScheduleStatus:
    """The status with the present times in it.

    Times that were changed count from now on: what the new ones would have been before is nobody's loss. So do those
    that a clock which was ahead has dealt with: they come again, and what was made for them is found by its name.
    """
    status, timing = schedule.status, schedule.spec.timing
    made, skip = status.last_schedule_time, status.last_skipped

    def is_ahead(time: str | None) -> bool:
        return time is not None and parse_time(time) > now

    ahead = [is_ahead(time) for time in (status.counted_from, made, skip.time if skip is not None else None)]
    if status.timing == timing and not any(ahead):
        return status
    begin = schedule.metadata.creation_timestamp if status.timing is None else format_time(now)
    return status.model_copy(
        update={
            "timing": timing,
            "counted_from": begin,
            "last_schedule_time": None if is_ahead(made) else made,
            "last_skipped": None if skip is not None and is_ahead(skip.time) else skip,
        }
    )


def obstacle_of(stack: Mapping[str, Any] | None, name: str) -> Obstacle | None:
    """Why a checkpoint of this stack would be in vain."""
    if stack is None:
        return ConditionReason.STACK_NOT_FOUND, f"there is no GymStack {name} in this namespace"
    if (stack.get("spec") or {}).get("suspend"):
        return ConditionReason.STACK_NOT_READY, f"GymStack {name} is suspended"
    match (stack.get("status") or {}).get("phase"):
        case "Stopped":
            return ConditionReason.STACK_NOT_READY, f"GymStack {name} was stopped by a checkpoint"
        case "Completed":
            return ConditionReason.COLLECTION_COMPLETE, f"GymStack {name} has all its rows"
    return None


def active_among(checkpoints: Iterable[Mapping[str, Any]]) -> str | None:
    """The name of a GymCheckpoint that is not finished; of one that is being deleted nothing more is to come."""
    for body in checkpoints:
        phase = (body.get("status") or {}).get("phase")
        if phase not in TERMINAL and phase != "Deleting":
            return str(body["metadata"]["name"])
    return None


def child(schedule: GymCheckpointSchedule, time: float) -> dict[str, Any]:
    """The GymCheckpoint of one time.

    It has no owner: a schedule that is deleted takes none of its checkpoints along. Nor does it get the schedule's
    labels or annotations, by which a GitOps tool would take it for an object that is missing in Git.
    """
    metadata, at = schedule.metadata, format_time(time)
    # From the first moment on, so that it need not wait for it.
    tied = schedule.spec.template.spec.deletion_policy == "Delete"
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.CHECKPOINT_KIND,
        "metadata": {
            "name": names.scheduled_checkpoint(metadata.name, at),
            "namespace": metadata.namespace,
            "labels": {
                **schedule.spec.template.metadata.labels,
                names.SCHEDULE_LABEL: metadata.name,
                names.SCHEDULE_UID_LABEL: metadata.uid,
            },
            "annotations": {names.SCHEDULED_AT: at},
            **({"finalizers": [names.DATA_FINALIZER]} if tied else {}),
        },
        "spec": schedule.spec.template.spec.document(),
    }


def is_child_of(body: Mapping[str, Any], uid: str) -> bool:
    """Whether a GymCheckpoint was made by the schedule with this UID."""
    return (body["metadata"].get("labels") or {}).get(names.SCHEDULE_UID_LABEL) == uid


def made(status: ScheduleStatus, time: float, name: str) -> ScheduleStatus:
    """A GymCheckpoint stands for this time."""
    return status.model_copy(update={"last_schedule_time": format_time(time), "last_checkpoint": name})


def skipped(status: ScheduleStatus, skip: Skip) -> ScheduleStatus:
    """None stands for this one."""
    entry = Skipped(time=format_time(skip.time), reason=skip.reason, message=clip(skip.message))
    return status.model_copy(update={"last_skipped": entry})


def to_be_mended(reason: str) -> bool:
    """Whether a time was skipped for something that somebody has to mend."""
    return reason not in _HARMLESS


_HARMLESS: Final = (ConditionReason.OVERLAP, ConditionReason.TOO_LATE, ConditionReason.COLLECTION_COMPLETE)


def told(
    status: ScheduleStatus, generation: int, upcoming: float | None, suspended: bool, now: float
) -> ScheduleStatus:
    """The status with its phase and conditions."""
    ready: ConditionStatus = "True"
    reason, message = str(ConditionReason.SCHEDULED), "checkpoints are made at their times"
    last = status.last_skipped
    made_since = last is not None and status.last_schedule_time is not None and status.last_schedule_time >= last.time
    if suspended:
        reason, message = ConditionReason.SUSPENDED, "spec.suspend is set"
    elif last is not None and not made_since and to_be_mended(last.reason):
        ready, reason, message = "False", last.reason, last.message
    conditions = put(status.conditions, ConditionType.READY, ready, reason, message, generation, now)
    conditions = put(conditions, ConditionType.STALLED, "False", ConditionReason.SCHEDULED, "", generation, now)
    return status.model_copy(
        update={
            "observed_generation": generation,
            "phase": "Suspended" if suspended else "Active",
            "next_schedule_time": format_time(upcoming) if upcoming is not None else None,
            "conditions": conditions,
        }
    )


def refused(status: ScheduleStatus, message: str, generation: int, now: float) -> ScheduleStatus:
    """The status of a schedule whose spec cannot be used."""
    conditions = status.conditions
    verdicts: tuple[tuple[ConditionType, ConditionStatus], ...] = (
        (ConditionType.READY, "False"),
        (ConditionType.STALLED, "True"),
    )
    for type, value in verdicts:
        conditions = put(conditions, type, value, ConditionReason.INVALID_SPEC, message, generation, now)
    return status.model_copy(
        update={
            "observed_generation": generation,
            "phase": "Failed",
            "next_schedule_time": None,
            "conditions": conditions,
        }
    )
