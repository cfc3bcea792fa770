"""A resources server's routes: who a call is for, what ends a session, and what a repeated request gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from gym_rig.verbs import prepare, resume, start
from gym_rig.virtual import now
from gym_servers.participants.gate import Gate
from gym_servers.protocol import headers
from gym_servers.resources.app import MAX_SESSION_ID, create_app, participant_of
from gym_servers.resources.counter import CounterServer
from gym_servers.resources.mcp import TOKEN_HEADER
from gym_servers.resources.multiple_choice import MultipleChoiceServer
from gym_servers.resources.server import ResourcesServer

ROW = {"initial_count": 10, "expected_count": 15}
EPISODE = {"rollout_id": "r", "attempt": 0}


class Journal:
    def __init__(self) -> None:
        self.entries: list[Mapping[str, Any]] = []

    async def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        self.entries += entries

    def kinds(self) -> list[str]:
        return [entry["kind"] for entry in self.entries]


class Client:
    """A server and a client of it. Cookies are carried by hand, as callers of this API do."""

    def __init__(self, server: ResourcesServer, *, enabled: bool = True, mcp: bool = False) -> None:
        self.server, self.journal = server, Journal()
        self.participant = participant_of(Gate(enabled=enabled, clock=now), server)
        if enabled:
            start(self.participant)
        app = create_app(self.participant, server, self.journal, "tools", "secret", mcp=mcp)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tools")
        self.jar: dict[str, str] = {}

    async def post(self, path: str, body: Any, *, key: str | None = "r", **extra: str) -> httpx.Response:
        cookie = "; ".join(f"{name}={value}" for name, value in self.jar.items())
        prefix = f"/ng-rollout/{key}" if key is not None else ""
        self.http.cookies.clear()
        response = await self.http.post(prefix + path, json=body, headers={**extra, "cookie": cookie})
        return response

    async def ok(self, path: str, body: Any, **options: Any) -> dict[str, Any]:
        response = await self.post(path, body, **options)
        assert response.is_success, response.text
        self.jar |= dict(response.cookies)
        reply: dict[str, Any] = response.json()
        return reply

    async def code(self, path: str, body: Any, **options: Any) -> str:
        return str((await self.post(path, body, **options)).json()["error"]["code"])

    @property
    def sessions(self) -> int:
        return self.participant.survey().counts["sessions"]


@asynccontextmanager
async def counter(**options: Any) -> AsyncIterator[Client]:
    yield Client(CounterServer({}), **options)


async def test_the_older_and_the_newer_seed_begin_the_same() -> None:
    for body in (ROW, {"resources_session_id": "s", "episode_id": EPISODE, "task_id": None, "task_data": ROW}):
        async with counter() as client:
            reply = await client.ok("/seed_session", body)
            assert set(reply) == {"resources_session_id", "resources_tools", "sandbox_access"}
            assert await client.ok("/get_counter_value", {}) == {"count": 10}


async def test_a_call_is_for_the_episode_of_its_path_or_else_of_its_body() -> None:
    async with counter() as client:
        body = {"resources_session_id": "s", "episode_id": EPISODE, "task_data": ROW}
        await client.ok("/seed_session", body, key=None)
        assert await client.ok("/get_counter_value", {}) == {"count": 10}
        assert await client.code("/seed_session", body, key="other") == "invalid_request"
        await client.ok("/close_session", {"resources_session_id": "s", "episode_id": EPISODE}, key=None)
        assert client.sessions == 0


@pytest.mark.parametrize(
    "change",
    [
        {"episode_id": {"rollout_id": "x-a1", "attempt": 0}},
        {"episode_id": {"rollout_id": "r", "attempt": "many"}},
        {"episode_id": {"attempt": None}},
        {"resources_session_id": 3},
        {"resources_session_id": "x" * (MAX_SESSION_ID + 1)},
    ],
)
async def test_a_name_that_is_none_is_refused(change: dict[str, Any]) -> None:
    async with counter() as client:
        for path in ("/seed_session", "/close_session"):
            response = await client.post(path, {"task_data": ROW, **change}, key=None)
            assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")


async def test_c20_a_repeated_seed_is_answered_and_writes_one_entry() -> None:
    async with counter() as client:
        body = {"resources_session_id": "s", "episode_id": EPISODE, "task_data": ROW}
        replies = await asyncio.gather(*(client.ok("/seed_session", body) for _ in range(3)))
        await client.ok("/increment_counter", {"count": 5})
        replies.append(await client.ok("/seed_session", body))
        assert {reply["resources_session_id"] for reply in replies} == {"s"}
        assert client.journal.kinds() == ["seed", "effect"]
        assert await client.ok("/get_counter_value", {}) == {"count": 15}


async def test_c20_a_row_that_differs_by_its_attempt_alone_is_the_same_seed() -> None:
    async with counter() as client:
        first = await client.ok("/seed_session", {**ROW, "_ng_rollout_id": "r", "_ng_attempt_index": 0})
        again = await client.ok("/seed_session", {**ROW, "_ng_rollout_id": "r", "_ng_attempt_index": 1})
        other = await client.ok("/seed_session", {**ROW, "initial_count": 11})
        assert first == again != other


async def test_c19_a_close_can_be_repeated_and_ends_late_seeds() -> None:
    async with counter() as client:
        body = {"resources_session_id": "s", "episode_id": EPISODE, "task_data": ROW}
        await client.ok("/seed_session", body)
        for _ in range(3):
            assert await client.ok("/close_session", {"resources_session_id": "s"}) == {"resources_session_id": "s"}
        assert await client.code("/seed_session", body) == "session_lost"
        assert await client.code("/get_counter_value", {}) == "session_lost"


async def test_a_close_without_a_name_ends_the_cookies_session() -> None:
    async with counter() as client:
        await client.ok("/seed_session", ROW)
        await client.ok("/close_session", {})
        assert client.sessions == 0


@pytest.mark.parametrize("path", ["/close_session", "/verify"])
async def test_a_close_is_never_refused_by_a_retire_mark_and_a_verify_is(path: str) -> None:
    async with counter() as client:
        await client.ok("/seed_session", {"resources_session_id": "s", **ROW})
        client.participant.gate.fence.mark("r", 0)
        if path == "/verify":
            assert await client.code(path, ROW) == "stale_attempt"
        else:
            await client.ok(path, {"resources_session_id": "s"})
            assert client.sessions == 0


async def test_a_successful_verify_ends_the_session_and_a_failed_one_does_not() -> None:
    async with counter() as client:
        await client.ok("/seed_session", ROW)
        assert (await client.post("/verify", {"expected_count": "x"})).status_code == 422
        assert client.sessions == 1
        await client.ok("/increment_counter", {"count": 5})
        reply = await client.ok("/verify", {**ROW, "response": {"id": "x"}})
        assert reply == {**ROW, "response": {"id": "x"}, "mask_sample": False, "reward": 1.0}
        assert client.sessions == 0


async def test_a_verify_that_announces_a_close_keeps_the_session_for_it() -> None:
    async with counter() as client:
        await client.ok("/seed_session", ROW)
        await client.ok("/verify", ROW, **{headers.CLOSE_FOLLOWS: "1"})
        assert client.sessions == 1
        assert await client.ok("/get_counter_value", {}) == {"count": 10}
        await client.ok("/close_session", {})
        assert client.sessions == 0


async def test_c20_a_repeated_verify_is_answered_and_not_scored_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = 0
    original = CounterServer.verify

    async def counted(self: CounterServer, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal scored
        scored += 1
        await asyncio.sleep(1)
        return await original(self, session_id, body)

    monkeypatch.setattr(CounterServer, "verify", counted)
    async with counter() as client:
        await client.ok("/seed_session", ROW)
        keep = {headers.CLOSE_FOLLOWS: "1"}
        both = await asyncio.gather(*(client.ok("/verify", ROW, **keep) for _ in range(2)))
        assert both[0] == both[1] == await client.ok("/verify", ROW, **keep)
        assert scored == 1
        assert (await client.ok("/verify", {**ROW, "expected_count": 10}, **keep))["reward"] == 1.0
        assert scored == 2


async def test_without_checkpoints_repeats_are_answered_too_and_calls_need_no_episode() -> None:
    async with counter(enabled=False) as client:
        body = {"resources_session_id": "s", "task_data": ROW}
        for _ in range(2):
            await client.ok("/seed_session", body, key=None)
        for _ in range(2):
            await client.ok("/increment_counter", {"count": 5}, key=None, **{headers.TOOL_CALL: "c"})
        named = {"resources_session_id": "n", "episode_id": EPISODE, "task_data": ROW}
        await client.ok("/seed_session", named, key=None)
        assert await client.ok("/get_counter_value", {}, key=None) == {"count": 10}
        await client.ok("/close_session", named, key=None)
        assert client.sessions == 1
        await client.ok("/seed_session", body, key=None)
        assert (await client.ok("/verify", ROW, key=None))["reward"] == 1.0


# ---- modes ------------------------------------------------------------------------------------------------


class Plain(ResourcesServer):
    """Says nothing of checkpoints."""

    name = "plain"


async def test_a_server_that_says_nothing_of_checkpoints_restarts_its_episodes() -> None:
    client = Client(Plain({}))
    response = await client.post("/seed_session", {})
    assert response.headers[headers.RESTART] == "plain"
    assert headers.VERIFY not in response.headers
    assert client.participant.survey().restarts == {"r"}


def text(answer: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": answer}]
    return {"output": [{"type": "reasoning"}, {"type": "message", "content": content}]}


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("The answer is B", "B"),
        ("A or B? I say (C).", "C"),
        (r"\boxed{B}. Not A.", "B"),
        ("BAD", None),
        ("", None),
    ],
)
async def test_a_multiple_choice_is_scored_by_its_last_letter(answer: str, letter: str | None) -> None:
    client = Client(MultipleChoiceServer({}))
    row = {"expected_answer": "B"}
    assert (await client.post("/seed_session", row)).headers[headers.VERIFY] == "replay"
    await client.ok("/seed_session", row)
    reply = await client.ok("/verify", {**row, "response": text(answer)})
    assert (reply["extracted_answer"], reply["reward"]) == (letter, float(letter == "B"))


async def test_a_verify_that_replays_passes_closed_admission_and_its_close_waits() -> None:
    client = Client(MultipleChoiceServer({}))
    await client.ok("/seed_session", {"expected_answer": "B"})
    prepare(client.participant)
    body = {"expected_answer": "B", "response": text("B")}
    assert (await client.ok("/verify", body, **{headers.CLOSE_FOLLOWS: "1"}))["reward"] == 1.0
    ends = asyncio.create_task(client.ok("/verify", body))
    await asyncio.sleep(100)
    assert (ends.done(), client.sessions) == (False, 1)
    resume(client.participant)
    assert (await ends)["reward"] == 1.0
    assert client.sessions == 0


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    ("server", "mcp", "row", "said"),
    [
        (CounterServer, False, ROW, set()),
        (CounterServer, True, ROW, {headers.RESTART}),
        (MultipleChoiceServer, False, {"expected_answer": "B"}, {headers.VERIFY}),
        (Plain, False, {}, {headers.RESTART}),
    ],
)
async def test_without_checkpoints_no_reply_carries_a_header_of_the_protocol(
    server: type[ResourcesServer], mcp: bool, row: dict[str, Any], said: set[str], enabled: bool
) -> None:
    client = Client(server({}), enabled=enabled, mcp=mcp)
    replies = [await client.post("/seed_session", row)]
    client.jar = dict(replies[0].cookies)
    if server is not Plain:
        replies.append(await client.post("/verify", row))
    replies.append(await client.post("/close_session", {}))
    assert all(reply.is_success for reply in replies)
    sent = {name for reply in replies for name in reply.headers if name.startswith("x-ng-")}
    assert sent == (said if enabled else set())


@pytest.mark.parametrize("row", [{}, {"expected_answer": "b"}, {"expected_answer": 3}, {"expected_answer": "AB"}])
async def test_a_row_without_an_expected_letter_is_refused(row: dict[str, Any]) -> None:
    assert await Client(MultipleChoiceServer({})).code("/seed_session", row) == "invalid_request"


async def test_the_counters_states_are_all_valid_or_none_is_built() -> None:
    server = CounterServer({})
    await server.restore_session_states({"kept": {"count": 1}})
    with pytest.raises(ValueError, match="count"):
        await server.restore_session_states({"a": {"count": 1}, "b": {"count": "x"}})
    assert json.dumps(await server.export_session_states(["kept"])) == '{"kept": {"count": 1}}'
    with pytest.raises(KeyError):
        await server.export_session_states(["a"])
    for _ in range(2):
        await server.retire_session_state("kept")


# ---- tool tokens ------------------------------------------------------------------------------------------


async def rpc(client: Client, token: str, method: str, **params: Any) -> Any:
    body = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
    response = await client.post("/mcp", body, key=None, **{TOKEN_HEADER: token})
    reply = response.json()
    return reply["result"] if response.is_success else reply["error"]["code"]


async def granted(client: Client, attempt: int = 0) -> str:
    key = "r" if attempt == 0 else f"r-a{attempt}"
    grant = (await client.ok("/seed_session", ROW, key=key))["mcp"]
    assert (grant["server_name"], grant["url_path"]) == ("tools", "/mcp")
    return str(grant["headers"][TOKEN_HEADER])


async def test_a_tool_token_calls_the_tools_of_its_session() -> None:
    async with counter(mcp=True) as client:
        token = await granted(client)
        hello = await rpc(client, token, "initialize", protocolVersion="2025-03-26")
        assert (hello["protocolVersion"], hello["capabilities"]) == ("2025-03-26", {"tools": {}})
        names = [tool["name"] for tool in (await rpc(client, token, "tools/list"))["tools"]]
        assert names == ["increment_counter", "get_counter_value"]
        await rpc(client, token, "tools/call", name="increment_counter", arguments={"count": 5})
        reply = await rpc(client, token, "tools/call", name="get_counter_value")
        assert reply == {"content": [{"type": "text", "text": '{"count": 15}'}], "isError": False}
        for wrong in ({"name": "no_such_tool"}, {"name": "increment_counter", "arguments": {"count": "x"}}):
            assert (await rpc(client, token, "tools/call", **wrong))["isError"]
        notification = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert (await client.post("/mcp", notification, key=None, **{TOKEN_HEADER: token})).status_code == 202
        for body in ([], {"id": 1}, {"id": 1, "method": 3}):
            assert (await client.post("/mcp", body, key=None, **{TOKEN_HEADER: token})).status_code == 400


async def test_a_tool_token_of_a_replaced_or_retired_attempt_stops_working() -> None:
    async with counter(mcp=True) as client:
        call = {"name": "increment_counter", "arguments": {"count": 1}}
        old = await granted(client)
        new = await granted(client, 1)
        assert await rpc(client, old, "tools/call", **call) == "stale_attempt"
        assert not (await rpc(client, new, "tools/call", **call))["isError"]
        client.participant.gate.fence.mark("r", 1)
        assert await rpc(client, new, "tools/call", **call) == "stale_attempt"
        assert client.journal.kinds() == ["seed", "seed", "effect"]


async def test_a_tool_token_of_a_closed_session_is_a_lost_session() -> None:
    async with counter(mcp=True) as client:
        token = await granted(client)
        await client.ok("/close_session", {})
        assert await rpc(client, token, "tools/call", name="get_counter_value") == "session_lost"


@pytest.mark.parametrize("token", ["", "x", "WyJzIiwiciJd.forged"])
async def test_a_token_that_was_not_granted_is_unauthorized(token: str) -> None:
    async with counter(mcp=True) as client:
        await granted(client)
        (cookie,) = client.jar.values()
        for one in (token, cookie):
            assert await rpc(client, one, "tools/list") == "unauthorized"


async def test_whoever_is_granted_a_token_restarts_and_nobody_is_where_it_is_not_asked_for() -> None:
    async with counter(mcp=True) as client:
        assert (await client.post("/seed_session", ROW)).headers[headers.RESTART] == "counter"
    async with counter() as client:
        response = await client.post("/seed_session", ROW)
        assert headers.RESTART not in response.headers
        assert "mcp" not in response.json()
        assert (await client.post("/mcp", {})).status_code == 404
