"""GymCheckpoint: one checkpoint of a stack. A request when created, a receipt once terminal, and never reused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gym_operator.api.conditions import Condition
from gym_operator.api.driver import DriverState
from gym_operator.api.objects import (
    Count,
    Digest,
    Message,
    Name,
    ObjectMeta,
    Reason,
    Seconds,
    StatusModel,
    Timestamp,
    Uri,
)
from gym_operator.api.stack import MAX_PARTICIPANTS, ProtocolPhase, SessionText
from gym_servers.stack.durations import Age, Duration
from gym_servers.stack.settings import ParticipantKind
from gym_servers.stack.spec import MAX_CELLS, MAX_WORKLOAD_NAME, StorageUri, parsed
from gym_servers.stack.wire import (
    FREE_OBJECT,
    LABEL_HINT,
    LABEL_PATTERN,
    RULES,
    WireModel,
    list_map,
    matches,
    rule,
)

CheckpointPhase = Literal["Pending", "Preparing", "Committing", "Publishing", "Succeeded", "Failed", "Deleting"]
SHA256_PATTERN: Final = r"^[0-9a-f]{64}$"
SHA256_HINT: Final = "write the 64 hex digits of a SHA-256"
_TAKEN: Final = "source names a checkpoint that was taken before"
_FOR_TAKING: Final[Mapping[str, str]] = {
    "timeouts": f"{_TAKEN}: leave timeouts out",
    "episodes": f"{_TAKEN}, with the rollouts that continue from it: leave episodes out",
    "driverState": f"{_TAKEN}, with its driver's state: leave driverState out",
    "stopAfter": f"{_TAKEN}: leave stopAfter out, and set spec.suspend of the stack to stop it",
}
"""Fields that say how a checkpoint is taken, and what to write where none is."""

DeletionPolicy = Literal["Retain", "Delete"]
MUTABLE: Final = ("deletionPolicy", "ttl")
"""Fields of a spec that say how a checkpoint is kept, and may be changed when it is done."""
TERMINAL: Final[frozenset[CheckpointPhase]] = frozenset({"Succeeded", "Failed"})
"""Phases that are final: a checkpoint in one of them never changes again, except to be deleted."""
MAX_BLOCKERS: Final = 100
MAX_RESTARTS: Final = 100
"""How many restarted rollouts a status names; `restartCount` counts all."""
MAX_PART_MESSAGE: Final = 512
"""Characters that each of up to 64 cells may explain itself with."""

MAX_EPISODES: Final = 1000
"""How many rollouts a checkpoint's scope may name."""

EpisodeName = Annotated[
    str,
    StringConstraints(max_length=240),
    matches(
        r"^[A-Za-z0-9][-A-Za-z0-9._]*$",
        "name a rollout by its id, such as 12-0, or one attempt of it by its capture key, such as 12-0-a3",
    ),
]


class StackRef(WireModel):
    """A stack of the same namespace."""

    name: Annotated[str, StringConstraints(max_length=MAX_WORKLOAD_NAME), matches(LABEL_PATTERN, LABEL_HINT)]
    """Name of the GymStack."""


class CheckpointTimeouts(WireModel):
    """Deadlines of this checkpoint, where they differ from the stack's."""

    prepare: Duration | None = None
    """How long rollouts have to reach a point from which they can continue, such as 60s."""
    commit: Duration | None = None
    """How long the servers have to write their records, such as 2m."""


class CheckpointRequest(WireModel):
    """What is to be checkpointed: the part of a spec that a schedule's template has too."""

    stack_ref: StackRef
    """The stack."""
    labels: Annotated[
        dict[str, Annotated[str, StringConstraints(max_length=256)]],
        Field(default_factory=dict, max_length=16),
    ]
    """Free texts kept with the checkpoint, such as the trainer's step."""
    timeouts: CheckpointTimeouts | None = None
    """Deadlines of this checkpoint."""
    episodes: (
        Annotated[
            tuple[EpisodeName, ...],
            Field(min_length=1, max_length=MAX_EPISODES, json_schema_extra={"x-kubernetes-list-type": "set"}),
        ]
        | None
    ) = None
    """Rollouts to continue, by id or capture key; all that can be continued if left out. The others start over."""
    driver_state: DriverState | None = None
    """State of whoever drives the rollouts, kept with the checkpoint and given back after a recovery from it."""
    stop_after: bool = False
    """Stops the stack once the checkpoint is published, as spec.suspend does. To go on from it, set the stack's
    spec.suspend to true and, once its phase is Suspended, to false again."""
    deletion_policy: DeletionPolicy = "Retain"
    """What becomes of the checkpoint's data when this object is deleted: Retain leaves it in the bucket, Delete
    removes it. It can be changed at any time."""
    ttl: Age | None = None
    """How long this object is kept after its end, such as 7d; for ever, if not given. The newest good checkpoint of a
    stack, and one that is being restored, stay all the same. It can be changed at any time."""


