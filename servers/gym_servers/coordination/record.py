"""What a coordinator must not forget about a cell: persisted before each act that depends on it.

On Kubernetes it is part of the stack's status, locally a file. All of a cell's history follows from it: which
processes are meant, which attempt they run under, what is being restored, which checkpoint is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

KEPT_RECOVERIES = 20
MOST_PASSED_OVER = 3  # of the newest checkpoints that a recovery could not continue from
LONGEST_WHY = 200  # characters about one of them
REFUSALS = 2  # of a checkpoint that could be read and not be installed; from then on it counts as refused


class Stage(StrEnum):
    """replacing: old processes are being ended. starting: fresh ones come up and are restored or resumed.
    running: in service. stopped: closed under a published checkpoint, until somebody asks it to go on.
    stalled: recovery was tried too often without progress."""

    REPLACING = "replacing"
    STARTING = "starting"
    RUNNING = "running"
    STOPPED = "stopped"
    STALLED = "stalled"


class Hold(StrEnum):
    """Why fresh processes do not continue by themselves. code: what is to be restored was written by other code.
    policy: a server died, and people are to decide what comes of it."""

    CODE = "code"
    POLICY = "policy"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, alias_generator=to_camel, validate_by_name=True, validate_by_alias=True)


class Pin(_Part):
    """A process as it was met: `incarnation` is its host's name for it, `session` its own."""

    incarnation: str
    session: str


class Choice(_Part):
    """The checkpoint being restored. `digest` is the SHA-256 of its `checkpoint.json`."""

    uri: str
    digest: str
    checkpoint_id: str
    name: str


class Stopped(Choice):
    """The checkpoint that a cell stands stopped under. `stays`: until somebody asks it to go on. `replacing`: why it
    is to go on with fresh processes, whatever became of the old ones; empty where it was not stopped for that."""

    stays: bool = True
    replacing: str = ""


class Chosen(_Part):
    """A checkpoint that somebody asked to continue from. From `attempt` on the cell's own checkpoints count again;
    older ones are of a history that was left. `by` is who asked, so that nobody is answered twice."""

    choice: Choice
    by: str
    attempt: int


class OpenCheckpoint(_Part):
    """A checkpoint that was begun and is not settled. `given_up`: it was declared failed, so it must not be
    published any more. `stop`: once it is published, the cell stands stopped under it, `replacing` as there."""

    checkpoint_id: str
    name: str
    uri: str
    sequence: int
    given_up: bool = False
    stop: bool = False
    replacing: str = ""


class Recovery(_Part):
    """One replacement of the cell's processes; `seconds` until it ran again, None while it does not. `planned`: it
    was asked for, nothing had died. `passed_over`: newer checkpoints that it does not continue from, the first few,
    each with why; of the cell's last recovery only."""

    attempt: int
    reason: str
    checkpoint: Choice | None
    started_at: float
    seconds: float | None = None
    planned: bool = False
    passed_over: list[str] = []


class Blocked(_Part):
    """A rollout that held the last `times` checkpoints up: under which attempt, which participant named it last, in
    which step, and for how long by then."""

    rollout: str
    attempt: int
    times: int
    participant: str
    where: str
    age_seconds: float


class Restarted(Blocked):
    """A rollout whose attempt was retired because it held checkpoints up. `at`: Unix seconds."""

    at: float


class CellRecord(_Part):
    """`refused`: URIs of checkpoints that cannot be restored; `refusals`: URI -> how often one could not be
    installed. Both are forgotten once the cell runs. `failures`: recoveries in a row that brought no progress, -1
    where the next one is asked for and none of them. `held`: why the fresh processes do not continue from what is to
    be restored, empty where they do; `held_for`: what gets the cell further: other processes or somebody who allows
    it, or whoever decides."""

    stage: Stage = Stage.STARTING
    attempt: int = 0
    sequence: int = 0
    ended: dict[str, str] = {}
    pins: dict[str, Pin] = {}
    restore: Choice | None = None
    chosen: Chosen | None = None
    refused: list[str] = []
    refusals: dict[str, int] = {}
    failures: int = 0
    held: str = ""
    held_for: Hold = Hold.CODE
    open: OpenCheckpoint | None = None
    stopped: Stopped | None = None
    recoveries: list[Recovery] = []
    blocked: list[Blocked] = []
    restarted: list[Restarted] = []

    @property
    def asked_for(self) -> bool:
        """Whether what is under way began by no death, however many tries it takes."""
        return _asked_for(self.recoveries) is not None

    def with_recovery(self, recovery: Recovery, most: int) -> list[Recovery]:
        """The recoveries with one more, at most `most` (2 or more): the newest, and of the tries under way the one
        that was asked for. What comes of a death among them depends on it: many tries must not push it out."""
        before = [each.model_copy(update={"passed_over": []}) for each in self.recoveries]
        recoveries = [*before, recovery]
        kept, asked = recoveries[-most:], _asked_for(recoveries)
        return kept if asked is None or asked in kept else [asked, *kept[1:]]

    def passing_over(self, why: Sequence[str]) -> list[str]:
        """What the recovery under way has passed over, and this: another try goes on where the one before ended."""
        last = self.recoveries[-1] if self.recoveries else None
        known = last.passed_over if last is not None and last.seconds is None else []
        return list(dict.fromkeys([*known, *(each[:LONGEST_WHY] for each in why)]))[:MOST_PASSED_OVER]

    def with_refusal(self, why: str) -> list[Recovery]:
        """The recoveries, the last of which did not get its checkpoint installed."""
        last = [each.model_copy(update={"passed_over": self.passing_over([why])}) for each in self.recoveries[-1:]]
        return [*self.recoveries[:-1], *last]

    def chosen_but(self, refused: Choice) -> Chosen | None:
        """What was asked for, unless it is this."""
        return None if self.chosen is not None and self.chosen.choice.uri == refused.uri else self.chosen


def _asked_for(recoveries: Sequence[Recovery]) -> Recovery | None:
    """The last of the tries under way that was asked for; None where a death began them all."""
    tries = takewhile(lambda recovery: recovery.seconds is None, reversed(recoveries))
    return next((recovery for recovery in tries if recovery.planned), None)


def published_under(left: OpenCheckpoint, digest: str) -> dict[str, Any]:
    """What the record says of a checkpoint from its publication on. `digest`: of its `checkpoint.json`."""
    if not left.stop:
        return {"open": None}
    stopped = Stopped(
        uri=left.uri,
        digest=digest,
        checkpoint_id=left.checkpoint_id,
        name=left.name,
        stays=not left.replacing,
        replacing=left.replacing,
    )
    return {"open": None, "stage": Stage.STOPPED, "stopped": stopped}


def tried_again(record: CellRecord, backoff_limit: int, suspended: bool) -> CellRecord | None:
    """The record as it is when somebody asks for another try: by a higher limit, or by suspending the stack - a local
    runner that ends does that too. None where there is nothing to change.

    The processes are found dead by the next look, which begins a recovery. The one after a suspension was asked for,
    so it is no failure, and nobody has to decide about it."""
    stalled = record.stage is Stage.STALLED
    if suspended:
        changes: dict[str, Any] = {"failures": -1, **({"stage": Stage.RUNNING} if stalled else {})}
        if record.held_for is Hold.POLICY:
            changes["held"] = ""
    elif stalled and record.failures <= backoff_limit:
        changes = {"failures": record.failures - 1, "stage": Stage.RUNNING}  # the one that stalled was not tried
    else:
        return None
    again = record.model_copy(update=changes)
    return None if again == record else again
