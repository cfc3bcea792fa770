"""The agent participant: sessions, their activations, and the boundaries inside a turn loop.

A session is idle, running an activation, or standing at a boundary: before each model call and after each tool
round. An activation that waits for a model reply counts as standing at its last boundary; a reply that arrives
while a checkpoint is open is held until resume. The state at a boundary is what was appended before it, so an
export in the middle of a model call leaves nothing half done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gym_servers.participants.base import Participant, RestorePlan, Scope, Survey
from gym_servers.participants.busy import Busy
from gym_servers.participants.gate import Gate
from gym_servers.participants.records import from_bytes, reading, to_bytes
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, parse_key
from gym_servers.protocol.messages import Blocker

T = TypeVar("T")
Items = list[dict[str, Any]]

ADMISSION_RETRY_SECONDS = 0.2  # between tries of a model call that another participant's checkpoint refuses


@dataclass(eq=False)
class Activation:
    """A session's `ordinal`-th request to its turn loop. `items` is the output so far as of the last boundary."""

    index: int | None
    digest: str
    since: float
    ordinal: int = 1
    items: Items = field(default_factory=list)
    model_calls: int = 0
    usage: dict[str, int] = field(default_factory=dict)
    task: asyncio.Task[Any] | None = None
    standing: bool = True
    where: str = "boundary"


@dataclass(frozen=True)
class Reply:
    """The last completed activation: bound to its request, given again when its index is repeated."""

    index: int
    digest: str
    response: dict[str, Any]


@dataclass(eq=False)
class Session:
    """One agent session. `accesses` name tools by peer and unsigned session contents, never by address."""

    id: str
    episode: Episode
    accesses: list[dict[str, Any]]
    reply: Reply | None = None
    activation: Activation | None = None
    restored: Activation | None = None
    activations: int = 0
    closing: bool = False

    @property
    def next_index(self) -> int:
        return 1 if self.reply is None else self.reply.index + 1


