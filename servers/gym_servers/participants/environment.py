"""The environment participant: it owns the episodes, their stages and boundaries.

Each stage of an episode starts by recording its boundary. A `wait` stage holds a checkpoint up; a `replay` stage
does not: it runs again after a crash, and while a checkpoint is open its result is held, so that the exported
boundary stays as it was reported. A restored boundary waits for the driver's replacement `/run`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from gym_servers.participants.answered import Answered, same_request
from gym_servers.participants.base import Participant, RestorePlan, Scope, Survey
from gym_servers.participants.calls import outcome
from gym_servers.participants.gate import Gate
from gym_servers.participants.limits import Budget, Limits, Slots
from gym_servers.participants.records import encoded, from_bytes, reading
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.protocol.messages import Blocker
from gym_servers.protocol.rollouts import Standing
from gym_servers.storage.store import ObjectConflict, StorageError

T = TypeVar("T")
State = Mapping[str, Any]
Snapshot = Callable[[], dict[str, Any]]
UseUp = Callable[[int], Awaitable[None]]

_CHECKPOINT = "checkpoint"  # holds budgets while one is open
_AHEAD = 1000  # how far above the cell's attempt a driver may count: the cell's next attempt is above that


@dataclass(frozen=True)
class Boundary:
    """Where an episode continues: a stage and the state it starts from. `snapshot` builds the state's record;
    it is called only when a checkpoint is written."""

    stage: str
    snapshot: Snapshot


@dataclass(eq=False)
class Live:
    """One running episode. `budget` is the work it may still do, `waiting` how long it may queue, `cleanups` how long
    ending its sessions may take. An `anonymous` one has a made-up name, which goes into no path: its caller gave
    none, and checkpointing is off."""

    episode: Episode
    digest: str
    since: float
    budget: Budget
    waiting: Budget
    cleanups: list[Budget] = field(default_factory=list, kw_only=True)
    anonymous: bool = False
    claimed: bool = False
    task: asyncio.Task[Any] | None = None
    boundary: Boundary | None = None
    parked: bool = False
    replaying: bool = False
    restart: bool = False
    cleaning: bool = False
    where: str = "admission"


@dataclass(frozen=True)
class Unclaimed:
    """A restored boundary whose replacement `/run` has not come yet. It never runs by itself."""

    episode: Episode
    digest: str
    stage: str
    state: dict[str, Any]
    remaining: float | None = None


class EnvironmentParticipant(Participant):
    """Episodes of one environment server. `boundaries` is its `checkpoint_boundaries`: without them every episode is
    a restart. `use_up` makes an attempt number durable before work starts under it; None where the driver does."""

    kind = "environment"

    def __init__(
        self,
        gate: Gate,
        *,
        boundaries: bool = True,
        limits: Limits = Limits(),  # noqa: B008
        use_up: UseUp | None = None,
    ) -> None:
        super().__init__(gate)
        self.limits = limits
        self._boundaries = boundaries
        self._use_up = use_up
        self._used_up: set[int] = set()
        self._slots = Slots(limits.max_concurrent_episodes)
        self._live: dict[str, Live] = {}
        self._by_rollout: dict[str, set[Live]] = {}
        self._unclaimed: dict[str, Unclaimed] = {}
        self._answered = Answered()
        self._over: set[str] = set()  # rollouts that a driver outside is done with, until all have forgotten them

    @property
    def external_driver(self) -> bool:
        """Whether its driver has nobody else to tell what it is done with."""
        return self._use_up is not None

    # ---- running an episode -------------------------------------------------------------------------------

    async def run(
        self,
        episode: Episode,
        digest: str,
        body: Callable[[Live, Unclaimed | None], Awaitable[Any]],
        *,
        anonymous: bool = False,
    ) -> Any:
        """Run an episode once, join it where it runs already, or answer again what was answered. What `body` raises
        is its failure, which those get who wait for it; whoever asks later has to use the next attempt.

        `body` gets the restored boundary to continue from, if there is one. Raises ProtocolError: stale
        attempts, closed admission, or another task under the same episode.
        """
        if not self.gate.enabled:
            return await body(self._new(episode, digest, anonymous=anonymous), None)
        await self._reserve(episode)
        # First of all: a refused duplicate owns nothing, so it must not disturb what is live.
        if (live := self._live.get(episode.key)) is not None:
            same_request(episode, digest, live.digest)
            return await self._join(live)
        if (kept := self._answered.known(episode, digest)) is not None:
            return kept[0]
        self.gate.fence.check(episode)
        unclaimed = self._unclaimed.get(episode.rollout_id)
        if unclaimed is not None and unclaimed.episode == episode:
            same_request(episode, digest, unclaimed.digest)
            # A record restored earlier is in the exported set of this checkpoint: its replacement may come in
            # and park. One whose restore is not resumed yet may not: its peers are not installed.
            if not self.gate.is_open and not self.gate.checkpoint_open:
                self.gate.require_open()
        else:
            self.gate.require_open()
            # A start-over under a higher attempt: what the restored record held is never going to run.
            if unclaimed is not None:
                del self._unclaimed[episode.rollout_id]
            unclaimed = None
        self.gate.fence.admit(episode)
        self._over.discard(episode.rollout_id)  # its driver wants it after all
        live = self._new(episode, digest, unclaimed)
        self._live[episode.key] = live
        self._by_rollout.setdefault(episode.rollout_id, set()).add(live)
        if unclaimed is not None:
            # The record stays exportable under the live episode until its first stage records a boundary.
            live.boundary = Boundary(unclaimed.stage, lambda state=unclaimed.state: dict(state))  # type: ignore[misc]
            live.where = unclaimed.stage
            live.parked = True  # it stands at its boundary until its first stage moves it
            del self._unclaimed[episode.rollout_id]
        live.task = asyncio.ensure_future(self._drive(live, unclaimed, body))
        # Not by the task itself: one that is cancelled before its first step runs none of its code.
        live.task.add_done_callback(lambda _: self._ended(live))
        await self._retire_lower(episode)
        return await self._join(live)

    async def _reserve(self, episode: Episode) -> None:
        """An attempt above the cell's is used up before anything runs under it, so that the cell's next one is above
        it: a driver outside of the stack has no other way to. Raises ProtocolError."""
        attempt, floor = episode.attempt, self.gate.fence.floor
        if self._use_up is None or attempt <= floor or attempt in self._used_up:
            return
        known = episode.key in self._live or self._answered.last(episode.rollout_id) == (attempt, True)
        if known or self.gate.fence.is_stale(episode) or not (self.gate.is_open or self.gate.checkpoint_open):
            return  # nothing is going to start
        if attempt > floor + _AHEAD:
            raise ProtocolError(
                "invalid_request", f"attempt {attempt} is more than {_AHEAD} above the cell's, {floor}: count by ones"
            )
        try:
            await self._use_up(attempt)
        except ObjectConflict as error:
            raise ProtocolError("stale_attempt", f"attempt {attempt} is a recovery's; use the next one") from error
        except StorageError as error:
            reason = f"attempt {attempt} cannot be made durable, try again: {error}"
            raise ProtocolError("admission_closed", reason) from error
        self._used_up.add(attempt)

    def _new(
        self, episode: Episode, digest: str, unclaimed: Unclaimed | None = None, *, anonymous: bool = False
    ) -> Live:
        clock, limits = self.gate.clock, self.limits
        left = unclaimed.remaining if unclaimed is not None else None
        budget = Budget(limits.episode_timeout_seconds if left is None else left, clock)
        return Live(
            episode,
            digest,
            clock(),
            budget,
            Budget(limits.queue_timeout_seconds, clock),
            anonymous,
            claimed=unclaimed is not None,
            restart=not self._boundaries,
        )

    @asynccontextmanager
    async def slot(self, live: Live) -> AsyncIterator[None]:
        """One of the server's `max_concurrent_episodes`. Waiting for it holds no checkpoint up: nothing of the
        episode has begun. Raises OverLimit after `queue_timeout_seconds`."""
        queued = not self._slots.take_at_once(over=live.claimed)
        if queued:
            live.parked, live.where = True, "queue"
            self.gate.touch()
            try:
                await live.waiting.spend(self._slots.take)
            except BaseException:
                live.parked = False
                raise
        try:
            if queued:
                await self._park(live)  # reported as not begun: it does not begin before the checkpoint is over
            yield
        finally:
            self._slots.free()

    async def _drive(
        self,
        live: Live,
        unclaimed: Unclaimed | None,
        body: Callable[[Live, Unclaimed | None], Awaitable[Any]],
    ) -> Any:
        try:
            result = await body(live, unclaimed)
        except Exception:
            self._answered.ended(live.episode)  # a failure is not answered again: its attempt is used up
            raise
        self.gate.fence.check(
            live.episode
        )  # retired during its last cleanup: a row of it would be one for killed work
        self._answered.remember(live.episode, live.digest, result)
        return result

    def _ended(self, live: Live) -> None:
        if live.task is not None and not live.task.cancelled():
            live.task.exception()  # every caller may be gone: an error nobody awaits is not a fault of ours
        if self._live.get(live.episode.key) is live:
            del self._live[live.episode.key]
        of_rollout = self._by_rollout.get(live.episode.rollout_id, set())
        of_rollout.discard(live)
        if not of_rollout:
            self._by_rollout.pop(live.episode.rollout_id, None)
        self.gate.touch()

    async def _join(self, live: Live) -> Any:
        """The episode's result. The caller may go away: the episode goes on, and can be joined again."""
        assert live.task is not None
        return await outcome(live.task, ProtocolError("stale_attempt", f"{live.episode.key} was retired"))

    async def _retire_lower(self, episode: Episode) -> None:
        lower = [
            live.episode
            for live in self._by_rollout.get(episode.rollout_id, ())
            if live.episode.attempt < episode.attempt
        ]
        if lower:
            await self.retire(lower)

    # ---- asking -------------------------------------------------------------------------------------------

    def standing(self, rollout_id: str) -> Standing:
        """Where a rollout stands, for its driver."""
        lowest = self.gate.fence.lowest(rollout_id)
        running = [one for one in self._by_rollout.get(rollout_id, ()) if one.episode.attempt >= lowest]
        if running:
            live = max(running, key=lambda one: one.episode.attempt)
            return self._stands(live.episode, "running", live.where)
        if (record := self._unclaimed.get(rollout_id)) is not None:
            return self._stands(record.episode, "restored", record.stage)
        if (ended := self._answered.last(rollout_id)) is not None:
            attempt, kept = ended
            if kept:
                return self._stands(Episode(rollout_id, attempt), "answered")
            lowest = max(lowest, attempt + 1)
        return Standing(rollout_id=rollout_id, state="unknown", next_attempt=lowest)

    def _stands(
        self, episode: Episode, state: Literal["restored", "running", "answered"], stage: str = ""
    ) -> Standing:
        return Standing(
            rollout_id=episode.rollout_id,
            state=state,
            attempt=episode.attempt,
            stage=stage,
            next_attempt=episode.attempt + 1,
        )

    def rollouts(self) -> set[str]:
        """Those that stand anywhere."""
        return {*self._by_rollout, *self._unclaimed, *self._answered.rollouts()}

    # ---- stages -------------------------------------------------------------------------------------------

    async def stage(
        self, live: Live, name: str, *, replay: bool, snapshot: Snapshot, step: Callable[[], Awaitable[T]]
    ) -> T:
        """Run one stage: record its boundary, park there while a checkpoint is open, then do `step`.

        Raises what `step` raises, and OverLimit where the episode's budget is used up; a failing replay step leaves
        the restorable set at once, and its error comes out after the checkpoint.
        """
        live.where = name
        if not self.gate.enabled:
            return await live.budget.spend(step)
        if not live.restart:
            live.boundary = Boundary(name, snapshot)
        await self._park(live)
        live.replaying = replay
        self.gate.touch()
        try:
            result = await live.budget.spend(step)
        except Exception:
            if replay and self.gate.checkpoint_open:
                live.boundary = None
                await self._park(live)
            raise
        else:
            if replay:
                await self._park(live)
            return result
        finally:
            live.replaying = False
            self.gate.touch()

    async def _park(self, live: Live) -> None:
        live.parked = True
        self.gate.touch()
        try:
            await self.gate.wait_checkpoint_closed()
        finally:
            live.parked = False

    def restart_only(self, live: Live) -> None:
        """The episode cannot be continued: it is reported, never exported, never in the way."""
        live.restart = True
        live.boundary = None
        self.gate.touch()

    def cleanup_budget(self, live: Live, seconds: float) -> Budget:
        """Time for ending what an episode holds. While a checkpoint is open its peers may let it wait: that does not
        count."""
        budget = Budget(seconds, self.gate.clock)
        live.cleanups.append(budget)
        if self.gate.checkpoint_open:
            budget.hold(_CHECKPOINT)
        return budget

    # ---- participant --------------------------------------------------------------------------------------

    def closing(self, restarts: frozenset[str]) -> None:
        """What stands through a checkpoint does no work: its time does not count."""
        for live in self._live.values():
            if live.replaying:
                live.budget.hold(_CHECKPOINT)
            for budget in (live.waiting, *live.cleanups):
                budget.hold(_CHECKPOINT)

    def resumed(self) -> None:
        for live in self._live.values():
            for budget in (live.budget, live.waiting, *live.cleanups):
                budget.release(_CHECKPOINT)

    def survey(self) -> Survey:
        now = self.gate.clock()
        blockers = [
            Blocker(id=live.episode.key, where=live.where, age_seconds=round(now - live.since, 3))
            for live in self._live.values()
            if not (live.parked or live.replaying or live.restart)
        ]
        exportable = {key for key, live in self._live.items() if live.boundary is not None}
        exportable |= {record.episode.key for record in self._unclaimed.values()}
        return Survey(
            blockers=blockers,
            counts={"live": len(self._live), "unclaimed": len(self._unclaimed)},
            restarts=frozenset(key for key, live in self._live.items() if live.boundary is None),
            episodes=frozenset(exportable),
            unclaimed=frozenset(record.episode.key for record in self._unclaimed.values()),
        )

    async def export(self, scope: Scope) -> dict[str, bytes]:
        records = {}
        for key, live in self._live.items():
            if live.boundary is not None and scope.covers(key):
                stage, state = live.boundary.stage, live.boundary.snapshot()
                records[key] = _record(live.digest, stage, state, live.budget.left)
        for unclaimed in self._unclaimed.values():
            if scope.covers(unclaimed.episode.key):
                records[unclaimed.episode.key] = _record(
                    unclaimed.digest, unclaimed.stage, unclaimed.state, unclaimed.remaining
                )
        return await encoded(records)

    def read(self, records: Mapping[str, bytes], plan: RestorePlan) -> list[Unclaimed]:
        staged = []
        for key, data in records.items():
            episode = plan.restored(key)
            if episode is None:
                continue
            with reading(key):
                record = from_bytes(key, data)
                left = record.get("remaining")  # absent in records of before there were limits
                staged.append(
                    Unclaimed(
                        episode,
                        str(record["digest"]),
                        str(record["stage"]),
                        dict(record["state"]),
                        None if left is None else float(left),
                    )
                )
        missing = set(plan.episodes) - set(records)
        if missing:
            raise ProtocolError("invalid_checkpoint_state", f"no record of {sorted(missing)[:5]}")
        return staged

    def install(self, staged: list[Unclaimed]) -> list[str]:
        for record in staged:
            self._unclaimed[record.episode.rollout_id] = record
        return [record.episode.key for record in staged]

    def uninstall(self) -> None:
        self._unclaimed.clear()

    async def retire(self, episodes: Sequence[Episode]) -> None:
        """Cancels each episode unless its cleanup runs, then waits for its end: cleanup is never interrupted."""
        ending = []
        for episode in episodes:
            unclaimed = self._unclaimed.get(episode.rollout_id)
            if unclaimed is not None and unclaimed.episode.attempt <= episode.attempt:
                del self._unclaimed[episode.rollout_id]
            for live in self._by_rollout.get(episode.rollout_id, ()):
                if live.episode.attempt <= episode.attempt and live.task is not None:
                    if not live.cleaning:
                        live.task.cancel()
                    ending.append(live.task)
            self._answered.drop(episode)
        if ending:
            await asyncio.wait(ending)
        self.gate.touch()

    def done_with(self, rollout_ids: Collection[str]) -> None:
        """The driver needs nothing of these any more: what stands of them is retired, then all is forgotten."""
        self._over |= set(rollout_ids)

    def _standing(self, rollout_id: str) -> list[Episode]:
        record = self._unclaimed.get(rollout_id)
        live = [one.episode for one in self._by_rollout.get(rollout_id, ())]
        return live if record is None else [*live, record.episode]

    def to_retire(self) -> list[str]:
        return sorted(episode.key for rollout in self._over for episode in self._standing(rollout))

    def to_forget(self) -> list[str]:
        return sorted(rollout for rollout in self._over if not self._standing(rollout))

    def forget(self, rollout_ids: Collection[str]) -> None:
        self._answered.forget(rollout_ids)
        self._over.difference_update(rollout for rollout in rollout_ids if not self._standing(rollout))


def stage_of(key: str, data: bytes) -> str:
    """The stage that an exported boundary continues with. Raises `invalid_checkpoint_state`."""
    with reading(key):
        return str(from_bytes(key, data)["stage"])


def _record(digest: str, stage: str, state: dict[str, Any], remaining: float | None) -> dict[str, Any]:
    left = None if remaining is None else round(remaining, 3)
    return {"digest": digest, "stage": stage, "state": state, "remaining": left}
