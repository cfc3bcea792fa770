"""Inside of an agent's session: activations that run once, and the boundaries of a turn loop.

A session is idle, running an activation, or standing at a boundary: before each model call and after each tool
round. An activation that waits for a model reply counts as standing at its last boundary; a reply that arrives
while a checkpoint is open is held until resume. The state at a boundary is what was appended before it, so an
export in the middle of a model call leaves nothing half done.
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from gym_servers.participants.agent_state import Activation, Reply, Session
from gym_servers.participants.base import Participant
from gym_servers.participants.calls import outcome
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

T = TypeVar("T")

ADMISSION_RETRY_SECONDS = 0.2  # between tries of a model call that another participant's checkpoint refuses


class AgentTurns(Participant):
    """The part of the agent participant that a turn loop works with."""

    @abc.abstractmethod
    async def _enter(self, episode: Episode) -> None:
        """Wait while a checkpoint is open; raises for an attempt that was replaced, also meanwhile."""

    @abc.abstractmethod
    def _present(self, session: Session) -> bool:
        """Whether a session has not been ended."""

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
        if not self._present(session):
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
        try:
            response = await body(activation)
        except Exception:
            if self.gate.checkpoint_open:
                # It cannot be continued any more; who waits for it learns of that when the checkpoint is over.
                activation.failed = activation.standing = True
                self.gate.touch()
                await self.gate.wait_checkpoint_closed()
            raise
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
        ended = ProtocolError("session_lost", f"agent session {session.id} was ended")
        result: dict[str, Any] = await outcome(activation.task, ended)
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
