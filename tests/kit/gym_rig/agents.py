"""Agent participants alone, and a turn loop whose steps a test ends."""

from __future__ import annotations

import asyncio
from typing import Any

from gym_rig.alone import R0
from gym_rig.verbs import start
from gym_rig.virtual import now
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.agent_state import Activation, Session
from gym_servers.participants.gate import Gate
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

ACCESS = [{"peer": "counter", "jar": {"c": {"id": "1"}}, "headers": {}}]


class Loop:
    """A turn loop of `turns` model calls with a tool round after each; a test ends each step."""

    def __init__(self, participant: AgentParticipant, turns: int = 2) -> None:
        self.participant, self.turns = participant, turns
        self.model, self.tool = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self.log: list[str] = []
        self.refusals: list[ProtocolError] = []
        self.error: Exception | None = None

    async def __call__(self, activation: Activation) -> dict[str, Any]:
        while True:
            await self.participant.boundary(activation)
            await self.participant.model_call(activation, self._model)
            activation.model_calls += 1
            if activation.model_calls > self.turns:
                return {"items": list(activation.items)}
            self.log.append("tool")
            await self.tool.acquire()
            activation.items = [*activation.items, {"turn": activation.model_calls}]

    async def _model(self) -> str:
        self.log.append("model")
        if self.refusals:
            raise self.refusals.pop()
        await self.model.acquire()
        if self.error is not None:
            raise self.error
        return "reply"

    def free(self) -> None:
        """Let it run to its end."""
        for _ in range(self.turns + 1):
            self.model.release()
            self.tool.release()


def agent(*, started: bool = True) -> AgentParticipant:
    """In service, unless it is to be restored first."""
    participant = AgentParticipant(Gate(clock=now))
    if started:
        start(participant)
    return participant


async def seeded(participant: AgentParticipant, episode: Episode = R0, session: str = "s") -> Session:
    return await participant.seed(session, episode, list(ACCESS))


def activate(
    participant: AgentParticipant, session: Session, loop: Any, index: int | None = 1, digest: str = "d"
) -> asyncio.Task[dict[str, Any]]:
    """`loop` is what runs for it; `digest` stands for its request."""
    return asyncio.create_task(participant.activate(session, index, digest, loop))