class AgentParticipant(Participant):
    """Sessions of one agent server, found by id and by episode."""

    kind = "agent"

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        self._sessions: dict[str, Session] = {}
        self._by_key: dict[str, Session] = {}
        self._busy = Busy(gate)
        self._restarts: frozenset[str] = frozenset()

    # ---- sessions -----------------------------------------------------------------------------------------

    async def seed(self, session_id: str, episode: Episode, accesses: list[dict[str, Any]]) -> Session:
        """Start a session; one that its episode already has is replaced. Waits while a checkpoint is open."""
        await self._enter(episode)
        # Looked at again after each wait: of seeds that come together one session is left.
        while (old := self._by_key.get(episode.key)) is not None:
            with self._busy.working(episode.key, "seed"):
                await self._free(old)
            self._check(episode)
        session = Session(session_id, episode, accesses)
        self._sessions[session_id] = session
        self._by_key[episode.key] = session
        return session

    def session(self, session_id: str | None, episode: Episode | None) -> Session:
        """The session a call belongs to. Raises `session_lost` or, for another attempt, `stale_attempt`."""
        session = self._sessions.get(session_id or "")
        if session is None:
            if self.gate.enabled and not self.gate.checkpoint_open:
                self.gate.require_open()  # a fresh process has lost nothing yet: its sessions are to be restored
            raise ProtocolError("session_lost", f"no agent session {session_id!r} here; seed one first")
        if self.gate.enabled and (episode is None or episode != session.episode):
            named = episode.key if episode else "no episode"
            raise ProtocolError("stale_attempt", f"session {session_id} is of {session.episode.key}, not {named}")
        return session

    async def close(self, session_id: str, episode: Episode | None) -> None:
        """End a session; its activation is stopped first. Waits for resume; repeatable."""
        while self.gate.checkpoint_open:
            await self.gate.wait_checkpoint_closed()
        session = self._sessions.get(session_id)
        if session is None:
            return
        self.session(session_id, episode)
        with self._busy.working(session.episode.key, "close"):
            await self._free(session)

    def _check(self, episode: Episode) -> None:
        """A retire may have come while we waited: a seed must not bring back what it ended."""
        if self.gate.enabled:
            self.gate.fence.check(episode)

    async def _enter(self, episode: Episode) -> None:
        if self.gate.enabled:
            self.gate.fence.check(episode)
            await self.gate.enter()
            self.gate.fence.admit(episode)  # looked at again: a retire may have come while we waited

    async def _free(self, session: Session) -> None:
        session.closing = True
        self._sessions.pop(session.id, None)
        if self._by_key.get(session.episode.key) is session:
            del self._by_key[session.episode.key]
        task = session.activation.task if session.activation else None
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])

    # ---- activations --------------------------------------------------------------------------------------

    async def activate(
        self,
        session: Session,
        index: int | None,
        digest: str,
        body: Callable[[Activation], Awaitable[dict[str, Any]]],
    ) -> dict[str, Any]:
        """Run a request through `body`, continue a restored one, join a running one, or repeat a reply."""
        if (reply := self._known(session, index, digest)) is not None:
            return reply
        if session.activation is not None:
            return await self._join(session, session.activation, digest)
        await self._enter(session.episode)
        # Both may have changed while we waited for the checkpoint to end.
        if session.closing or self._sessions.get(session.id) is not session:
            raise ProtocolError("session_lost", f"agent session {session.id} was closed")
        if session.activation is not None:
            return await self._join(session, session.activation, digest)
        if (reply := self._known(session, index, digest)) is not None:
            return reply
        activation = session.restored
        if activation is None:
            session.activations += 1
            ordinal = session.activations if index is None else index
            activation = Activation(index, digest, self.gate.clock(), ordinal)
        if activation.digest != digest or activation.index != index:
            raise ProtocolError("checkpoint_conflict", "the restored activation is of another request")
        session.restored = None
        session.activation = activation
        activation.task = asyncio.ensure_future(self._drive(session, activation, body))
        # Not by the task itself: one that is cancelled before its first step runs none of its code.
        activation.task.add_done_callback(lambda _: self._ended(session, activation))
        return await self._join(session, activation, digest)

    def _known(self, session: Session, index: int | None, digest: str) -> dict[str, Any] | None:
        """The stored reply to a repeated index, None where work is to be done."""
        if index is None:
            return None
        if session.reply is not None and index == session.reply.index:
            if digest != session.reply.digest:
                raise ProtocolError("checkpoint_conflict", f"activation {index} was another request")
            return session.reply.response
        if index != session.next_index:
            raise ProtocolError("activation_out_of_order", f"activation {index} given, {session.next_index} expected")
        return None

    async def _drive(
        self,
        session: Session,
        activation: Activation,
        body: Callable[[Activation], Awaitable[dict[str, Any]]],
    ) -> dict[str, Any]:
        response = await body(activation)
        if activation.index is not None:
            session.reply = Reply(activation.index, activation.digest, response)
        return response

    def _ended(self, session: Session, activation: Activation) -> None:
        if session.activation is activation:
            session.activation = None
        self.gate.touch()

    async def _join(self, session: Session, activation: Activation, digest: str) -> dict[str, Any]:
        if activation.digest != digest:
            raise ProtocolError("checkpoint_conflict", f"session {session.id} runs another request")
        assert activation.task is not None
        try:
            result: dict[str, Any] = await asyncio.shield(activation.task)
        except asyncio.CancelledError:
            if activation.task.cancelled():
                raise ProtocolError("session_lost", f"agent session {session.id} was ended") from None
            raise
        return result

    # ---- inside the turn loop -----------------------------------------------------------------------------

    async def boundary(self, activation: Activation) -> None:
        """Stand here while a checkpoint is open. Call it with `items` complete."""
        activation.standing, activation.where = True, "boundary"
        self.gate.touch()
        await self.gate.wait_checkpoint_closed()

    async def model_call(self, activation: Activation, call: Callable[[], Awaitable[T]]) -> T:
        """Wait for a model reply, standing at the last boundary; one that comes in while a checkpoint is open
        is held. Closed admission elsewhere never fails the activation."""
        activation.standing, activation.where = True, "model"
        self.gate.touch()
        while True:
            try:
                result = await call()
                break
            except ProtocolError as refusal:
                if refusal.code != "admission_closed":
                    raise
            if self.gate.checkpoint_open:
                await self.gate.wait_checkpoint_closed()
            else:
                await asyncio.sleep(ADMISSION_RETRY_SECONDS)
        await self.gate.wait_checkpoint_closed()
        activation.standing, activation.where = False, "tools"
        return result

    # ---- participant --------------------------------------------------------------------------------------

    def closing(self, restarts: frozenset[str]) -> None:
        self._restarts = restarts

    def survey(self) -> Survey:
        now = self.gate.clock()
        blockers = self._busy.blockers(self._restarts)
        for session in self._sessions.values():
            active = session.activation
            if active is not None and not active.standing and session.episode.key not in self._restarts:
                blockers.append(
                    Blocker(
                        id=session.episode.key,
                        where=active.where,
                        age_seconds=round(now - active.since, 3),
                    )
                )
        return Survey(blockers, {"sessions": len(self._sessions), "busy": len(self._busy)})

    async def export(self, scope: Scope) -> dict[str, bytes]:
        return {
            session.id: _record(session)
            for session in self._sessions.values()
            if scope.covers(session.episode.key) and session.episode.key not in self._restarts
        }

    def read(self, records: Mapping[str, bytes], plan: RestorePlan) -> list[Session]:
        return [s for name, data in records.items() if (s := _session(name, data, plan)) is not None]

    def install(self, staged: list[Session]) -> list[str]:
        now = self.gate.clock()
        for session in staged:
            if session.restored is not None:
                session.restored.since = now
            self._sessions[session.id] = session
            self._by_key[session.episode.key] = session
            self.gate.fence.mark(session.episode.rollout_id, session.episode.attempt - 1)
        return [session.episode.key for session in staged]

    def uninstall(self) -> None:
        self._sessions.clear()
        self._by_key.clear()

    async def retire(self, episodes: Sequence[Episode]) -> None:
        wanted = {episode.rollout_id: episode.attempt for episode in episodes}
        ending = [
            session
            for session in self._sessions.values()
            if session.episode.attempt <= wanted.get(session.episode.rollout_id, -1)
        ]
        await asyncio.gather(*(self._free(session) for session in ending))
        await self._busy.wait_done(wanted)


