"""`simple-agent`: model call, tool calls one after another, until the model calls no tool.

Each turn begins at a boundary, and what a turn did is appended when its tool round is complete, so an interrupted
turn is repeated from its model call and no tool result is half recorded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gym_servers.http.peers import PeerFailed, Peers
from gym_servers.participants.agent import Activation, AgentParticipant, Session
from gym_servers.protocol import headers

Items = list[dict[str, Any]]


class SimpleAgent:
    """The loop. `model`: name of the policy server; `max_steps`: model calls per activation, at most."""

    def __init__(self, participant: AgentParticipant, peers: Peers, *, model: str, max_steps: int) -> None:
        self._participant, self._peers = participant, peers
        self._model, self._max_steps = model, max_steps

    async def run(self, session: Session, activation: Activation, params: Mapping[str, Any]) -> dict[str, Any]:
        """One activation from where it stands to its response."""
        given = _items(params.get("input"))
        while True:
            await self._participant.boundary(activation)
            response = await self._participant.model_call(
                activation, lambda: self._ask(session, activation, params, given)
            )
            output: Items = list(response["output"])
            calls = [item for item in output if item.get("type") == "function_call"]
            activation.model_calls += 1
            activation.usage = _added(activation.usage, response.get("usage") or {})
            done = not calls or response.get("status") == "incomplete"
            if done or activation.model_calls >= self._max_steps:
                return {**response, "output": [*activation.items, *output], "usage": activation.usage}
            results = [await self._call_tool(session, call) for call in calls]
            activation.items = [*activation.items, *output, *results]

    async def _ask(
        self, session: Session, activation: Activation, params: Mapping[str, Any], given: Items
    ) -> dict[str, Any]:
        reply = await self._peers.post(
            self._model,
            "/v1/responses",
            {**params, "input": [*given, *activation.items]},
            episode=session.episode,
            headers={headers.MODEL_CALL: f"{activation.ordinal}.{activation.model_calls + 1}"},
            wait_admission=False,
        )
        body: dict[str, Any] = reply.body
        return body

    async def _call_tool(self, session: Session, call: Mapping[str, Any]) -> dict[str, Any]:
        access = session.accesses[0]
        try:
            arguments = json.loads(call.get("arguments") or "{}")
            reply = await self._peers.post(
                access["peer"],
                f"/{call['name']}",
                arguments,
                episode=session.episode,
                jar=access["jar"],
                headers={**access["headers"], headers.TOOL_CALL: str(call["call_id"])},
            )
            access["jar"] = {**access["jar"], **reply.jar}
            output = json.dumps(reply.body)
        except (PeerFailed, ValueError) as error:
            # The model sees what went wrong and may do better; a lost session is not its fault and is raised.
            output = json.dumps({"error": str(error)})
        return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


def _items(given: Any) -> Items:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return [dict(item) for item in given or []]


def _added(total: Mapping[str, int], usage: Mapping[str, Any]) -> dict[str, int]:
    names = ("input_tokens", "output_tokens", "total_tokens")
    return {name: int(total.get(name, 0)) + int(usage.get(name, 0)) for name in names}
