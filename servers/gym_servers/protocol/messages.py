"""Bodies of the control API (`/ng-control/v1/checkpoint`). Unknown fields of a request are refused and its
sizes are bounded.

`deadline_ts` is absolute Unix time in seconds; a receiver turns it into monotonic time at once. Fields that
extend the partial-rollout control API of NeMo Gym have defaults, so that a foreign coordinator works unchanged.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

PREFIX = "/ng-control/v1/checkpoint"
MAX_BLOCKERS = 100

CheckpointId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
CaptureKey = Annotated[str, StringConstraints(min_length=1, max_length=240)]
RolloutId = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class ProblemReason(StrEnum):
    """What keeps a process from its work, in a word for programs."""

    TASKS_INVALID = "TasksInvalid"
    OUTPUT_FAILING = "OutputFailing"
    COLLECTION_FAILED = "CollectionFailed"
    SERVER_PROBLEM = "ServerProblem"


class Answer(BaseModel):
    """What a participant says. A newer one may say more than its coordinator knows."""

    model_config = ConfigDict(extra="ignore")


class Verb(BaseModel):
    """What every request says."""

    model_config = ConfigDict(extra="forbid")

    checkpoint_id: CheckpointId
    deadline_ts: float = Field(gt=0, allow_inf_nan=False)


class PrepareRequest(Verb):
    restarts: list[CaptureKey] = []


class RenewRequest(Verb):
    pass


class CommitRequest(Verb):
    checkpoint_dir: str
    episode_ids: list[CaptureKey] | None = None
    live: list[CaptureKey] = []  # (+) running at the environment though not in scope: no answer will come
    stop: bool = False  # stay closed until the process ends; a resume is an abort
    background: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.stop and self.background:
            raise ValueError("`stop` and `background` exclude each other: what stops has nothing to go on with")
        return self


class Origin(BaseModel):
    """(+) The checkpoint that is restored, in the words of whoever had it taken: for a driver that asks the
    environment what has become of its rollouts."""

    model_config = ConfigDict(extra="forbid")

    checkpoint_id: CheckpointId
    name: Annotated[str, StringConstraints(max_length=253)]
    labels: dict[str, str] = {}
    driver_state: dict[str, Any] | None = None


class RestoreRequest(Verb):
    checkpoint_dir: str
    episode_ids: list[CaptureKey]
    cell_attempt: int = Field(0, ge=0)
    attempts: dict[RolloutId, int] = {}
    restarts: list[CaptureKey] = []  # (+) recorded too, and not continued: their attempts are over
    manifest_digest: str | None = None  # (+) the manifest's SHA-256 as published; another one is refused
    session: str | None = None  # (+) the process that is meant: its successor at the same address refuses
    origin: Origin | None = None  # (+) given to environments
    any_code: bool = False  # (+) also records of another server class or of a newer format


class ResumeRequest(Verb):
    cell_attempt: int | None = Field(None, ge=0)
    session: str | None = None  # (+) as for a restore; looked at by a fresh process


class EndRequest(Verb):
    session: str | None = None  # the process that is meant


class RetireRequest(Verb):
    episode_ids: list[CaptureKey] = Field(min_length=1)
    unclaimed: bool = False  # (+) environment: only those that were restored and that no replacement has claimed


class ForgetRequest(Verb):
    rollout_ids: list[RolloutId] = Field(min_length=1)


class Blocker(Answer):
    """What a checkpoint waits for: `id` is an episode or session, `where` the step it is in."""

    id: str
    where: str
    age_seconds: float


class Report(Answer):
    """A participant's readiness. `episodes` (environment only) are the exportable ones, `unclaimed` (+) those of them
    that were restored and that no replacement has claimed."""

    ready: bool
    blockers: list[Blocker] = []
    blocker_count: int = 0
    counts: dict[str, int] = {}
    restarts: list[str] = []
    episodes: list[str] | None = None
    unclaimed: list[str] | None = None


class Write(Answer):
    """A write that goes on behind the reply of a background commit."""

    checkpoint_id: str
    state: Literal["writing", "done", "failed", "stopped"]
    manifest_digest: str | None = None
    records: int = 0
    bytes: int = 0
    detail: str = ""


class Code(Answer):
    """What reads and writes a participant's records."""

    image: str = ""
    server: str
    record_format: int


class Status(Answer):
    kind: str
    instance: str
    session: str
    phase: str
    cell_attempt: int
    restored_from: str | None = None
    checkpoint_id: str | None = None
    lease_expires_at: float | None = None
    write: Write | None = None
    report: Report
    retired: int = 0
    to_retire: list[str] = []
    to_forget: list[str] = []
    progress: dict[str, int] = {}  # (+) collection: expected, rows, failed, ended, complete
    generations: dict[str, int] = {}  # (+) model: what was cut, continued, and generated anew, by reason
    problem: str = ""  # (+) what keeps the process from its work, for people
    problem_reason: str = "ServerProblem"  # (+) a word for it: a ProblemReason
    code: Code | None = None  # (+) what would read records here


class PhaseReply(Answer):
    phase: str
    report: Report | None = None


class RenewReply(Answer):
    lease_expires_at: float


class CommitReply(Answer):
    phase: str
    manifest_digest: str | None  # None: still being written; status tells
    episodes: list[str]
    records: int
    bytes: int
    restarts: list[str] = []  # (+) in scope, and found while it froze that they cannot be continued


class RestoreReply(Answer):
    phase: str
    source_checkpoint_id: str
    restored: list[str]


class RetireReply(Answer):
    retired: list[str]


class ForgetReply(Answer):
    forgotten: list[str]
