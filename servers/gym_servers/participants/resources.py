"""The resources participant: tool sessions bound to episodes, and the calls that change them.

Calls on one session run one after another. While a checkpoint is open calls wait, they do not fail; a call in
progress holds the checkpoint up, so an exported session never has an effect half done. A call that names its
tool call is answered from memory when it is repeated, also after a restore.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_servers.participants.base import Participant, RestorePlan, Scope, Survey
from gym_servers.participants.busy import Busy
from gym_servers.participants.gate import Gate
from gym_servers.participants.records import from_bytes, reading, to_bytes
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, parse_key

ExportHook = Callable[[Sequence[str]], Awaitable[Mapping[str, Any]]]
CheckHook = Callable[[Mapping[str, Any]], Mapping[str, Any]]
InstallHook = Callable[[Mapping[str, Any]], None]
RetireHook = Callable[[str], Awaitable[None]]


@dataclass(frozen=True)
class Hooks:
    """How a server's own session state is carried. `check` validates states (it may raise ValueError) and gives
    what `install` takes; `retire` frees one session and may be repeated."""

    export: ExportHook
    check: CheckHook
    install: InstallHook
    retire: RetireHook


@dataclass(eq=False)
class ToolSession:
    """One session. `replies` answer repeated tool calls; `effects` counts the calls that changed something."""

    id: str
    episode: Episode | None
    replies: dict[str, tuple[str, Any]] = field(default_factory=dict)
    effects: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class ResourcesParticipant(Participant):
    """Sessions of one resources server. `mode` is its `checkpoint_mode`."""

    kind = "resources"

    def __init__(self, gate: Gate, mode: str, hooks: Hooks) -> None:
        super().__init__(gate)
        self.mode = mode
        self.hooks = hooks
        self._sessions: dict[str, ToolSession] = {}
        self._by_key: dict[str, str] = {}
        self._busy = Busy(gate)
        self._restarts: frozenset[str] = frozenset()

    async def seed(
        self, session_id: str, episode: Episode | None, begin: Callable[[], Awaitable[None]]
    ) -> ToolSession:
        """Start a session; one that the episode already has is replaced, and its state freed."""
        await self._enter(episode)
        with self._busy.working(_name(session_id, episode), "seed"):
            await begin()
            if episode is not None and self.gate.enabled and self.gate.fence.is_stale(episode):
                await self.hooks.retire(session_id)  # it was retired meanwhile: what was begun must not stay
                self.gate.fence.check(episode)
            session = ToolSession(session_id, episode)
            self._sessions[session_id] = session
            if episode is not None:
                # Looked up last: of seeds that come together one session is left.
                old = self._by_key.get(episode.key)
                self._by_key[episode.key] = session_id
                if old is not None and old != session_id:
                    await self._end(old)
            return session

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
        return await asyncio.shield(asyncio.ensure_future(running))

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
        if not (replay and self.gate.checkpoint_open):
            await self._enter(episode)
        session = self._find(session_id, episode)
        async with session.lock:
            if not (replay and self.gate.checkpoint_open):
                await self._enter(episode)
            if self._sessions.get(session.id) is not session:
                raise ProtocolError("session_lost", f"session {session.id} has ended")
            if call_id is not None and call_id in session.replies:
                known, reply = session.replies[call_id]
                if known != digest:
                    raise ProtocolError("checkpoint_conflict", f"tool call {call_id} was another request")
                return reply
            if replay:
                return await work(session)
            with self._busy.working(_name(session.id, session.episode), where):
                reply = await work(session)
                if call_id is not None:
                    session.replies[call_id] = (digest, reply)
            return reply

    async def close(self, session_id: str, episode: Episode | None) -> None:
        """End a session. Never refused by a retire mark, repeatable; waits while a checkpoint is open."""
        while True:
            while self.gate.checkpoint_open:
                await self.gate.wait_checkpoint_closed()
            session = self._sessions.get(session_id)
            if session is None:
                return
            if session.episode is not None and episode != session.episode:
                raise ProtocolError("stale_attempt", f"session {session_id} belongs to another attempt")
            async with session.lock:
                # A call before us may have waited with the lock for a checkpoint to end: a close that waits for the
                # lock must not hold that checkpoint up, so it counts as work from here on.
                if not self.gate.checkpoint_open:
                    with self._busy.working(_name(session_id, episode), "close"):
                        await self._end(session_id)
                    return

    def _find(self, session_id: str | None, episode: Episode | None) -> ToolSession:
        session = self._sessions.get(session_id or "")
        if session is None:
            raise ProtocolError("session_lost", "no such tool session here; seed one first")
        if session.episode is not None and episode != session.episode:
            named = episode.key if episode else "no episode"
            raise ProtocolError("stale_attempt", f"the session is of {session.episode.key}, not {named}")
        return session

    async def _enter(self, episode: Episode | None) -> None:
        if not self.gate.enabled:
            return
        if episode is None:
            raise ProtocolError("rollout_id_required", "call under /ng-rollout/<rollout id>/ with checkpointing on")
        self.gate.fence.check(episode)
        await self.gate.enter()
        self.gate.fence.admit(episode)

    async def _end(self, session_id: str) -> None:
        session = self._sessions.pop(session_id, None)
        key = session.episode.key if session is not None and session.episode is not None else None
        if key is not None and self._by_key.get(key) == session_id:
            del self._by_key[key]
        await self.hooks.retire(session_id)

    # ---- participant --------------------------------------------------------------------------------------

    def closing(self, restarts: frozenset[str]) -> None:
        self._restarts = restarts

    def survey(self) -> Survey:
        blockers = self._busy.blockers(self._restarts)
        restarts: frozenset[str] = frozenset()
        if self.mode == "restart_only":
            restarts = frozenset(self._by_key)
        return Survey(blockers, {"sessions": len(self._sessions), "busy": len(self._busy)}, restarts)

    async def export(self, scope: Scope) -> dict[str, bytes]:
        if self.mode == "restart_only":
            return {}
        wanted = [
            session
            for session in self._sessions.values()
            if session.episode is not None
            and scope.covers(session.episode.key)
            and session.episode.key not in self._restarts
        ]
        states: Mapping[str, Any] = {}
        if self.mode == "exported":
            states = await self.hooks.export([session.id for session in wanted])
        return {session.id: _record(session, states.get(session.id)) for session in wanted}

    def read(self, records: Mapping[str, bytes], plan: RestorePlan) -> tuple[list[ToolSession], Any]:
        sessions, states = [], {}
        for name, data in records.items():
            record = from_bytes(name, data)
            with reading(name):
                episode = plan.restored(parse_key(record["episode"]).key)
                if episode is None:
                    continue
                session = ToolSession(record["session"], episode, effects=int(record["effects"]))
                session.replies = {k: (d, r) for k, (d, r) in record["replies"].items()}
                states[session.id] = record["state"]
                sessions.append(session)
        if self.mode != "exported":
            return sessions, None
        with reading("session states"):
            return sessions, self.hooks.check(states)

    def install(self, staged: tuple[list[ToolSession], Any]) -> list[str]:
        sessions, states = staged
        if states is not None:
            self.hooks.install(states)
        for session in sessions:
            assert session.episode is not None
            self._sessions[session.id] = session
            self._by_key[session.episode.key] = session.id
            self.gate.fence.mark(session.episode.rollout_id, session.episode.attempt - 1)
        return [session.episode.key for session in sessions if session.episode is not None]

    def uninstall(self) -> None:
        self._sessions.clear()
        self._by_key.clear()
        self.hooks.install({})

    async def retire(self, episodes: Sequence[Episode]) -> None:
        wanted = {episode.rollout_id: episode.attempt for episode in episodes}
        await self._busy.wait_done(wanted)
        for session in list(self._sessions.values()):
            if session.episode is None:
                continue
            if session.episode.attempt <= wanted.get(session.episode.rollout_id, -1):
                async with session.lock:
                    await self._end(session.id)


def _name(session_id: str, episode: Episode | None) -> str:
    """What work on a session is known by: its episode, if it has one."""
    return episode.key if episode is not None else session_id


def _record(session: ToolSession, state: Any) -> bytes:
    assert session.episode is not None
    return to_bytes(
        {
            "session": session.id,
            "episode": session.episode.key,
            "state": state,
            "effects": session.effects,
            "replies": {call: [digest, reply] for call, (digest, reply) in session.replies.items()},
        }
    )
