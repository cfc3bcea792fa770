"""GymStack: a checkpointed Gym deployment. Its spec is shared with the local runner; its status lives here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, StringConstraints

from gym_operator.api.conditions import Condition
from gym_operator.api.driver import Continuation, RestoredCheckpoint
from gym_operator.api.objects import (
    Count,
    Digest,
    Name,
    ObjectMeta,
    Reason,
    Seconds,
    StatusModel,
    Timestamp,
    Uri,
)
from gym_servers.stack.settings import ParticipantKind, StackIdentity
from gym_servers.stack.spec import MAX_CELLS, StackSpec, check_stack_name, parse_spec
from gym_servers.stack.wire import FREE_OBJECT, list_map

MAX_RECOVERIES: Final = 20
"""How many past recoveries of a cell a status keeps, newest last."""
MAX_PARTICIPANTS: Final = 17
"""The most servers a spec may have, and the driver."""
MAX_RESTARTED: Final = 10
"""How many restarted rollouts a status keeps, newest last."""

StackPhase = Literal["Pending", "Starting", "Running", "Recovering", "Completed", "Stopped", "Suspended", "Failed"]
CellPhase = Literal[
    "Pending",
    "Starting",
    "Restoring",
    "Running",
    "Recovering",
    "Suspended",
    "Failed",
    "Draining",
    "Stopping",
    "Stopped",
]
SessionText = Annotated[str, StringConstraints(max_length=128)]
ProtocolPhase = Annotated[str, StringConstraints(max_length=32)]


class LastCheckpoint(StatusModel):
    """A published checkpoint."""

    name: Name
    """Name of the GymCheckpoint."""
    id: Name
    """Id of the checkpoint, as participants and storage know it."""
    uri: Uri | None = None
    """Where it is; of a stack with several cells, each cell says so itself."""
    digest: Digest | None = None
    """Digest of its checkpoint.json."""
    time: Timestamp
    """When it was published."""


class StackParticipant(StatusModel):
    """A server process of a cell, as it is pinned: another pod or session is a death."""

    name: Name
    """Name of the server."""
    kind: ParticipantKind
    """What it takes part as."""
    pod: Name | None = None
    """Name of its pod."""
    pod_uid: Annotated[str, StringConstraints(max_length=64)] | None = Field(None, alias="podUID")
    """UID of its pod."""
    session: SessionText | None = None
    """Random name of its process, new at each start."""
    phase: ProtocolPhase | None = None
    """Where it stands: starting, restored, idle, preparing, prepared or committed."""


class CollectionProgress(StatusModel):
    """How far the driver of a cell is."""

    expected: Count = 0
    """Rollouts to do in all."""
    rows: Count = 0
    """Rows that are durable in the output."""
    failed: Count = 0
    """Rows that say that their rollout failed."""
    complete: bool = False
    """Whether every rollout has its row."""


class Recovery(StatusModel):
    """A replacement of a cell's processes."""

    attempt: Count
    """The attempt it began."""
    checkpoint: Name | None = None
    """Id of the checkpoint it continued from; absent if it began from the input."""
    reason: Reason
    """What died, in one word."""
    started_at: Timestamp
    """When it began."""
    seconds: Seconds | None = None
    """How long it took; absent while it goes on."""


class RestartedRollout(StatusModel):
    """A rollout whose attempt was ended because it kept checkpoints from being taken."""

    rollout: Name
    """Id of the rollout."""
    attempt: Count
    """The attempt that was ended: the driver starts the rollout over under a higher one."""
    checkpoints: Count
    """How many checkpoints in a row it had held up."""
    participant: Name
    """The server it held up last."""
    where: Annotated[str, StringConstraints(max_length=256)] = ""
    """The step it was in then."""
    age_seconds: Seconds = 0
    """For how long."""
    time: Timestamp
    """When it was restarted."""


