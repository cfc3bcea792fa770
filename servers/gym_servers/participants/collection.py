"""The collection participant: the driver that sends `/run` and keeps the rows.

A rollout is either durable in the output, or running in the restorable set, or it starts over. prepare stops
dispatching and is ready at once; commit waits for every answer that is under way, so that no rollout falls
between the output and the environment's boundaries. Everything about rows is asked of the `Output`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from gym_servers.participants.base import Participant, RestorePlan, Scope, Survey
from gym_servers.participants.gate import Gate
from gym_servers.participants.records import encoded, from_bytes, reading
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, next_attempt
from gym_servers.protocol.messages import ProblemReason
from gym_servers.storage.store import ObjectConflict, StorageError

log = logging.getLogger("gym_servers")

RETRY_SECONDS = 0.5  # between tries of a `/run` that was not admitted or whose environment did not answer
OUTPUT_RETRY_SECONDS = 1.0
TASKS_RETRY_SECONDS = 10.0
BUSY_LOOK_SECONDS = 30.0  # between looks at who has which rollouts, while there is work
IDLE_LOOK_SECONDS = 5.0  # the same while there is none
RECORD = "driver"

T = TypeVar("T")


@dataclass(frozen=True)
class Rollout:
    """One rollout to collect: the task's row, and which of its repeats this is."""

    id: str
    row: Mapping[str, Any]
    task_index: int
    repeat: int


@dataclass(frozen=True)
class RunResult:
    """The environment's answer: a result row, or a failure that may be tried again."""

    row: Mapping[str, Any] | None
    failure: Mapping[str, Any] | None = None


class NotAnswered(Exception):
    """The environment gave no answer yet; the same episode is sent again: it runs once."""


class TasksError(ValueError):
    """The tasks cannot be used; the message names the line and what to correct."""


class Output(Protocol):
    """Where rows go. All calls are durable when they return; a row is kept once per rollout."""

    async def done(self) -> set[str]:
        """Rollouts with a durable row."""

    async def save(self, rollout: Rollout, episode: Episode, row: Mapping[str, Any]) -> None:
        """Keep a row. Where the rollout has one already, that one stands."""

    async def save_failure(self, rollout: Rollout, episode: Episode, failure: Mapping[str, Any]) -> None:
        """Keep the failure of one attempt."""

    async def finish(self, complete: bool) -> None:
        """Write the result files."""


class Assignment(Protocol):
    """Which rollouts are this driver's. Every call that is awaited may raise StorageError.

    `shared`: other drivers write into the same output. `over`: all rollouts of all drivers have ended; `merges`: this
    one writes the result files then, and `merged` says that it was done.
    """

    @property
    def shared(self) -> bool: ...

    @property
    def over(self) -> bool: ...

    @property
    def merges(self) -> bool: ...

    @property
    def merged(self) -> bool: ...

    async def leaves(self) -> bool:
        """Whether the cell is to go: what has not begun is not begun any more. It may be to stay after all."""

    async def look(self) -> None:
        """See afresh who has what."""

    def holds(self, rollout: Rollout) -> bool:
        """Whether this driver may send it."""

    def expects(self, rollout: Rollout) -> bool:
        """Whether it does, or will once it comes to it; or would, had a driver that is gone not ended it."""

    def lowest(self, rollout: Rollout) -> int:
        """The lowest attempt it may run under: another driver may have tried it before."""

    def lost(self, rollout: Rollout) -> bool:
        """Whether another driver has it, as far as is known."""

    async def take(self, rollouts: Collection[Rollout]) -> None:
        """Claim those that no driver has had, whoever's they would be: their work is here."""

    async def claim(self) -> tuple[Sequence[Rollout], bool]:
        """Some more rollouts to send, none where there are none for now; and whether another driver had them."""

    async def end(self, ended: Collection[str]) -> None:
        """These have a row or were given up; others may be among them."""

    async def set_merged(self) -> None:
        """The result files are written."""


class Alone:
    """The assignment of a driver that has the output to itself."""

    shared, over, merges, merged = False, True, True, False

    async def leaves(self) -> bool:
        return False

    async def look(self) -> None:
        pass

    def holds(self, rollout: Rollout) -> bool:
        return True

    def expects(self, rollout: Rollout) -> bool:
        return True

    def lowest(self, rollout: Rollout) -> int:
        return 0

    def lost(self, rollout: Rollout) -> bool:
        return False

    async def take(self, rollouts: Collection[Rollout]) -> None:
        pass

    async def claim(self) -> tuple[Sequence[Rollout], bool]:
        return (), False

    async def end(self, ended: Collection[str]) -> None:
        pass

    async def set_merged(self) -> None:
        pass


