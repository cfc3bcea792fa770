"""The resources participant: tool sessions bound to episodes, and the calls that change them.

Calls on one session run one after another. While a checkpoint is open calls wait, they do not fail; a call in
progress holds the checkpoint up, so an exported session never has an effect half done. A seed or call that names
itself is carried out once: its repeat joins it or is answered from memory, also after a restore.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gym_servers.participants.base import Participant, RestorePlan, Scope, Survey
from gym_servers.participants.busy import Busy
from gym_servers.participants.freeing import Freeing
from gym_servers.participants.gate import Gate
from gym_servers.participants.records import encoded, reading
from gym_servers.participants.tool_sessions import SessionTable, ToolSession, decode, pair, record_of
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, highest
from gym_servers.unattended import unattended

log = logging.getLogger("gym_servers")

States = Mapping[str, Any]
Staged = tuple[list[ToolSession], States]


@dataclass(frozen=True)
class Hooks:
    """How a server's own session state is carried; each is a coroutine over all sessions that it concerns.

    `restore` validates all states - ValueError and its like refuse them - and only then builds them; nothing can
    reach them before their sessions are installed. Cut short, or followed by no install, what it built is freed by
    `retire`, which may be repeated and knows no unknown session. `park` gives up, before the process ends, what must
    not outlive it; `unpark` takes that back.
    """

    export: Callable[[Sequence[str]], Awaitable[States]]
    restore: Callable[[States], Awaitable[None]]
    retire: Callable[[str], Awaitable[None]]
    park: Callable[[Sequence[str]], Awaitable[None]]
    unpark: Callable[[Sequence[str]], Awaitable[None]]


@dataclass(frozen=True)
class _Seed:
    digest: str
    task: asyncio.Task[ToolSession]


class ResourcesParticipant(Participant):
    """Sessions of one resources server. `mode` is its `checkpoint_mode`."""

    kind = "resources"

    def __init__(self, gate: Gate, mode: str, hooks: Hooks) -> None:
        super().__init__(gate)
        self.mode = mode
        self.hooks = hooks
        self._sessions = SessionTable()
        self._seeding: dict[tuple[str, str], _Seed] = {}
        self._busy = Busy(gate)
        self._restarts: frozenset[str] = frozenset()
        self._freeing = Freeing(lambda session_id: self.hooks.retire(session_id))
        self._parking: asyncio.Task[None] | None = None

    # ---- seed ---------------------------------------------------------------------------------------------

    async def seed(
        self,
        session_id: str | None,
        episode: Episode | None,
        begin: Callable[[str], Awaitable[None]],
        *,
        digest: str,
        fresh_id: str,
        begun: Callable[[ToolSession], Awaitable[None]] | None = None,
    ) -> ToolSession:
        """Start a session: `begin` makes its state, `begun` is awaited once it is there. A session of another name
        that the episode already has is replaced, one of a lower attempt retired; a repeat with the same `digest`
        joins the first. `session_id` is None where the caller named none: then it is `fresh_id`, and a repeat is one
        that finds the episode's session as it was seeded.

        Raises `checkpoint_conflict` for another seed under the same name and `session_lost` for a name whose session
        was closed.
        """
        await self._admit(episode)
        while lower := self._replaced_by(episode):
            await self._end_all(lower)
            await self._admit(episode)
        # From here to the task no await: of seeds that come together one begins.
        if (known := self._seeded(session_id, episode, digest)) is not None:
            return known
        if session_id is not None:
            key = pair(session_id, episode)
        else:
            key = (f" {digest}", episode.key if episode is not None else fresh_id)
        running = self._seeding.get(key)
        if running is None:
            task = unattended(self._begin(session_id or fresh_id, episode, digest, begin, begun))
            running = self._seeding[key] = _Seed(digest, task)
            task.add_done_callback(lambda _: self._seeding.pop(key))
        if running.digest != digest:
            raise ProtocolError("checkpoint_conflict", f"session {session_id} is being seeded with another row")
        # Not interrupted by a client that goes away: whoever repeats its seed finds it.
        return await asyncio.shield(running.task)

    def _replaced_by(self, episode: Episode | None) -> list[ToolSession]:
        """Sessions of the lower attempts of a rollout."""
        if episode is None or not self.gate.enabled:
            return []
        return self._sessions.up_to(episode.rollout_id, episode.attempt - 1)

    def _seeded(self, session_id: str | None, episode: Episode | None, digest: str) -> ToolSession | None:
        if session_id is None:
            known = self._sessions.of(episode)
            same = known is not None and not known.touched and not known.ended and known.seed == digest
            return known if same else None
        if self._sessions.has_ended(session_id, episode):
            raise ProtocolError(
                "session_lost", f"session {session_id} has ended; a late seed does not begin it again"
            )
        known = self._sessions.get(session_id)
        if known is None:
            return None
        if known.episode != episode:
            raise ProtocolError("checkpoint_conflict", f"session {session_id} is another episode's")
        if known.seed and known.seed != digest:
            raise ProtocolError("checkpoint_conflict", f"session {session_id} was seeded with another row")
        return known

    async def _begin(
        self,
        session_id: str,
        episode: Episode | None,
        digest: str,
        begin: Callable[[str], Awaitable[None]],
        begun: Callable[[ToolSession], Awaitable[None]] | None,
    ) -> ToolSession:
        await self._admit(episode)  # admission may have been closed before this task came to its first step
        with self._busy.working(_name(session_id, episode), "seed"):
            try:
                await begin(session_id)
                self._check(episode)  # it was retired, or closed, meanwhile: what was begun must not stay
                if self._sessions.has_ended(session_id, episode):
                    raise ProtocolError("session_lost", f"session {session_id} was closed while it was seeded")
            except BaseException:
                await self.hooks.retire(session_id)
                raise
            session = ToolSession(session_id, episode, digest)
            # Looked up last: of seeds that come together one session is left.
            old = self._sessions.of(episode)
            self._sessions.add(session)
            await self._end_all([old] if old is not None else [])
            if begun is not None:
                await begun(session)
            return session

    # ---- calls --------------------------------------------------------------------------------------------

    async def call(
        self,
        session_id: str | None,
        episode: Episode | None,
        where: str,
        work: Callable[[ToolSession], Awaitable[Any]],
        *,
        call_id: str | None = None,
        digest: str = "",
        replay: bool = False,
    ) -> Any:
        """Run `work` on a session. `replay` work changes nothing and passes closed admission.

        Raises `session_lost` for an unknown session - never a fresh one in its place - and `stale_attempt`.
        """
        # Not interrupted by a client that goes away: an effect and its journal entry belong together, and a
        # call that still runs must hold a checkpoint up.
        running = self._run(session_id, episode, where, work, call_id, digest, replay)
        return await asyncio.shield(unattended(running))

    async def _run(
        self,
        session_id: str | None,
        episode: Episode | None,
        where: str,
        work: Callable[[ToolSession], Awaitable[Any]],
        call_id: str | None,
        digest: str,
        replay: bool,
    ) -> Any:
        while True:
            if not (replay and self.gate.checkpoint_open):
                await self._enter(episode)
            session = self._find(session_id, episode)
            async with session.lock:
                passes = replay and self.gate.checkpoint_open
                if self.gate.enabled and not self.gate.is_open and not passes:
                    continue  # it waits for admission without the lock: a retire or close must get it
                self._check(episode)
                if session.ended:
                    raise ProtocolError("session_lost", f"session {session.id} has ended")
                return await self._work(session, where, work, call_id, digest, replay)

    async def _work(
        self,
        session: ToolSession,
        where: str,
        work: Callable[[ToolSession], Awaitable[Any]],
        call_id: str | None,
        digest: str,
        replay: bool,
    ) -> Any:
        if call_id is not None and call_id in session.replies:
            known, reply = session.replies[call_id]
            if known != digest:
                raise ProtocolError("checkpoint_conflict", f"call {call_id} was another request")
            return reply
        if replay:
            return await work(session)
        with self._busy.working(_name(session.id, session.episode), where):
            session.touched = True
            reply = await work(session)
            if call_id is not None:
                session.replies[call_id] = (digest, reply)
        return reply

    async def close(self, session_id: str, episode: Episode | None) -> None:
        """End a session. Never refused by a retire mark, repeatable; waits while a checkpoint is open. A seed of it
        that comes late, or is in progress, begins nothing."""
        self.gate.require_named(episode)
        while True:
            while self.gate.checkpoint_open:
                await self.gate.wait_checkpoint_closed()
            session = self._sessions.get(session_id)
            if session is None:
                await self._close_unknown(session_id, episode)
                return
            if session.episode is not None and episode != session.episode:
                raise ProtocolError("stale_attempt", f"session {session_id} belongs to another attempt")
            async with session.lock:
                # A call before us may have kept the lock until a checkpoint was opened: a close must not change what
                # that one exports.
                if not self.gate.checkpoint_open:
                    with self._busy.working(_name(session_id, episode), "close"):
                        await self._end(session)
                    return

    async def _close_unknown(self, session_id: str, episode: Episode | None) -> None:
        if self.gate.enabled:
            self.gate.require_open()  # the session may yet be restored here, and would stay
        self._sessions.end(session_id, episode)
        seed = self._seeding.get(pair(session_id, episode))
        if seed is not None:
            await asyncio.wait([seed.task])

    def _find(self, session_id: str | None, episode: Episode | None) -> ToolSession:
        session = self._sessions.get(session_id or "")
        if session is None:
            raise ProtocolError("session_lost", "no such tool session here; seed one first")
        if session.episode is not None and episode != session.episode:
            named = episode.key if episode else "no episode"
            raise ProtocolError("stale_attempt", f"the session is of {session.episode.key}, not {named}")
        return session

    async def _enter(self, episode: Episode | None) -> None:
        """Wait while a checkpoint is open. Raises `admission_closed` out of service, `rollout_id_required`,
        `stale_attempt`."""
        self.gate.require_named(episode)
        if not self.gate.enabled or episode is None:
            return
        self.gate.fence.check(episode)
        await self.gate.enter()
        await self._unparked()
        self.gate.fence.check(episode)

    async def _admit(self, episode: Episode | None) -> None:
        """Enter, and fence what is below. Only a seed does: a call finds its session, or is refused."""
        await self._enter(episode)
        if episode is not None:
            self.gate.admit(episode)

    def _check(self, episode: Episode | None) -> None:
        if self.gate.enabled and episode is not None:
            self.gate.fence.check(episode)

    async def _end(self, session: ToolSession) -> None:
        """Free a session. It stays in the table until its state is freed: an end that fails can be repeated."""
        session.ended = True
        self._sessions.end(session.id, session.episode)
        await self.hooks.retire(session.id)
        self._sessions.remove(session)

    async def _end_all(self, sessions: Iterable[ToolSession]) -> None:
        async def end(session: ToolSession) -> None:
            async with session.lock:
                await self._end(session)

        await asyncio.gather(*(end(session) for session in sessions))

    # ---- participant --------------------------------------------------------------------------------------

    def closing(self, restarts: frozenset[str]) -> None:
        self._restarts = restarts

    def survey(self) -> Survey:
        blockers = self._busy.blockers(self._restarts)
        restarts = self._sessions.keys() if self.mode == "restart_only" else frozenset()
        return Survey(blockers, {"sessions": len(self._sessions), "busy": len(self._busy)}, restarts)

    async def export(self, scope: Scope) -> dict[str, bytes]:
        if self.mode == "restart_only":
            return {}
        wanted = [session for session in self._sessions.values() if self._exportable(session, scope)]
        states: States = {}
        if self.mode == "exported":
            await self._unparked()
            states = await self.hooks.export([session.id for session in wanted])
        return await encoded({session.id: record_of(session, states.get(session.id)) for session in wanted})

    def _exportable(self, session: ToolSession, scope: Scope) -> bool:
        episode = session.episode
        if episode is None or session.ended or self.gate.fence.is_stale(episode):
            return False
        return scope.covers(episode.key) and episode.key not in self._restarts

    def read(self, records: Mapping[str, bytes], plan: RestorePlan) -> Staged:
        sessions, states = [], {}
        for name, data in records.items():
            if (decoded := decode(name, data, plan)) is not None:
                session, states[session.id] = decoded
                sessions.append(session)
        return sessions, states if self.mode == "exported" else {}

    async def build(self, staged: Staged) -> Staged:
        """Builds the states. No call can reach them yet: their sessions are not in the table."""
        await self._freeing.done()
        if self.mode == "exported":
            try:
                with reading("session states"):
                    await self.hooks.restore(staged[1])
            except BaseException:
                self.discard(staged)
                raise
        return staged

    def discard(self, staged: Staged) -> None:
        self._freeing.begin(session.id for session in staged[0])

    def install(self, staged: Staged) -> list[str]:
        installed = []
        for session in staged[0]:
            assert session.episode is not None
            self._sessions.add(session)
            installed.append(session.episode.key)
        return installed

    def uninstall(self) -> None:
        sessions = self._sessions.values()
        for session in sessions:
            session.ended = True
        self._sessions.clear()
        self.discard((sessions, {}))

    async def retire(self, episodes: Sequence[Episode]) -> None:
        wanted = highest(episodes)
        await self._busy.wait_done(wanted)
        await self._end_all(
            [one for rollout, attempt in wanted.items() for one in self._sessions.up_to(rollout, attempt)]
        )

    def forget(self, rollout_ids: Collection[str]) -> None:
        """Nobody asks for their ends any more: a session whose end has failed is not kept."""
        for rollout in rollout_ids:
            for session in self._sessions.of_rollout(rollout):
                if session.ended and not session.lock.locked():
                    self._sessions.remove(session)
                    self._freeing.begin([session.id])  # once more

    async def park(self) -> None:
        sessions = [session.id for session in self._sessions.values() if not session.ended]
        self._parking = asyncio.ensure_future(self.hooks.park(sessions))
        await asyncio.shield(self._parking)

    async def _unparked(self) -> None:
        while self._parking is not None and not self._parking.done():
            await asyncio.wait([self._parking])

    def unpark(self) -> None:
        parking, sessions = self._parking, [session.id for session in self._sessions.values() if not session.ended]

        async def unpark() -> None:
            if parking is not None:
                await asyncio.wait([parking])
            await self.hooks.unpark(sessions)

        self._parking = asyncio.ensure_future(unpark())
        self._parking.add_done_callback(_report)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("sessions could not be taken into service again", exc_info=error)


def _name(session_id: str, episode: Episode | None) -> str:
    """What work on a session is known by: its episode, if it has one."""
    return episode.key if episode is not None else session_id
