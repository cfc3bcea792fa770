"""The simple agent's loop against scripted peers: which tool server is asked, and what a boundary costs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from gym_rig.verbs import checkpoint, start
from gym_rig.virtual import now, settle
from gym_servers.agent.server import AgentSetup
from gym_servers.agent.simple_agent import SimpleAgent
from gym_servers.agent.tools import candidates
from gym_servers.http.peers import PeerFailed, Reply
from gym_servers.participants import records
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.agent_state import Activation, Session
from gym_servers.participants.gate import Gate
from gym_servers.protocol import headers
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

R0 = Episode("r", 0)
PARAMS = {"input": "THE-REQUEST", "tools": [{"name": "add", "description": "THE-REQUEST"}]}


class ScriptedPeers:
    """A model that calls `add` once a turn for `turns` turns and then stands still, and tool servers by name."""

    def __init__(self, turns: int, tools: Mapping[str, Any] | None = None) -> None:
        self.turns, self.tools = turns, dict(tools or {"counter": {"ok": True}})
        self.asked: list[str] = []
        self.inputs: list[int] = []

    def only(self, kind: str, name: str | None = None) -> str:
        return name or "policy"

    async def post(self, name: str, path: str, body: Any, **options: Any) -> Reply:
        if name != "policy":
            self.asked.append(name)
            answer = self.tools[name]
            if isinstance(answer, Exception):
                raise answer
            return Reply(answer, {}, {})
        turn = len(self.inputs)
        self.inputs.append(len(body["input"]))
        if turn == self.turns:
            await asyncio.Event().wait()
        call = {"type": "function_call", "call_id": f"call-{turn:04}", "name": "add", "arguments": "{}"}
        return Reply({"output": [call], "status": "completed"}, {}, {})


def running(peers: ScriptedPeers) -> tuple[AgentParticipant, SimpleAgent]:
    participant = AgentParticipant(Gate(clock=now))
    start(participant)
    setup = AgentSetup("agent", {"max_steps": 1000}, participant, peers, "secret")  # type: ignore[arg-type]
    return participant, SimpleAgent(setup)


def access(peer: str, *tools: str) -> dict[str, Any]:
    return {"peer": peer, "jar": {}, "headers": {}, "tools": list(tools) or None}


async def turned(peers: ScriptedPeers, *accesses: dict[str, Any]) -> tuple[AgentParticipant, asyncio.Task[Any]]:
    """An activation that has made all its turns and stands at the model."""
    participant, agent = running(peers)
    session = await participant.seed("s", R0, list(accesses or [access("counter")]))

    async def drive(activation: Activation) -> dict[str, Any]:
        return await agent.turn(session, activation, PARAMS)

    task = asyncio.create_task(participant.activate(session, 1, digest_of(PARAMS), drive))
    await settle()
    return participant, task


# ---- which tool server --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accesses", "asked"),
    [
        ([access("a")], ["a"]),
        ([access("a"), access("b", "add")], ["b"]),  # the one that names it
        ([access("a", "get"), access("b")], ["b"]),  # never one that names others
        ([access("a", "add"), access("b", "add")], ["a"]),
        ([access("a"), access("b")], ["a", "b"]),  # in their order
        ([access("a", "get")], []),
    ],
)
def test_a_tool_goes_to_the_access_that_names_it_else_they_are_asked_in_order(
    accesses: list[dict[str, Any]], asked: list[str]
) -> None:
    assert [one["peer"] for one in candidates(accesses, "add")] == asked


async def test_a_server_that_does_not_know_the_tool_is_passed_over() -> None:
    peers = ScriptedPeers(1, {"a": PeerFailed("a/add answered 404", 404), "b": {"ok": True}, "c": {"ok": True}})
    _, task = await turned(peers, access("a"), access("b"), access("c"))
    assert peers.asked == ["a", "b"]
    task.cancel()


async def test_a_server_that_failed_is_not_followed_by_another() -> None:
    """It may have done half of it; another one would do it twice."""
    peers = ScriptedPeers(1, {"a": PeerFailed("a/add answered 500", 500), "b": {"ok": True}})
    participant, task = await turned(peers, access("a"), access("b"))
    assert peers.asked == ["a"]
    session = participant.session_of(R0)
    assert session is not None
    assert session.activation is not None
    assert json.loads(session.activation.items[-1]["output"]) == {"error": "a/add answered 500"}
    task.cancel()


async def test_a_tool_that_nobody_gave_is_told_to_the_model() -> None:
    peers = ScriptedPeers(1)
    participant, task = await turned(peers, access("counter", "get"))
    session = participant.session_of(R0)
    assert session is not None
    assert session.activation is not None
    assert "no tool add" in session.activation.items[-1]["output"]
    task.cancel()


async def test_c22_a_lost_tool_session_ends_the_activation_and_is_no_output() -> None:
    peers = ScriptedPeers(1, {"counter": ProtocolError("session_lost", "a fresh sandbox")})
    _, task = await turned(peers)
    with pytest.raises(ProtocolError, match="session_lost"):
        await task


# ---- what a boundary costs ----------------------------------------------------------------------------------


async def boundary_of(turns: int) -> bytes:
    participant, task = await turned(ScriptedPeers(turns))
    records = await checkpoint(participant)
    task.cancel()
    return records["s"]


async def test_the_bytes_of_a_boundary_grow_with_its_turns_alone_and_leave_the_request_out() -> None:
    sizes = {turns: len(await boundary_of(turns)) for turns in (50, 100, 200)}
    each = (sizes[100] - sizes[50]) / 50
    assert sizes[200] - sizes[100] == pytest.approx(100 * each, rel=0.01)
    assert sizes[200] < 200 * 220 + 1000, sizes
    assert b"THE-REQUEST" not in await boundary_of(50)


async def test_nothing_is_serialised_before_an_export_and_then_each_session_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[Any] = []
    to_bytes = records.to_bytes
    monkeypatch.setattr(records, "to_bytes", lambda record: built.append(record) or to_bytes(record))
    participant, task = await turned(ScriptedPeers(50))
    assert built == []
    await checkpoint(participant)
    assert len(built) == 1
    task.cancel()


async def test_a_kept_reply_exists_once_and_is_the_one_that_was_given() -> None:
    participant, _ = running(ScriptedPeers(0))
    session = await participant.seed("s", R0, [])
    response = {"output": []}

    async def drive(_: Activation) -> dict[str, Any]:
        return response

    assert await participant.activate(session, 1, "d", drive) is response
    assert await participant.activate(session, 1, "d", drive) is response
    assert session.reply is not None
    assert session.reply.response is response


async def test_without_an_index_no_reply_is_kept() -> None:
    participant, _ = running(ScriptedPeers(0))
    session = await participant.seed("s", R0, [])

    async def drive(_: Activation) -> dict[str, Any]:
        return {"output": []}

    await participant.activate(session, None, "d", drive)
    assert session.reply is None


async def test_calls_of_a_direct_call_have_no_position() -> None:
    """Nothing tells them from others of their episode: a position would make two of them one."""
    sent: list[Mapping[str, str]] = []

    class Noting(ScriptedPeers):
        async def post(self, name: str, path: str, body: Any, **options: Any) -> Reply:
            sent.append(options["headers"])
            return Reply({"output": [], "status": "completed"}, {}, {})

    participant, agent = running(Noting(0))
    for ordinal in (0, 1):
        await agent.turn(Session("", R0, []), Activation(None, "", now(), ordinal), PARAMS)
    assert [headers.MODEL_CALL in one for one in sent] == [False, True]
    assert participant.survey().ready