@dataclass(frozen=True)
class Job:
    """What is to be collected, where its rows go, and which of it is this driver's."""

    rollouts: Sequence[Rollout]
    output: Output
    assignment: Assignment = field(default_factory=Alone)


FindJob = Callable[[], Awaitable[Job]]
Run = Callable[[Episode, Rollout], Awaitable[RunResult]]
PersistAttempt = Callable[[int], Awaitable[None]]


class CollectionParticipant(Participant):
    """Drives those rollouts of a job that are its own, with bounded concurrency.

    `find` reads the job; it raises TasksError and StorageError while there is none that can be used.
    `run` sends one `/run`; it raises ProtocolError for a refusal and NotAnswered where no answer came.
    `persist_attempt` makes an attempt number durable before work starts under it.
    """

    kind = "collection"

    def __init__(
        self,
        gate: Gate,
        find: FindJob,
        run: Run,
        persist_attempt: PersistAttempt,
        *,
        concurrency: int,
        max_failures: int,
    ) -> None:
        super().__init__(gate)
        self._find, self._run, self._persist = find, run, persist_attempt
        self._concurrency, self._max_failures = concurrency, max_failures
        self._rollouts: dict[str, Rollout] = {}  # none until the job is found
        self._output: Output  # the job's
        self._assignment: Assignment = Alone()
        self._expected: set[str] = set()  # none until the rows of earlier processes are known
        self._queue: deque[Rollout] = deque()
        self._collecting: set[str] = set()
        self._claiming = asyncio.Lock()
        self._done: set[str] = set()
        self._failed: set[str] = set()
        self._attempts: dict[str, int] = {}  # last attempt under which a rollout was sent, or is to be sent
        self._continued: dict[str, Episode] = {}  # restored, not answered yet
        self._outstanding: dict[str, Episode] = {}
        self._owned: set[int] = set()  # attempt numbers that this driver has used up
        self._forgettable: set[str] = set()
        self._finished = False

    async def load(self) -> None:
        """Look at what the output holds already, and at what is ours, so that a restored episode with a row, or one
        that is another driver's by now, can be told apart."""
        await self._see_rows()  # first: of what is expected they count as done from the beginning
        await self._look()

    async def _see_rows(self) -> None:
        done = await self._durably(self._output.done)
        self._done |= done & set(self._rollouts)

    async def _look(self) -> None:
        await self._durably(self._assignment.look)
        await self._count()

    async def _count(self) -> None:
        before = self._expected
        self._expected = {id for id, rollout in self._rollouts.items() if self._assignment.expects(rollout)}
        if not self._expected <= before:
            await self._see_rows()  # a driver that is gone may have collected some of them
        self.gate.touch()

    async def _durably(self, write: Callable[[], Awaitable[T]]) -> T:
        """Ask the output until it answers: a row is never dropped because storage was away for a while."""
        waited = False
        while True:
            try:
                result = await write()
            except ObjectConflict:
                raise  # an answer, not an outage
            except StorageError as error:
                waited = True
                self._tell(ProblemReason.OUTPUT_FAILING, str(error))
                await asyncio.sleep(OUTPUT_RETRY_SECONDS)
            else:
                if waited:  # else the problem is somebody else's
                    self._tell()
                return result

    def _tell(self, reason: ProblemReason = ProblemReason.SERVER_PROBLEM, problem: str = "") -> None:
        """What keeps us from our work; nothing does, without it."""
        if problem and problem != self.problem:
            log.warning("%s", problem)
        self.problem, self.problem_reason = problem, reason

    # ---- driving ------------------------------------------------------------------------------------------

    async def drive(self) -> None:
        """Send every rollout of ours that has no row, continued ones first, until all of all drivers are done or have
        failed."""
        try:
            await self._begin()
            await self._drive()
        except Exception as error:
            first = error
            while isinstance(first, ExceptionGroup):
                first = first.exceptions[0]  # the others were ended for it
            ended = f"the collection ended by an error: {type(first).__name__}: {first}"
            self._tell(ProblemReason.COLLECTION_FAILED, ended)
            raise

    async def _begin(self) -> None:
        """Read the job, again and again: the tasks may be put there, or put right, later."""
        while True:
            try:
                job = await self._find()
            except (TasksError, StorageError) as error:
                self._tell(ProblemReason.TASKS_INVALID, str(error))
                await asyncio.sleep(TASKS_RETRY_SECONDS)
            else:
                break
        self._tell()
        self._output, self._assignment = job.output, job.assignment
        self._rollouts = {rollout.id: rollout for rollout in job.rollouts}

    async def _drive(self) -> None:
        await self.load()
        await self.gate.wait_open()
        # In a stack that has not run yet, nobody has claimed what was restored into it.
        continued = [self._rollouts[id] for id in self._continued if id in self._rollouts]
        await self._durably(lambda: self._assignment.take(continued))
        await self._count()
        self._forgettable |= self._done | self._failed  # by an earlier process, whose restored marks are here again
        ours = [rollout for rollout in self._rollouts.values() if self._assignment.holds(rollout)]
        self._queue.extend(sorted(ours, key=lambda rollout: rollout.id not in self._continued))
        while True:
            await self._work_off()
            await self._durably(lambda: self._assignment.end(self._done | self._failed))
            await self._look()
            if self._assignment.over:
                break
            await asyncio.sleep(IDLE_LOOK_SECONDS)
        await self._finish()
        self._finished = True
        self.gate.touch()

    async def _finish(self) -> None:
        """The result files, once: there are many rows to read where they are objects."""
        while not self._assignment.merges:
            if self._assignment.merged:
                return
            await asyncio.sleep(IDLE_LOOK_SECONDS)
            await self._look()
        if self._assignment.shared:
            await self._see_rows()  # the others' count too
        complete = len(self._done) == len(self._rollouts)
        await self._durably(lambda: self._output.finish(complete))
        await self._durably(self._assignment.set_merged)

    async def _work_off(self) -> None:
        """Collect until nothing is left that is ours."""

        async def work(rollout: Rollout | None = None) -> None:
            while (rollout := rollout or await self._next()) is not None:
                await self._collect(rollout)
                self._collecting.discard(rollout.id)
                rollout = None

        async def keep_looking() -> None:
            while True:
                await asyncio.sleep(BUSY_LOOK_SECONDS)
                await self._look()

        if (first := await self._next()) is None:
            return
        async with asyncio.TaskGroup() as group:
            looking = [group.create_task(keep_looking())] if self._assignment.shared else []
            workers = [group.create_task(work(first))]
            workers += [group.create_task(work()) for _ in range(1, min(self._concurrency, len(self._rollouts)))]
            await asyncio.wait(workers)
            for task in looking:
                task.cancel()

    async def _next(self) -> Rollout | None:
        """A rollout that was ours when it was put into the queue, and has not ended. None where nothing is left for
        now, and in a cell that is to go once all that it has begun has ended."""
        async with self._claiming:
            while True:
                leaves = await self._assignment.leaves()
                if (rollout := self._pick(begun=leaves)) is not None:
                    self._collecting.add(rollout.id)
                    return rollout
                if leaves:
                    if not self._collecting:
                        return None
                    # Whoever waits here goes on where the cell is to stay after all: with as many at once as before.
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self.gate.wait_change(), IDLE_LOOK_SECONDS)
                    continue
                more, again = await self._durably(self._assignment.claim)
                if not more:
                    return None
                self._queue.extend(more)
                await self._count()
                if again:
                    await self._see_rows()

    def _pick(self, *, begun: bool) -> Rollout | None:
        """The next of the queue; with `begun` only one that was restored, which are the first."""
        while self._queue:
            id = self._queue[0].id
            open = not self._is_over(id) and id not in self._collecting
            if open and begun and id not in self._continued:
                return None
            rollout = self._queue.popleft()
            if open:
                return rollout
        return None

    async def _collect(self, rollout: Rollout) -> None:
        failures, resend = 0, None
        while True:
            await self.gate.wait_open()
            if not self._assignment.holds(rollout):
                return
            episode, resend = resend or self._continued.get(rollout.id), None
            if episode is None:
                wanted = next_attempt(self._attempts.get(rollout.id), self.gate.fence.floor)
                wanted = max(wanted, self._assignment.lowest(rollout))
                episode = Episode(rollout.id, await self._use_up(wanted))
                if not self.gate.is_open or episode.attempt < self.gate.fence.floor:
                    continue
            self._attempts[rollout.id] = episode.attempt
            self._outstanding[rollout.id] = episode
            try:
                result = await self._ask(episode, rollout)
                if result is None:
                    self._continued.pop(rollout.id, None)
                    continue
                if isinstance(result, NotAnswered):
                    pass
                elif result.row is not None:
                    await self._keep(rollout, episode, result.row)
                    self._done.add(rollout.id)
                    return
                else:
                    failures += 1
                    await self._keep_failure(rollout, episode, result.failure or {})
                    if failures >= self._max_failures or (result.failure or {}).get("terminal"):
                        self._failed.add(rollout.id)
                        return
                    self._continued.pop(rollout.id, None)
                    continue
            finally:
                del self._outstanding[rollout.id]
                if self._is_over(rollout.id):
                    self._continued.pop(rollout.id, None)
                    self._forgettable.add(rollout.id)
                self.gate.touch()
            # The same episode again. Meanwhile it is not outstanding: a checkpoint must not wait for an answer to
            # a request that the environment never admitted.
            resend = episode
            await asyncio.sleep(RETRY_SECONDS)

    async def _use_up(self, attempt: int) -> int:
        """The lowest number from `attempt` that is this driver's, durable before work starts under it: the cell's
        next attempt must be above it. A number that a recovery has reserved is the recovery's, whatever became of
        it."""
        while attempt > self.gate.fence.floor and attempt not in self._owned:
            try:
                await self._durably(partial(self._persist, attempt))
                self._owned.add(attempt)
            except ObjectConflict:
                attempt += 1
        return attempt

    async def _keep(self, rollout: Rollout, episode: Episode, row: Mapping[str, Any]) -> None:
        await self._durably(lambda: self._output.save(rollout, episode, row))

    async def _keep_failure(self, rollout: Rollout, episode: Episode, failure: Mapping[str, Any]) -> None:
        await self._durably(lambda: self._output.save_failure(rollout, episode, failure))

    async def _ask(self, episode: Episode, rollout: Rollout) -> RunResult | NotAnswered | None:
        """The answer to `/run`; NotAnswered where the same episode is to be sent again; None where this attempt
        can never be answered and the rollout has to start over."""
        try:
            return await self._run(episode, rollout)
        except NotAnswered as unknown:
            return unknown
        except ProtocolError as refusal:
            if refusal.code == "admission_closed":
                return NotAnswered(str(refusal))
            if refusal.code in ("stale_attempt", "session_lost", "checkpoint_conflict"):
                return None
            return RunResult(None, {"failure_reason": str(refusal), "terminal": True})
        except Exception as error:
            # Of one rollout alone: whatever is odd about it or its answer, the others go on.
            log.exception("%s could not be sent, or its answer not be read", episode.key)
            reason = f"it could not be sent, or its answer not be read: {type(error).__name__}"
            return RunResult(None, {"failure_kind": "driver_error", "failure_reason": reason, "terminal": False})

    # ---- participant --------------------------------------------------------------------------------------

    def survey(self) -> Survey:
        return Survey((), {"outstanding": len(self._outstanding), "rows": len(self._done & self._expected)})

    async def export(self, scope: Scope) -> dict[str, bytes]:
        def answered() -> bool:
            return all(
                scope.covers(episode.key) or episode.key in scope.live for episode in self._outstanding.values()
            )

        if scope.keys is not None:
            await self.gate.wait_until(answered)
        attempts = {r: a for r, a in self._attempts.items() if r not in self._done}
        return await encoded({RECORD: {"attempts": attempts, "failed": sorted(self._failed)}})

    def read(
        self, records: Mapping[str, bytes], plan: RestorePlan
    ) -> tuple[dict[str, int], set[str], dict[str, Episode]]:
        if RECORD not in records:
            raise ProtocolError("invalid_checkpoint_state", "the driver's record is missing")
        record = from_bytes(RECORD, records[RECORD])
        with reading(RECORD):
            attempts = {str(r): int(a) for r, a in record["attempts"].items()}
            failed = set(record["failed"])
        continued = {episode.rollout_id: episode for episode in plan.episodes.values()}
        return attempts, failed, continued

    def install(self, staged: tuple[dict[str, int], set[str], dict[str, Episode]]) -> list[str]:
        self._attempts, self._failed, continued = staged
        self._continued = continued
        return [episode.key for episode in continued.values()]

    def uninstall(self) -> None:
        self._attempts, self._failed, self._continued = {}, set(), {}

    async def retire(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            if self._continued.get(episode.rollout_id) == episode:
                del self._continued[episode.rollout_id]
                if self._rollouts and episode.rollout_id not in self._rollouts:
                    self._forgettable.add(episode.rollout_id)

    def to_retire(self) -> list[str]:
        """Restored episodes that are not going to be sent: the output was ahead of the checkpoint and has their row,
        there are no such tasks any more, or they are another driver's by now."""
        if not self._rollouts:
            return []  # the job is not found yet: they may be in it
        lost, rollouts = self._assignment.lost, self._rollouts
        return [
            e.key for r, e in self._continued.items() if r not in rollouts or self._is_over(r) or lost(rollouts[r])
        ]

    def to_forget(self) -> list[str]:
        return sorted(self._forgettable)

    def _is_over(self, rollout: str) -> bool:
        return rollout in self._done or rollout in self._failed

    def forget(self, rollout_ids: Collection[str]) -> None:
        # What is still to be retired is marked once more by that, and has to be forgotten again.
        self._forgettable.difference_update(set(rollout_ids) - set(self._continued))

    def progress(self) -> dict[str, int]:
        rows = len(self._done & self._expected)
        return {
            "expected": len(self._expected),
            "rows": rows,
            "failed": len(self._failed),
            "ended": int(self._finished),
            "complete": int(self._finished and rows == len(self._expected)),
        }
