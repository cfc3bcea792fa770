"""Calls of an agent's loop to its peers: the policy model, and the tools that its session was given.

Where a session has several accesses, a tool goes to the first access that names it in `tools`. Accesses without such
a list are asked in their order, until one knows the tool: 404 says that nothing was done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gym_servers.http.peers import PeerFailed, Peers
from gym_servers.participants.agent_state import Activation, Items, Session
from gym_servers.protocol import headers
from gym_servers.protocol.errors import ProtocolError

NO_SUCH_TOOL = 404


async def ask_model(
    peers: Peers, model: str, session: Session, activation: Activation, params: Mapping[str, Any], given: Items
) -> dict[str, Any]:
    """The model's reply to the conversation so far. Raises `admission_closed` where the model takes no calls."""
    position = f"{activation.ordinal}.{activation.model_calls + 1}"
    reply = await peers.post(
        model,
        "/v1/responses",
        {**params, "input": [*given, *activation.items]},
        episode=session.named,
        headers={headers.MODEL_CALL: position} if activation.ordinal else {},
        wait_admission=False,
    )
    body: dict[str, Any] = reply.body
    return body


async def call_tool(peers: Peers, session: Session, call: Mapping[str, Any]) -> dict[str, Any]:
    """A function call's output item. What went wrong is told to the model, which may do better; a lost session is
    not its fault and is raised."""
    try:
        arguments = json.loads(call.get("arguments") or "{}")
        output = json.dumps(await _reply(peers, session, call, arguments))
    except (PeerFailed, ValueError) as error:
        output = json.dumps({"error": str(error)})
    return {"type": "function_call_output", "call_id": call["call_id"], "output": output}


async def _reply(peers: Peers, session: Session, call: Mapping[str, Any], arguments: Any) -> Any:
    tool = str(call["name"])
    failure: Exception = ValueError(f"no tool {tool} was given to this session")
    for access in candidates(session.accesses, tool):
        try:
            reply = await peers.post(
                access["peer"],
                f"/{tool}",
                arguments,
                episode=session.named,
                jar=access["jar"],
                headers={**(access.get("headers") or {}), headers.TOOL_CALL: str(call["call_id"])},
            )
        except PeerFailed as error:
            failure = error
            if error.status != NO_SUCH_TOOL:
                break
        else:
            access["jar"] = {**access["jar"], **reply.jar}
            return reply.body
    raise failure


def candidates(accesses: list[dict[str, Any]], tool: str) -> list[dict[str, Any]]:
    """Whom to ask for a tool, in order."""
    naming = [access for access in accesses if tool in (access.get("tools") or ())]
    return naming[:1] or [access for access in accesses if access.get("tools") is None]


def items_of(given: Any) -> Items:
    """A request's `input` as items. Raises `invalid_request`."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    if given is not None and not (isinstance(given, list) and all(isinstance(item, dict) for item in given)):
        raise ProtocolError("invalid_request", "`input` is a text or a list of items, each of them an object")
    return [dict(item) for item in given or []]


def function_calls(response: Mapping[str, Any]) -> Items:
    return [item for item in response["output"] if item.get("type") == "function_call"]
