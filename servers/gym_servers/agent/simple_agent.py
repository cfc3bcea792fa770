"""`simple-agent`: model call, tool calls one after another, until the model calls no tool.

Each turn begins at a boundary, and what a turn did is appended when its tool round is complete, so an interrupted
turn is repeated from its model call and no tool result is half recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gym_servers.agent.server import AgentServer, AgentSetup
from gym_servers.agent.tools import ask_model, call_tool, function_calls, items_of
from gym_servers.participants.agent_state import Activation, Session

MAX_STEPS = 64


class SimpleAgent(AgentServer):
    """The loop. `config.model`: name of the policy server; `config.max_steps`: model calls per activation, at
    most."""

    checkpoint_sessions_supported: ClassVar[bool] = True

    def __init__(self, setup: AgentSetup) -> None:
        super().__init__(setup)
        self._participant, self._peers = setup.participant, setup.peers
        self._model = setup.peers.only("model", setup.config.get("model"))
        self._max_steps = int(setup.config.get("max_steps", MAX_STEPS))

    async def turn(self, session: Session, activation: Activation, params: Mapping[str, Any]) -> dict[str, Any]:
        given = items_of(params.get("input"))
        while True:
            await self._participant.boundary(activation)
            response = await self._participant.model_call(
                activation, lambda: ask_model(self._peers, self._model, session, activation, params, given)
            )
            calls = function_calls(response)
            activation.model_calls += 1
            activation.usage = _added(activation.usage, response.get("usage") or {})
            done = not calls or response.get("status") == "incomplete"
            if done or activation.model_calls >= self._max_steps:
                return {**response, "output": [*activation.items, *response["output"]], "usage": activation.usage}
            results = [await call_tool(self._peers, session, call) for call in calls]
            activation.items += [*response["output"], *results]


def _added(total: Mapping[str, int], usage: Mapping[str, Any]) -> dict[str, int]:
    names = ("input_tokens", "output_tokens", "total_tokens")
    return {name: int(total.get(name, 0)) + int(usage.get(name, 0)) for name in names}
