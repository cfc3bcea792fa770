"""The environment participant: it owns the episodes, their stages and boundaries.

Each stage of an episode starts by recording its boundary. A `wait` stage holds a checkpoint up; a `replay` stage
does not: it runs again after a crash, and while a checkpoint is open its result is held, so that the exported
boundary stays as it was reported. A restored boundary waits for the driver's replacement `/run`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gym_servers.participants.base import Participant, RestorePlan, Scope, Survey
from gym_servers.participants.gate import Gate
from gym_servers.participants.records import from_bytes, reading, to_bytes
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, parse_key
from gym_servers.protocol.messages import Blocker

T = TypeVar("T")
State = Mapping[str, Any]
Snapshot = Callable[[], dict[str, Any]]

REMEMBERED_RESULTS = 256  # results kept for a driver whose reply was lost; older ones are refused, never run again


@dataclass(frozen=True)
class Boundary:
    """Where an episode continues: a stage and the state it starts from. `snapshot` builds the state's record;
    it is called only when a checkpoint is written."""

    stage: str
    snapshot: Snapshot


@dataclass(eq=False)
class Live:
    """One running episode."""

    episode: Episode
    digest: str
    since: float
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


@dataclass
class _Finished:
    attempts: dict[str, int] = field(default_factory=dict)  # rollout -> highest attempt that was answered
    results: OrderedDict[str, tuple[str, Any]] = field(default_factory=OrderedDict)


class EnvironmentParticipant(Participant):
    """Episodes of one environment server. `retired_state` frees what an unclaimed record would have owned."""

    kind = "environment"

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        self._live: dict[str, Live] = {}
        self._unclaimed: dict[str, Unclaimed] = {}
        self._finished = _Finished()

    # ---- running an episode -------------------------------------------------------------------------------

    async def run(
        self,
        episode: Episode,
        digest: str,
        body: Callable[[Live, Unclaimed | None], Awaitable[Any]],
    ) -> Any:
        """Run an episode once, join it where it runs already, or answer again what was answered.

        `body` gets the restored boundary to continue from, if there is one. Raises ProtocolError: stale
        attempts, closed admission, or another task under the same episode.
        """
        if not self.gate.enabled:
            return await body(Live(episode, digest, self.gate.clock()), None)
        # First of all: a refused duplicate owns nothing, so it must not disturb what is live.
        if (live := self._live.get(episode.key)) is not None:
            self._same_task(episode, digest, live.digest)
            return await self._join(live)
        if (kept := self._finished.results.get(episode.key)) is not None:
            self._same_task(episode, digest, kept[0])
            return kept[1]
        if episode.attempt <= self._finished.attempts.get(episode.rollout_id, -1):
            raise ProtocolError("stale_attempt", f"{episode.key} was already answered")
        self.gate.fence.check(episode)
        unclaimed = self._unclaimed.get(episode.rollout_id)
        if unclaimed is not None and unclaimed.episode == episode:
            self._same_task(episode, digest, unclaimed.digest)
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
        live = Live(episode, digest, self.gate.clock())
        self._live[episode.key] = live
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

    async def _drive(
        self,
        live: Live,
        unclaimed: Unclaimed | None,
        body: Callable[[Live, Unclaimed | None], Awaitable[Any]],
    ) -> Any:
        result = await body(live, unclaimed)
        self._remember(live, result)
        return result

    def _ended(self, live: Live) -> None:
        if self._live.get(live.episode.key) is live:
            del self._live[live.episode.key]
        self.gate.touch()

    async def _join(self, live: Live) -> Any:
        """The episode's result. The caller may go away: the episode goes on, and can be joined again."""
        assert live.task is not None
        try:
            return await asyncio.shield(live.task)
        except asyncio.CancelledError:
            if live.task.cancelled():  # retired, not our caller who left
                raise ProtocolError("stale_attempt", f"{live.episode.key} was retired") from None
            raise

    def _remember(self, live: Live, result: Any) -> None:
        rollout = live.episode.rollout_id
        self._finished.attempts[rollout] = max(live.episode.attempt, self._finished.attempts.get(rollout, -1))
        self._finished.results[live.episode.key] = (live.digest, result)
        while len(self._finished.results) > REMEMBERED_RESULTS:
            self._finished.results.popitem(last=False)

    @staticmethod
    def _same_task(episode: Episode, digest: str, known: str) -> None:
        if digest != known:
            raise ProtocolError("checkpoint_conflict", f"{episode.key} is known here with another task")

    async def _retire_lower(self, episode: Episode) -> None:
        lower = [
            live.episode
            for live in self._live.values()
            if live.episode.rollout_id == episode.rollout_id and live.episode.attempt < episode.attempt
        ]
        if lower:
            await self.retire(lower)

    # ---- stages -------------------------------------------------------------------------------------------

    async def stage(
        self, live: Live, name: str, *, replay: bool, snapshot: Snapshot, step: Callable[[], Awaitable[T]]
    ) -> T:
        """Run one stage: record its boundary, park there while a checkpoint is open, then do `step`.

        Raises what `step` raises; a failing replay step leaves the restorable set at once, and its error comes
        out after the checkpoint.
        """
        live.where = name
        if not self.gate.enabled:
            return await step()
        if not live.restart:
            live.boundary = Boundary(name, snapshot)
        await self._park(live)
        live.replaying = replay
        self.gate.touch()
        try:
            result = await step()
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

    # ---- participant --------------------------------------------------------------------------------------

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
                records[key] = _record(live.digest, live.boundary.stage, live.boundary.snapshot())
        for unclaimed in self._unclaimed.values():
            if scope.covers(unclaimed.episode.key):
                records[unclaimed.episode.key] = _record(unclaimed.digest, unclaimed.stage, unclaimed.state)
        return records

    def read(self, records: Mapping[str, bytes], plan: RestorePlan) -> list[Unclaimed]:
        staged = []
        for key, data in records.items():
            episode = plan.restored(key)
            if episode is None:
                continue
            with reading(key):
                record = from_bytes(key, data)
                staged.append(Unclaimed(episode, str(record["digest"]), str(record["stage"]), dict(record["state"])))
        missing = set(plan.episodes) - set(records)
        if missing:
            raise ProtocolError("invalid_checkpoint_state", f"no record of {sorted(missing)[:5]}")
        return staged

    def install(self, staged: list[Unclaimed]) -> list[str]:
        for record in staged:
            self._unclaimed[record.episode.rollout_id] = record
            self.gate.fence.mark(record.episode.rollout_id, record.episode.attempt - 1)
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
            for live in list(self._live.values()):
                same = live.episode.rollout_id == episode.rollout_id
                if same and live.episode.attempt <= episode.attempt and live.task is not None:
                    if not live.cleaning:
                        live.task.cancel()
                    ending.append(live.task)
        if ending:
            await asyncio.wait(ending)
        self.gate.touch()

    def forget(self, rollout_ids: Collection[str]) -> None:
        gone = set(rollout_ids)
        for rollout in gone:
            self._finished.attempts.pop(rollout, None)
        for key in [k for k in self._finished.results if parse_key(k).rollout_id in gone]:
            del self._finished.results[key]


def _record(digest: str, stage: str, state: dict[str, Any]) -> bytes:
    return to_bytes({"digest": digest, "stage": stage, "state": state})
