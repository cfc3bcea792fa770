"""GymRestore: brings a stack to a checkpoint that somebody chose. A request when created, a receipt once terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gym_operator.api.checkpoint import SHA256_HINT, SHA256_PATTERN, StackRef
from gym_operator.api.conditions import Condition
from gym_operator.api.objects import Count, Digest, Message, Name, ObjectMeta, Reason, StatusModel, Timestamp, Uri
from gym_servers.stack.parts import ObjectName
from gym_servers.stack.spec import StorageUri, parsed
from gym_servers.stack.wire import WireModel, list_map, matches, rule, with_rules

RestorePhase = Literal["Pending", "Restoring", "Succeeded", "Failed"]
RESTORE_TERMINAL: Final[frozenset[RestorePhase]] = frozenset({"Succeeded", "Failed"})
MAX_CONTINUED: Final = 100
"""How many continued rollouts a status names; `continuedCount` counts all."""
MAX_PASSED_OVER: Final = 8
"""How many checkpoints whose data is not whole a restore by labels passes over, before it fails."""

_ONE_SOURCE: Final = (
    "write exactly one of checkpointRef, such as {name: counter-1}, uri and digest, and labels, such as {step: '120'}"
)
_BOTH: Final = "uri needs digest beside it, the SHA-256 of its checkpoint.json: a place alone proves nothing"
_NEVER: Final = "a restore's spec never changes: create another GymRestore instead"


class CheckpointRef(WireModel):
    """A GymCheckpoint of the same namespace."""

    name: ObjectName
    """Name of the GymCheckpoint."""


class RestoreSpec(WireModel):
    """What is restored, and into what. It never changes."""

    model_config = with_rules(
        rule("self == oldSelf", _NEVER),
        rule(
            "(has(self.checkpointRef) ? 1 : 0) + (has(self.uri) ? 1 : 0) + (has(self.labels) ? 1 : 0) == 1",
            _ONE_SOURCE,
        ),
        rule("has(self.uri) == has(self.digest)", _BOTH),
    )

    stack_ref: StackRef
    """The stack that is brought to the checkpoint. It need not be the one that the checkpoint was taken of."""
    checkpoint_ref: CheckpointRef | None = None
    """The checkpoint, by its GymCheckpoint. One that is not finished is waited for."""
    uri: StorageUri | None = None
    """The checkpoint, by its place: the folder with its checkpoint.json. It is read as the stack reads its own."""
    digest: Annotated[str, StringConstraints(max_length=64), matches(SHA256_PATTERN, SHA256_HINT)] | None = None
    """SHA-256 of that checkpoint.json."""
    labels: (
        Annotated[dict[str, Annotated[str, StringConstraints(max_length=256)]], Field(min_length=1, max_length=16)]
        | None
    ) = None
    """The checkpoint, by labels in the spec of its GymCheckpoint, such as the trainer's step: the newest of the stack
    that has them all and succeeded."""
    backoff_limit: int = Field(3, ge=0, le=100)
    """How often the servers may die on the way before the stack goes on from its own newest checkpoint instead."""

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if sum(each is not None for each in (self.checkpoint_ref, self.uri, self.labels)) != 1:
            raise PydanticCustomError("restore", "{hint}", {"hint": _ONE_SOURCE})
        if (self.uri is None) != (self.digest is None):
            raise PydanticCustomError("restore", "{hint}", {"hint": _BOTH})
        return self

    @classmethod
    def parse(cls, document: Any) -> Self:
        """Read a spec as it stands in a manifest. Raises SpecError."""
        return parsed(cls, document)


class RestoredCheckpoint(StatusModel):
    """The checkpoint that was chosen."""

    name: Name
    """Name it was taken under."""
    id: Name
    """Id of the checkpoint, as participants and storage know it."""
    stack_uid: Annotated[str, StringConstraints(max_length=64)] | None = Field(None, alias="stackUID")
    """UID of the stack it was taken of."""


class RestoreCell(StatusModel):
    """One cell's part of the restore."""

    index: Count
    """Number of the cell."""
    uri: Uri
    """Where its part of the checkpoint is."""
    digest: Digest
    """Digest of the checkpoint.json there."""
    attempt: Count | None = None
    """The cell attempt that began with it; absent before it has begun."""


class PassedOver(StatusModel):
    """A checkpoint with the labels whose data is not whole."""

    uri: Uri
    """Where it is; of one with several cells, the part of the first."""
    message: Annotated[str, StringConstraints(max_length=256)]
    """What is wrong with it, for people."""


class Continued(StatusModel):
    """A rollout that continues from the checkpoint."""

    rollout: Name
    """Id of the rollout."""
    attempt: Count
    """The attempt it continues under."""
    cell: Count
    """The cell it continues in."""


class RestoreStatus(StatusModel):
    """How far the restore is, and what came of it."""

    observed_generation: int = -1
    """The generation of the spec that this status speaks of; -1 before the operator has looked."""
    phase: RestorePhase | None = None
    """One word for people; programs read the conditions. Succeeded and Failed are final."""
    reason: Reason | None = None
    """Why it is in this phase, in one word."""
    message: Message | None = None
    """Why it is in this phase, for people."""
    checkpoint: RestoredCheckpoint | None = None
    """The checkpoint that was chosen."""
    cells: Annotated[tuple[RestoreCell, ...], Field(max_length=64, json_schema_extra=list_map("index"))] = ()
    """Each cell's part, from when it was chosen; all are needed to succeed. Its data is held until the restore is
    done."""
    passed_over: Annotated[tuple[PassedOver, ...], Field(max_length=MAX_PASSED_OVER)] = ()
    """Newer checkpoints with the labels, whose data is not whole: the next older one is restored instead."""
    continued_count: Count = 0
    """Rollouts that continue from the checkpoint. Of those whose row is durable already the row stands."""
    continued: Annotated[tuple[Continued, ...], Field(max_length=MAX_CONTINUED)] = ()
    """The first rollouts that continue from the checkpoint."""
    start_time: Timestamp | None = None
    """When the servers began to be replaced."""
    completion_time: Timestamp | None = None
    """When it became final."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=8, json_schema_extra=list_map("type"))] = ()
    """Succeeded, and Stalled once it has failed."""


class GymRestore(StatusModel):
    """A restore as the API server holds it."""

    metadata: ObjectMeta
    spec: RestoreSpec
    status: RestoreStatus = RestoreStatus()

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> GymRestore:
        """Read an object of the API server. Raises SpecError if its spec cannot be used."""
        return cls(
            metadata=ObjectMeta.model_validate(body["metadata"]),
            spec=RestoreSpec.parse(body.get("spec")),
            status=RestoreStatus.model_validate(body.get("status") or {}),
        )
