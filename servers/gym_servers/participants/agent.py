"""The agent participant: its sessions, the calls beside them, and how they are carried to another process.

Sessions are kept by rollout, so that a seed, a close and a retire look at no other rollout's. What happens inside of
a session is in `agent_turns`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from gym_servers.participants.agent_state import (
    ANSWERED,
    NO_HOOKS,
    AgentHooks,
    AnsweredRow,
    Reply,
    Session,
    answered_record,
    read_record,
    session_record,
)
from gym_servers.participants.agent_turns import AgentTurns
from gym_servers.participants.answered import Answered
from gym_servers.participants.base import RestorePlan, Scope, Survey
from gym_servers.participants.busy import Busy
from gym_servers.participants.calls import ROW, Calls
from gym_servers.participants.freeing import Freeing
from gym_servers.participants.gate import Gate
from gym_servers.participants.records import encoded, reading
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, highest
from gym_servers.protocol.messages import Blocker
from gym_servers.unattended import unattended

log = logging.getLogger("gym_servers")

T = TypeVar("T")

ANSWERED_ROWS = 4096  # more than are answered between the environment's prepare and ours


class AgentParticipant(AgentTurns):
    """Sessions of one agent server, found by id and by episode. Without `exportable` (an agent that did not opt in)
    all of them are restarts. `hooks` carry and end what the agent keeps of its own."""

    kind = "agent"

    def __init__(self, gate: Gate, hooks: AgentHooks = NO_HOOKS, *, exportable: bool = True) -> None:
        super().__init__(gate)
        self.exportable = exportable
        self._hooks = hooks
        self._sessions: dict[str, Session] = {}
        self._by_rollout: dict[str, dict[int, Session]] = {}
        self._calls = Calls(gate)
        self._answered = Answered(ANSWERED_ROWS)
        self._busy = Busy(gate)
        self._restarts: frozenset[str] = frozenset()
        self._freeing = Freeing(hooks.retire)

    # ---- sessions -----------------------------------------------------------------------------------------

    async def seed(
        self,
        session_id: str,
        episode: Episode,
        accesses: list[dict[str, Any]],
        *,
        restart: bool = False,
        anonymous: bool = False,
        begin: Callable[[Session], Awaitable[None]] | None = None,
    ) -> Session:
        """Start a session; one that its rollout already has is replaced. Waits while a checkpoint is open.

        `begin` is what an agent does for a new session; it may add to it. A checkpoint and a retire wait for it.
        """
        await self._enter(episode)
        taken = self._sessions.get(session_id)
        if taken is not None and taken.episode.rollout_id != episode.rollout_id:
            raise ProtocolError("invalid_request", f"agent session {session_id} is another rollout's")
        # Looked at again after each wait: of seeds that come together one session is left.
        while old := self._of(episode.rollout_id, episode.attempt):
            with self._busy.working(episode.key, "seed"):
                await self._free(old[0])
            self._check(episode)
        session = Session(session_id, episode, accesses, restart=restart, anonymous=anonymous)
        if begin is None:
            self._add(session)
            return session
        with self._busy.working(episode.key, "seed"):
            await begin(session)
            if self.gate.enabled and self.gate.fence.is_stale(episode):
                await self._hooks.retire(episode.key)  # it was retired meanwhile: what was begun must not stay
                self._check(episode)
            self._add(session)
        return session

    def session(self, session_id: str | None, episode: Episode | None) -> Session:
        """The session a call belongs to. Raises `rollout_id_required`, `session_lost` or, for another attempt,
        `stale_attempt`."""
        self.gate.require_named(episode)
        session = self._sessions.get(session_id or "")
        if session is None or session.closing:
            if self.gate.enabled and not self.gate.checkpoint_open:
                self.gate.require_open()  # a fresh process has lost nothing yet: its sessions are to be restored
            raise ProtocolError("session_lost", f"no agent session {session_id!r} here; seed one first")
        self._belongs(session, episode)
        return session

    def session_of(self, episode: Episode) -> Session | None:
        """The session that an episode has."""
        return self._by_rollout.get(episode.rollout_id, {}).get(episode.attempt)

    async def close(
        self, session_id: str, episode: Episode | None, finish: Callable[[], Awaitable[T]] | None = None
    ) -> T | None:
        """End a session; its activation is stopped first. Waits for resume; repeatable. `finish` is what the agent
        does for a close: of closes that come together one does it, and all return what came of it. None where there
        is no session any more, or where it ended otherwise."""
        self.gate.require_named(episode)
        await self.gate.wait_checkpoint_closed()
        session = self._sessions.get(session_id)
        if session is None:
            if self.gate.enabled:
                self.gate.require_open()  # the session may yet be restored here, and would stay
            return None
        self._belongs(session, episode)
        with self._busy.working(session.episode.key, "close"):
            finished: T | None = await self._free(session, finish)
            return finished

    def _belongs(self, session: Session, episode: Episode | None) -> None:
        if self.gate.enabled and episode != session.episode:
            named = episode.key if episode else "no episode"
            raise ProtocolError("stale_attempt", f"session {session.id} is of {session.episode.key}, not {named}")

    def _check(self, episode: Episode) -> None:
        """A retire may have come while we waited: a seed must not bring back what it ended."""
        if self.gate.enabled:
            self.gate.fence.check(episode)

    async def _enter(self, episode: Episode) -> None:
        if self.gate.enabled:
            self.gate.fence.check(episode)
            await self.gate.enter()
            self.gate.fence.admit(episode)  # looked at again: a retire may have come while we waited

    def _present(self, session: Session) -> bool:
        return not session.closing and self._sessions.get(session.id) is session

    def _of(self, rollout: str, attempt: int) -> list[Session]:
        """A rollout's sessions up to an attempt."""
        return [session for n, session in self._by_rollout.get(rollout, {}).items() if n <= attempt]

    def _add(self, session: Session) -> None:
        self._sessions[session.id] = session
        self._by_rollout.setdefault(session.episode.rollout_id, {})[session.episode.attempt] = session

    def _remove(self, session: Session) -> None:
        if self._sessions.get(session.id) is session:
            del self._sessions[session.id]
        rollout = session.episode.rollout_id
        attempts = self._by_rollout.get(rollout, {})
        if attempts.get(session.episode.attempt) is session:
            del attempts[session.episode.attempt]
            if not attempts:
                del self._by_rollout[rollout]

    async def _free(self, session: Session, finish: Callable[[], Awaitable[Any]] | None = None) -> Any:
        """End a session once, whoever asks for it; a caller that leaves does not interrupt that. What came of the
        `finish` of whoever was first."""
        if not session.closing:
            session.closing, session.closing_since = True, self.gate.clock()
        if session.ending is None:
            session.ending = unattended(self._end(session, finish))
        return await asyncio.shield(session.ending)

    async def _end(self, session: Session, finish: Callable[[], Awaitable[Any]] | None) -> Any:
        try:
            await self._calls.end_within(session.episode)
            task = session.activation.task if session.activation else None
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
            finished = await finish() if finish is not None else None
            await self._hooks.retire(session.episode.key)
            self._remove(session)
            return finished
        except Exception as error:
            session.ending = None  # asked for again, it is tried again
            log.exception("the agent could not end the session of %s", session.episode.key)
            raise ProtocolError("checkpoint_error", f"ending a session failed: {type(error).__name__}") from error
        finally:
            self.gate.touch()

    # ---- calls without a session --------------------------------------------------------------------------

    async def direct(self, episode: Episode, work: Callable[[], Awaitable[T]]) -> T:
        """A call that nothing can continue: reported as a restart while it runs."""
        await self._enter(episode)
        result: T = await self._calls.join(self._calls.begin(episode, "", "", work, restart=True))
        return result

    async def exclusive(
        self, session: Session, index: int | None, digest: str, work: Callable[[], Awaitable[dict[str, Any]]]
    ) -> dict[str, Any]:
        """A call on a session that has no boundaries inside: it holds no checkpoint up, and one that is taken
        meanwhile cannot continue its episode. To wait for it would be in vain: its next model call is not admitted
        any more. Where it has an index, a repeat joins it or gets its reply again."""
        episode = session.episode
        name = "" if index is None else f"activation {index}"
        if (reply := self._known(session, index, digest)) is not None:
            return reply
        call = self._calls.find(episode, name, digest)
        if call is None:
            await self._enter(episode)
            # All of this may have changed while we waited for a checkpoint to end.
            if not self._present(session):
                raise ProtocolError("session_lost", f"agent session {session.id} was closed")
            if (reply := self._known(session, index, digest)) is not None:
                return reply
            call = self._calls.find(episode, name, digest)

        async def run() -> dict[str, Any]:
            await self.gate.wait_checkpoint_closed()
            self._check(episode)
            try:
                response = await work()
            finally:
                await self.gate.wait_checkpoint_closed()  # what was reported as a restart stays one until then
            if index is not None:
                session.reply = Reply(index, digest, response)
            return response

        if call is None:
            call = self._calls.begin(episode, name, digest, run, restart=True)
        result: dict[str, Any] = await self._calls.join(call)
        return result

    async def row(
        self, episode: Episode, digest: str, work: Callable[[], Awaitable[T]], *, restart: bool = False
    ) -> T:
        """Serve a whole row once: a repeat joins it or is answered again, also after a restore. `restart`: it cannot
        be continued while it runs.

        A failed one is not answered again: its attempt is used up.
        """
        entered = False
        while True:
            if self.gate.enabled and (kept := self._answered.known(episode, digest)) is not None:
                known: T = kept[0]
                return known
            if (running := self._calls.find(episode, ROW, digest)) is not None:
                joined: T = await self._calls.join(running)
                return joined
            if entered:
                break
            await self._enter(episode)
            entered = True

        async def run() -> T:
            try:
                result = await work()
            except Exception:
                if self.gate.enabled:
                    self._answered.ended(episode)
                raise
            await self.gate.wait_checkpoint_closed()  # the boundary of its return: it is exported as answered
            return result

        call = self._calls.begin(episode, ROW, digest, run, restart=restart or not self.exportable)
        answer: T = await self._calls.join(call)
        return answer

    async def answered(self, session: Session, digest: str, result: Any) -> None:
        """A row's session has served: from here on its answer is what a checkpoint holds."""
        self.remember(session.episode, digest, result)
        await self._free(session)

    def remember(self, episode: Episode, digest: str, result: Any) -> None:
        """Answer this row so from here on. `result` is a JSON value."""
        if self.gate.enabled:
            self._answered.remember(episode, digest, result)

    @asynccontextmanager
    async def step(self, episode: Episode, where: str) -> AsyncIterator[None]:
        """Work that a checkpoint waits for; it does not begin while one is open."""
        await self.gate.wait_checkpoint_closed()
        self._check(episode)
        with self._busy.working(episode.key, where):
            yield

    # ---- participant --------------------------------------------------------------------------------------

    def closing(self, restarts: frozenset[str]) -> None:
        self._restarts = restarts

    def _no_continuation(self) -> frozenset[str]:
        """Capture keys of what runs here and cannot be continued."""
        if not self.exportable:
            held = {session.episode.key for session in self._sessions.values()}
            return frozenset(held | self._busy.keys() | self._calls.restarts())
        unable = {one.episode.key for one in self._sessions.values() if one.restart or one.failed}
        return frozenset(unable | self._calls.restarts())

    def survey(self) -> Survey:
        now = self.gate.clock()
        restarts = self._no_continuation()
        passed = self._restarts | restarts
        blockers = self._busy.blockers(passed)
        for session in self._sessions.values():
            active = session.activation
            if session.closing:
                where, since = "ending", session.closing_since
            elif active is not None and not active.standing:
                where, since = active.where, active.since
            else:
                continue
            if session.episode.key not in passed:
                blockers.append(Blocker(id=session.episode.key, where=where, age_seconds=round(now - since, 3)))
        counts = {"sessions": len(self._sessions), "busy": len(self._busy) + len(self._calls)}
        return Survey(blockers, counts, restarts)

    async def export(self, scope: Scope) -> dict[str, bytes]:
        left_out = self._restarts | self._no_continuation()
        sessions = [
            session
            for session in self._sessions.values()
            if scope.covers(session.episode.key) and session.episode.key not in left_out
        ]
        states = await self._hooks.export([session.episode.key for session in sessions])
        records = {one.id: session_record(one, states.get(one.episode.key)) for one in sessions}
        for episode, digest, result in self._answered:
            if scope.covers(episode.key):
                records[f"{ANSWERED}/{episode.key}"] = answered_record(AnsweredRow(episode, digest, result))
        return await encoded(records)

    def read(self, records: Mapping[str, bytes], plan: RestorePlan) -> list[Session | AnsweredRow]:
        return [one for name, data in records.items() if (one := read_record(name, data, plan)) is not None]

    async def build(self, staged: list[Session | AnsweredRow]) -> list[Session | AnsweredRow]:
        await self._freeing.done()
        try:
            with reading("agent states"):
                await self._hooks.restore({one.episode.key: one.state for one in staged if isinstance(one, Session)})
        except BaseException:
            self.discard(staged)
            raise
        return staged

    def discard(self, staged: list[Session | AnsweredRow]) -> None:
        self._freeing.begin(one.episode.key for one in staged if isinstance(one, Session))

    def install(self, staged: list[Session | AnsweredRow]) -> list[str]:
        now = self.gate.clock()
        for one in staged:
            if isinstance(one, AnsweredRow):
                self._answered.remember(one.episode, one.digest, one.result)
            else:
                one.state = None
                if one.restored is not None:
                    one.restored.since = now
                self._add(one)
        return [one.episode.key for one in staged]

    def uninstall(self) -> None:
        self._freeing.begin(session.episode.key for session in self._sessions.values())
        self._sessions.clear()
        self._by_rollout.clear()
        self._answered.clear()

    async def retire(self, episodes: Sequence[Episode]) -> None:
        wanted = highest(episodes)
        await self._calls.end(wanted)
        await self._busy.wait_done(wanted)  # what a seed in progress brings is found below
        ending = [session for rollout, attempt in wanted.items() for session in self._of(rollout, attempt)]
        failures = await asyncio.gather(*(self._free(session) for session in ending), return_exceptions=True)
        for episode in episodes:
            self._answered.drop(episode)
        for failure in failures:
            if failure is not None:
                raise failure

    def forget(self, rollout_ids: Collection[str]) -> None:
        """Nobody asks for their ends any more: a session whose end has failed holds nothing up from now on."""
        self._answered.forget(rollout_ids)
        for rollout in rollout_ids:
            for session in [one for one in self._by_rollout.get(rollout, {}).values() if one.closing]:
                self._remove(session)
                if session.ending is None:
                    self._freeing.begin([session.episode.key])  # once more