class CheckpointSource(WireModel):
    """A checkpoint that is in storage already."""

    uri: StorageUri
    """Where it is: the folder that holds its checkpoint.json. It is read as the stack of stackRef reads its own."""
    digest: Annotated[str, StringConstraints(max_length=64), matches(SHA256_PATTERN, SHA256_HINT)]
    """SHA-256 of its checkpoint.json, as the status of a GymCheckpoint has it."""


def _rules(schema: dict[str, Any]) -> None:
    """Nothing of a spec may change but what says how it is kept: a rule over all other fields there are."""
    fields = [name for name in schema["properties"] if name not in MUTABLE]
    same = (f"has(self.{f}) == has(oldSelf.{f}) && (!has(self.{f}) || self.{f} == oldSelf.{f})" for f in fields)
    schema[RULES] = [
        rule(
            " && ".join(f"({each})" for each in same),
            f"a checkpoint's spec never changes, except {' and '.join(MUTABLE)}: "
            "create another GymCheckpoint instead",
        ),
        *(rule(f"!has(self.source) || !{_set(schema, name)}", hint) for name, hint in _FOR_TAKING.items()),
    ]


def _set(schema: dict[str, Any], field: str) -> str:
    """Whether somebody has written this field: one with a default is always there."""
    switch = schema["properties"][field].get("type") == "boolean"
    return f"(has(self.{field}) && self.{field})" if switch else f"has(self.{field})"


class CheckpointSpec(CheckpointRequest):
    """What is to be checkpointed. It never changes, except for how it is kept."""

    model_config = ConfigDict(json_schema_extra=_rules)

    source: CheckpointSource | None = None
    """Makes this object stand for a checkpoint that was taken before, by this stack or another; none is taken."""

    @model_validator(mode="after")
    def _takes_or_adopts(self) -> Self:
        wished = {
            "timeouts": self.timeouts is not None,
            "episodes": self.episodes is not None,
            "driverState": self.driver_state is not None,
            "stopAfter": self.stop_after,
        }
        hints = [_FOR_TAKING[name] for name, said in wished.items() if said]
        if self.source is not None and hints:
            raise PydanticCustomError("checkpoint", "{hint}", {"hint": "; ".join(hints)})
        return self

    @classmethod
    def parse(cls, document: Any) -> Self:
        """Read a spec as it stands in a manifest. Raises SpecError."""
        return parsed(cls, document)


class CheckpointParticipant(StatusModel):
    """A server process as it took part."""

    name: Name
    """Name of the server."""
    kind: ParticipantKind
    """What it took part as."""
    pod: Name | None = None
    """Name of its pod."""
    pod_uid: Annotated[str, StringConstraints(max_length=64)] | None = Field(None, alias="podUID")
    """UID of its pod."""
    session: SessionText | None = None
    """Random name of its process; another one aborts the checkpoint."""
    phase: ProtocolPhase | None = None
    """Where it stands: idle, preparing, prepared or committed."""
    records: Count = 0
    """Records it wrote."""
    bytes: Count = 0
    """Size of these records."""


