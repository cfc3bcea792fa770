"""GymCheckpointSchedule: makes a GymCheckpoint at each of its times, and lets go of the old ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gym_operator.api.checkpoint import CheckpointRequest
from gym_operator.api.conditions import Condition
from gym_operator.api.cron import CronText, ZoneText
from gym_operator.api.names import INSTANCE_LABEL
from gym_operator.api.objects import Name, ObjectMeta, Reason, StatusModel, Timestamp
from gym_servers.stack.durations import Age, Duration, parse_duration
from gym_servers.stack.spec import parsed
from gym_servers.stack.wire import Checked, WireModel, list_map, rule, with_rules

MAX_SCHEDULE_NAME: Final = 63
"""A schedule's name is a label of what it makes."""
SHORTEST_SECONDS: Final = 10

SchedulePhase = Literal["Active", "Suspended", "Failed"]

_ONE_TIMING = "write exactly one of schedule, such as '*/10 * * * *', and every, such as 2m"
_ZONE_NEEDS_CRON = "timeZone belongs to schedule: every counts from when this object was created, in any zone"
_TOO_OFTEN = f"a checkpoint pauses the rollouts: every is at least {SHORTEST_SECONDS}s"
_INSTANCE = (
    f"leave {INSTANCE_LABEL} out: it says who deploys an object, and a GitOps tool that finds it on a checkpoint "
    "which is not in Git deletes the checkpoint"
)


def _check_interval(text: str) -> None:
    if parse_duration(text) < SHORTEST_SECONDS:
        raise ValueError(_TOO_OFTEN)


Interval = Annotated[
    Duration,
    Checked(
        _check_interval,
        (rule(f"!self.matches(r'^[0-9]+s$') || duration(self) >= duration('{SHORTEST_SECONDS}s')", _TOO_OFTEN),),
    ),
]
LabelValue = Annotated[str, StringConstraints(max_length=63)]


class TemplateMeta(WireModel):
    """What the GymCheckpoints carry beside their spec."""

    model_config = with_rules(rule(f"!has(self.labels) || !('{INSTANCE_LABEL}' in self.labels)", _INSTANCE))

    labels: dict[str, LabelValue] = Field(default_factory=dict, max_length=16)
    """Labels of the GymCheckpoints. The schedule's own labels are not copied."""

    @model_validator(mode="after")
    def _is_nobodys_deployment(self) -> Self:
        if INSTANCE_LABEL in self.labels:
            raise PydanticCustomError("schedule", "{hint}", {"hint": _INSTANCE})
        return self


class CheckpointTemplate(WireModel):
    """The GymCheckpoints as they are made."""

    metadata: TemplateMeta = Field(default_factory=TemplateMeta, json_schema_extra={"default": {}})
    """What they carry beside their spec."""
    spec: CheckpointRequest
    """What is to be checkpointed, and how it is kept."""


class Keep(WireModel):
    """Which of the checkpoints stay. The newest good one of a stack stays in any case, and one that is being
    restored; so do those of a schedule that is deleted."""

    last: int = Field(10, ge=1, le=10_000)
    """How many that succeeded."""
    max_age: Age | None = None
    """For how long, such as 7d; however old, if not given."""
    failed: int = Field(3, ge=0, le=1000)
    """How many that failed."""


class ScheduleSpec(WireModel):
    """When checkpoints are taken."""

    model_config = with_rules(
        rule("has(self.schedule) != has(self.every)", _ONE_TIMING),
        rule("!has(self.timeZone) || has(self.schedule)", _ZONE_NEEDS_CRON),
    )

    schedule: CronText | None = None
    """Five fields as cron reads them: minute, hour, day of month, month, day of week."""
    every: Interval | None = None
    """Time between checkpoints, counted from when this object was created, such as 2m."""
    time_zone: ZoneText | None = None
    """Zone of the IANA database in which the fields are read, such as Europe/Berlin; UTC, if not given."""
    suspend: bool = False
    """Takes no checkpoints. What was missed meanwhile is made up for by one checkpoint at most."""
    concurrency_policy: Literal["Forbid"] = "Forbid"
    """A time that comes while the checkpoint before it is not finished is skipped."""
    starting_deadline: Duration | None = None
    """How late a checkpoint may be begun, as after an outage of the operator; later its time is skipped."""
    keep: Keep = Field(default_factory=Keep, json_schema_extra={"default": {}})
    """Which of the checkpoints stay; the others are deleted."""
    template: CheckpointTemplate
    """The GymCheckpoints that are made."""

    @model_validator(mode="after")
    def _has_one_timing(self) -> Self:
        if (self.schedule is None) == (self.every is None):
            raise PydanticCustomError("schedule", "{hint}", {"hint": _ONE_TIMING})
        if self.time_zone is not None and self.schedule is None:
            raise PydanticCustomError("schedule", "{hint}", {"hint": _ZONE_NEEDS_CRON})
        return self

    @property
    def timing(self) -> str:
        """When it is due, as one text: another text, other times."""
        if self.every is not None:
            return f"every {self.every}"
        return f"{self.schedule} {self.time_zone or 'UTC'}"


class Skipped(StatusModel):
    """A time without a checkpoint."""

    time: Timestamp
    """The time."""
    reason: Reason
    """Why, in one word."""
    message: Annotated[str, StringConstraints(max_length=1024)] = ""
    """Why, for people."""


class ScheduleStatus(StatusModel):
    """What has become of the schedule's times."""

    observed_generation: int = -1
    """The generation of the spec that this status speaks of; -1 before the operator has looked."""
    phase: SchedulePhase | None = None
    """One word for people; programs read the conditions."""
    timing: Annotated[str, StringConstraints(max_length=256)] | None = None
    """The times that countedFrom speaks of."""
    counted_from: Timestamp | None = None
    """Times up to this one do not count: the schedule was made then, or got other times."""
    last_schedule_time: Timestamp | None = None
    """The newest time that a checkpoint was made for."""
    last_checkpoint: Name | None = None
    """Name of that GymCheckpoint."""
    last_skipped: Skipped | None = None
    """The newest time that was skipped."""
    next_schedule_time: Timestamp | None = None
    """The next time; absent while suspended."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=8, json_schema_extra=list_map("type"))] = ()
    """Ready, and Stalled."""


class GymCheckpointSchedule(StatusModel):
    """A schedule as the API server holds it."""

    metadata: ObjectMeta
    spec: ScheduleSpec
    status: ScheduleStatus = ScheduleStatus()

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> GymCheckpointSchedule:
        """Read an object of the API server. Raises SpecError if its spec cannot be used."""
        return cls(
            metadata=ObjectMeta.model_validate(body["metadata"]),
            spec=parsed(ScheduleSpec, body.get("spec")),
            status=ScheduleStatus.model_validate(body.get("status") or {}),
        )