class Drain(StatusModel):
    """How a cell that is to go finishes the rollouts it has begun."""

    started_at: Timestamp
    """Since when it begins no other."""
    until: Timestamp
    """When it is stopped by a last checkpoint, whatever still runs."""
    running: Count | None = None
    """Rollouts that have begun and not ended; absent where its servers do not say."""


class CellStatus(StatusModel):
    """One complete set of servers. A cell that the spec no longer has is kept: were it to come back, it would
    continue."""

    index: Count
    """Number of the cell."""
    phase: CellPhase = "Pending"
    """Where the cell stands."""
    attempt: Count = 0
    """Counts the replacements of the cell's processes."""
    record: Annotated[dict[str, Any] | None, Field(max_length=64, json_schema_extra=FREE_OBJECT)] = None
    """The operator's own record of an operation under way, so that it can be taken up again. Not an API."""
    participants: Annotated[
        tuple[StackParticipant, ...], Field(max_length=MAX_PARTICIPANTS, json_schema_extra=list_map("name"))
    ] = ()
    """The cell's processes, as they are pinned: another pod or session is a death."""
    collection: CollectionProgress | None = None
    """How far the cell's driver is."""
    drain: Drain | None = None
    """How far it is with what it had begun, where it is to go."""
    last_checkpoint: LastCheckpoint | None = None
    """What the cell's next recovery would continue from: its newest published checkpoint, or the one that it was
    brought back to; absent where it would begin from the input."""
    recoveries: Annotated[tuple[Recovery, ...], Field(max_length=MAX_RECOVERIES)] = ()
    """The last recoveries, newest last."""
    continuation: Continuation | None = None
    """What the last recovery continues, for a driver outside of the stack; absent while it goes on."""
    restarted: Annotated[tuple[RestartedRollout, ...], Field(max_length=MAX_RESTARTED)] = ()
    """The last rollouts that were restarted because they held checkpoints up, newest last."""


class StackStatus(StatusModel):
    """What the operator sees of a stack."""

    observed_generation: int = -1
    """The generation of the spec that this status speaks of; -1 before the operator has looked."""
    phase: StackPhase | None = None
    """One word for people; programs read the conditions."""
    attempt: Count = 0
    """The highest attempt of any cell."""
    stopped_by: Name | None = None
    """The GymCheckpoint that stopped the stack, while it stands stopped; absent otherwise."""
    last_checkpoint: LastCheckpoint | None = None
    """What the stack would continue from; of several cells the oldest of what they would, absent where one has
    none."""
    restored: RestoredCheckpoint | None = None
    """What was handed over with the checkpoint that the last recovery of any cell continued from."""
    collection: CollectionProgress | None = None
    """How far the drivers of all cells are."""
    cells: Annotated[tuple[CellStatus, ...], Field(max_length=MAX_CELLS, json_schema_extra=list_map("index"))] = ()
    """The cells. One that the spec no longer has is kept: were it to come back, it would continue."""
    conditions: Annotated[tuple[Condition, ...], Field(max_length=8, json_schema_extra=list_map("type"))] = ()
    """Ready, Recovering, Checkpointing, StorageReady, EngineReady, UpToDate and Stalled."""


class GymStack(StatusModel):
    """A stack as the API server holds it."""

    metadata: ObjectMeta
    spec: StackSpec
    status: StackStatus = StackStatus()

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> GymStack:
        """Read an object of the API server.

        Raises SpecError if its spec cannot be used. The API server has refused all this already, unless its
        CRD is older than the operator.
        """
        metadata = ObjectMeta.model_validate(body["metadata"])
        spec = parse_spec(body.get("spec"))
        check_stack_name(metadata.name, spec)
        return cls(metadata=metadata, spec=spec, status=StackStatus.model_validate(body.get("status") or {}))

    @property
    def identity(self) -> StackIdentity:
        """Which stack this is."""
        return StackIdentity(namespace=self.metadata.namespace, name=self.metadata.name, uid=self.metadata.uid)