class CheckpointCell(StatusModel):
    """One cell's part of the checkpoint. A part that is published serves the recovery of its cell, whatever becomes
    of the other parts."""

    index: Count
    """Number of the cell."""
    phase: CheckpointPhase = "Pending"
    """Where this part stands."""
    reason: Reason | None = None
    """Why it waits or failed, in one word."""
    message: Annotated[str, StringConstraints(max_length=MAX_PART_MESSAGE)] | None = None
    """Why it waits or failed, for people."""
    attempt: Count = 0
    """The cell attempt it was taken under."""
    uri: Uri | None = None
    """Where it is, or will be."""
    digest: Digest | None = None
    """Digest of its checkpoint.json, once published."""
    episodes: Count = 0
    """Rollouts that continue from it."""
    bytes: Count = 0
    """Size of its records."""
    pause_seconds: Seconds | None = None
    """How long admission was closed."""
    participants: Annotated[
        tuple[CheckpointParticipant, ...],
        Field(max_length=MAX_PARTICIPANTS, json_schema_extra=list_map("name")),
    ] = ()
    """The processes that took part."""


class Blocker(StatusModel):
    """Work that has not reached a point from which it can continue."""

    cell: Count = 0
    """The cell it runs in."""
    participant: Name
    """The server it runs in."""
    id: Annotated[str, StringConstraints(max_length=256)]
    """The rollout or call."""
    where: Annotated[str, StringConstraints(max_length=256)] = ""
    """Where it stands."""
    age_seconds: Seconds = 0
    """For how long, by the time at which the checkpoint failed."""
    since: Timestamp | None = None
    """Since when, while the checkpoint waits for it."""


class CheckpointStatus(StatusModel):
    """How far the checkpoint is, and what came of it."""

    observed_generation: int = -1
    """The generation of the spec that this status speaks of; -1 before the operator has looked."""
    phase: CheckpointPhase | None = None
    """One word for people; programs read the conditions. Succeeded and Failed are final."""
    reason: Reason | None = None
    """Why it is in this phase, in one word."""
    message: Message | None = None
    """Why it is in this phase, for people."""
    checkpoint_id: Name | None = Field(None, alias="checkpointID")
    """Id of the checkpoint, as participants and storage know it."""
    stack_uid: Annotated[str, StringConstraints(max_length=64)] | None = Field(None, alias="stackUID")
    """UID of the stack it is of: a stack deleted and made again has another."""
    storage: Annotated[dict[str, Any] | None, Field(max_length=16, json_schema_extra=FREE_OBJECT)] = None
    """How it is reached, as its stack's spec said in checkpoints.storage: it may outlive the stack."""
    uri: Uri | None = None
    """Where it is; of a stack with several cells, each cell's part has its own place."""
    digest: Digest | None = None
    """Digest of its checkpoint.json, once published."""
    cells: Annotated[
        tuple[CheckpointCell, ...], Field(max_length=MAX_CELLS, json_schema_extra=list_map("index"))
    ] = ()
    """Each cell's part; all are needed to succeed. One that is published serves the recovery of its cell, whatever
    becomes of the others."""
    blockers: Annotated[tuple[Blocker, ...], Field(max_length=MAX_BLOCKERS)] = ()
    """What the checkpoint waits for, or failed to wait for: work at no point from which it can continue."""
    restart_count: Count = 0
    """Rollouts that this checkpoint does not continue; after a death they begin again."""
    restarts: Annotated[
        tuple[Annotated[str, StringConstraints(max_length=256)], ...], Field(max_length=MAX_RESTARTS)
    ] = ()
    """The first of them."""
    episodes: Count = 0
    """Rollouts that continue from this checkpoint."""
    bytes: Count = 0
    """Size of all records."""
    pause_seconds: Seconds | None = None
    """How long admission was closed, in the cell where it was closed for longest."""
    start_time: Timestamp | None = None
    """When the checkpoint began."""
    completion_time: Timestamp | None = None
    """When it became final."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=8, json_schema_extra=list_map("type"))] = ()
    """Succeeded, and Stalled once it has failed."""


class GymCheckpoint(StatusModel):
    """A checkpoint as the API server holds it."""

    metadata: ObjectMeta
    spec: CheckpointSpec
    status: CheckpointStatus = CheckpointStatus()

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> GymCheckpoint:
        """Read an object of the API server. Raises SpecError if its spec cannot be used."""
        return cls(
            metadata=ObjectMeta.model_validate(body["metadata"]),
            spec=CheckpointSpec.parse(body.get("spec")),
            status=CheckpointStatus.model_validate(body.get("status") or {}),
        )