def _record(session: Session) -> bytes:
    active = session.activation or session.restored
    return to_bytes(
        {
            "session": session.id,
            "episode": session.episode.key,
            "accesses": session.accesses,
            "activations": session.activations,
            "reply": session.reply
            and {
                "index": session.reply.index,
                "digest": session.reply.digest,
                "response": session.reply.response,
            },
            "activation": active
            and {
                "index": active.index,
                "ordinal": active.ordinal,
                "digest": active.digest,
                "items": active.items,
                "model_calls": active.model_calls,
                "usage": active.usage,
            },
        }
    )


def _session(name: str, data: bytes, plan: RestorePlan) -> Session | None:
    record = from_bytes(name, data)
    with reading(name):
        episode = plan.restored(parse_key(record["episode"]).key)
        if episode is None:
            return None
        session = Session(record["session"], episode, list(record["accesses"]))
        session.activations = int(record["activations"])
        if (reply := record["reply"]) is not None:
            session.reply = Reply(int(reply["index"]), reply["digest"], dict(reply["response"]))
        if (active := record["activation"]) is not None:
            session.restored = Activation(
                active["index"],
                active["digest"],
                0.0,
                int(active["ordinal"]),
                items=list(active["items"]),
                model_calls=int(active["model_calls"]),
                usage=dict(active["usage"]),
            )
        return session
