"""The policy model server as clients see it: two APIs, whole or streamed, and what was captured of their calls."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import TOKEN, Rig, cell
from gym_rig.ledgers import HeldReads, spilled
from gym_rig.verbs import commit, prepare, resume
from gym_rig.virtual import settle
from gym_rig.wire import code, foreign, ok, post, serving
from gym_servers.capture.inventory import InventoryCall, inventory_of
from gym_servers.capture.ledger import CallRecord, decode
from gym_servers.engine.rows import TOOLS, counter_rows
from gym_servers.model import app as model_app
from gym_servers.participants.model_call import Failure
from gym_servers.protocol import headers
from gym_servers.protocol.errors import ProtocolError

WORDS = "add 5 then get the count"
CHAT = {
    "messages": [{"role": "user", "content": WORDS}],
    "tools": [
        {"type": "function", "function": {name: tool[name] for name in ("name", "description", "parameters")}}
        for tool in TOOLS
    ],
}
RESPONSES = {"input": [{"role": "user", "content": WORDS}], "tools": TOOLS}
MANIFEST = "/training-token-capture/control/rollouts"
BEARER = {"authorization": f"Bearer {TOKEN}"}


def events(text: str) -> list[tuple[str | None, Any]]:
    """A stream's events: name and data."""
    found = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        data = fields["data"]
        found.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


async def chat(rig: Rig, position: str, **changes: Any) -> Any:
    path = "/ng-rollout/x/v1/chat/completions"
    return (await ok(rig, "policy", path, {**CHAT, **changes}, **{headers.MODEL_CALL: position}))[0]


async def test_a_chat_completion_calls_tools_and_goes_on_from_their_results(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        messages: list[Any] = [*CHAT["messages"]]
        names = []
        for turn in range(1, 4):
            reply = await chat(rig, f"1.{turn}", messages=messages)
            (choice,) = reply["choices"]
            messages.append(choice["message"])
            for call in choice["message"].get("tool_calls", ()):
                names.append((call["function"]["name"], json.loads(call["function"]["arguments"])))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": '{"count": 5}'})
        assert names == [("increment_counter", {"count": 5}), ("get_counter_value", {})]
        assert (choice["finish_reason"], reply["object"]) == ("stop", "chat.completion")
        assert "All 2 steps are done" in choice["message"]["content"]
        ledger = await rig.participant("policy").ledger("x")
        chains = [call.chain for call in ledger.calls]
        assert [call.parent for call in ledger.calls] == ["", *chains[:2]]


async def test_both_apis_and_both_ways_to_get_a_reply_say_the_same(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        whole = await chat(rig, "1.1")
        message = whole["choices"][0]["message"]
        streamed = await post(
            rig,
            "policy",
            "/ng-rollout/x/v1/chat/completions",
            {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
            **{headers.MODEL_CALL: "1.1"},
        )
        assert streamed.headers["content-type"].startswith("text/event-stream")
        chunks = [data for _, data in events(streamed.text)]
        assert chunks[-1] == "[DONE]"
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1] if chunk["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
        (call,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert {name: call[name] for name in ("id", "type", "function")} == message["tool_calls"][0]
        assert [c["choices"][0]["finish_reason"] for c in chunks[:-1] if c["choices"]][-1] == "tool_calls"
        assert chunks[-2]["usage"] == whole["usage"]

        path = "/ng-rollout/y/v1/responses"
        plain, _ = await ok(rig, "policy", path, RESPONSES, **{headers.MODEL_CALL: "1.1"})
        text, asked = plain["output"]
        assert (text["content"][0]["text"], asked["name"]) == (message["content"], "increment_counter")
        assert asked["arguments"] == message["tool_calls"][0]["function"]["arguments"]
        reply = await post(rig, "policy", path, {**RESPONSES, "stream": True}, **{headers.MODEL_CALL: "1.1"})
        told = events(reply.text)
        assert [data["sequence_number"] for _, data in told] == list(range(len(told)))
        assert all(name == data["type"] for name, data in told)
        assert told[0][0] == "response.created"
        assert told[-1][0] == "response.completed"
        assert told[-1][1]["response"] == plain
        done = [data["item"] for name, data in told if name == "response.output_item.done"]
        assert done == plain["output"]
        parts = [data["delta"] for name, data in told if name == "response.output_text.delta"]
        assert "".join(parts) == text["content"][0]["text"]
        # Streamed or not, it is one call: nothing was generated for the second request.
        assert sum(entry["kind"] == "tokens" and entry["last"] for entry in rig.journal()) == 2


async def test_a_reply_that_its_budget_cut_short_is_text_and_says_so(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        reply = await chat(rig, "1.1", max_completion_tokens=50)
        (choice,) = reply["choices"]
        assert (choice["finish_reason"], reply["usage"]["completion_tokens"]) == ("length", 50)
        assert "tool_calls" not in choice["message"]
        told = await post(
            rig, "policy", "/ng-rollout/y/v1/responses", {**RESPONSES, "max_output_tokens": 50, "stream": True}
        )
        assert events(told.text)[-1][0] == "response.incomplete"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "SECRET", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text parts only"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "SECRET"}]}]}, "tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "function tools"),
        ({"tool_choice": "required"}, "forced call"),
        ({"tool_choice": {"type": "function", "function": {"name": "SECRET"}}}, "forced call"),
        ({"n": 2}, "`n` must be 1"),
        ({"max_tokens": 0}, "above 0"),
        ({"max_completion_tokens": "SECRET"}, "above 0"),
        ({"temperature": "SECRET"}, "temperature"),
        ({"top_logprobs": 5}, "top_logprobs"),
    ],
)
async def test_a_chat_request_of_another_form_is_refused_and_says_why(
    tmp_path: Path, change: Mapping[str, Any], says: str
) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        response = await post(rig, "policy", "/ng-rollout/x/v1/chat/completions", {**CHAT, **change})
        assert (response.status_code, code(response)) == (422, "invalid_request")
        assert says in response.text
        assert "SECRET" not in response.text
        assert rig.journal() == []


@pytest.mark.parametrize(
    ("position", "status"),
    [(b"1.1", 200), (b"x" * 240, 200), (b"x" * 241, 422), (b"\xe9", 422), (b"a\tb", 422), (b"\x01", 422)],
)
async def test_a_position_that_nothing_can_be_told_of_is_refused_and_spoils_no_cut(
    tmp_path: Path, position: bytes, status: int
) -> None:
    path = "http://policy/ng-rollout/x/v1/chat/completions"
    async with foreign(tmp_path) as rig, rig.network.client(timeout=None) as client:
        await serving(rig)
        response = await client.post(path, json=CHAT, headers=[(headers.MODEL_CALL.encode(), position)])
        assert response.status_code == status
        if status == 200:
            named = InventoryCall(ticket="t", episode="x", model_call_id=position.decode())
            assert inventory_of("cp", "rig-uid/cell-0", [named]).calls == [named]
        else:
            assert code(response) == "invalid_request"
            assert headers.MODEL_CALL in response.text


async def test_what_was_captured_is_for_those_with_the_token_and_until_it_is_deleted(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        await ok(rig, "engine", "/update_weight_version", {"new_version": "w7"})
        reply = await chat(rig, "1.1")
        said = reply["choices"][0]["message"]
        await chat(rig, "1.2", messages=[*CHAT["messages"], said, {"role": "user", "content": "go on"}])
        async with rig.network.client() as client:
            refused = await client.get(f"http://policy{MANIFEST}/x/manifest")
            assert (refused.status_code, code(refused)) == (401, "unauthorized")
            wrong = await client.get(f"http://policy{MANIFEST}/x-a0/manifest", headers=BEARER)
            assert (wrong.status_code, code(wrong)) == (422, "invalid_request")
            manifest = (await client.get(f"http://policy{MANIFEST}/x/manifest", headers=BEARER)).json()
            assert (manifest["rollout_id"], manifest["failures"]) == ("x", [])
            first, second = manifest["records"]
            assert [first["model_call_id"], second["model_call_id"]] == ["1.1", "1.2"]
            assert second["parent_digest"] == first["chain_digest"]
            text = bytes(first["generation_token_ids"]).decode()
            assert text.startswith(said["content"])
            count = len(first["generation_token_ids"])
            assert len(first["generation_log_probs"]) == count == reply["usage"]["completion_tokens"]
            assert len(first["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
            assert first["weight_versions"] == [{"version": "w7", "start": 0, "end": count}]
            refused = await client.delete(f"http://policy{MANIFEST}/x")
            assert refused.status_code == 401
            for expected in (True, False):
                done = await client.delete(f"http://policy{MANIFEST}/x", headers=BEARER)
                assert done.json() == {"rollout_id": "x", "deleted": expected}
            empty = (await client.get(f"http://policy{MANIFEST}/x/manifest", headers=BEARER)).json()
            assert empty["records"] == []


async def test_a_manifest_that_is_deleted_while_it_is_read_is_answered_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with foreign(tmp_path, servers=servers(tmp_path, cache_bytes=0)) as rig, rig.network.client() as client:
        await serving(rig)
        await chat(rig, "1.1")
        await spilled(rig.participant("policy")._ledgers)
        rig.participant("policy")._failures["x"] = [Failure("1.2", "d", "the engine broke")]
        held = HeldReads(monkeypatch)
        reading = asyncio.ensure_future(client.get(f"http://policy{MANIFEST}/x/manifest", headers=BEARER))
        await held.begun()
        done = await client.delete(f"http://policy{MANIFEST}/x", headers=BEARER)
        assert done.json() == {"rollout_id": "x", "deleted": True}
        held.go_on()
        found = await reading
        assert found.status_code == 200, found.text
        assert [record["model_call_id"] for record in found.json()["records"]] == ["1.1"]
        assert [failure["position"] for failure in found.json()["failures"]] == ["1.2"]
        gone = await client.get(f"http://policy{MANIFEST}/x/manifest", headers=BEARER)
        assert gone.json() == {"rollout_id": "x", "records": [], "failures": []}


async def test_what_is_deleted_while_a_checkpoint_is_open_is_in_it_and_is_freed_after_it(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig, rig.network.client(timeout=None) as client:
        await serving(rig)
        await chat(rig, "1.1")
        policy = rig.participant("policy")
        assert prepare(policy)
        deleting = asyncio.ensure_future(client.delete(f"http://policy{MANIFEST}/x", headers=BEARER))
        await asyncio.sleep(10)
        records = await commit(policy)
        assert [call.position for call in decode("x", records["x"])[1].calls] == ["1.1"]
        await asyncio.sleep(10)
        assert not deleting.done()
        resume(policy)
        assert (await deleting).json() == {"rollout_id": "x", "deleted": True}
        gone = await client.get(f"http://policy{MANIFEST}/x/manifest", headers=BEARER)
        assert gone.json()["records"] == []


async def test_a_call_that_failed_is_in_the_manifest_with_its_reason(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        talk = {"messages": [{"role": "user", "content": WORDS}, {"role": "assistant", "content": "x\ny"}]}
        path = "/ng-rollout/x/v1/chat/completions"
        await ok(rig, "policy", path, talk, **{headers.MODEL_CALL: "1.1"})
        original = rig.network._hosts["engine"]

        async def refuses(scope: Any, receive: Any, send: Any) -> None:
            from starlette.responses import JSONResponse

            await JSONResponse({"error": {"message": "the context is 10 tokens"}}, 400)(scope, receive, send)

        rig.network._hosts["engine"] = (refuses, original[1])
        response = await post(rig, "policy", path, CHAT, **{headers.MODEL_CALL: "1.2"})
        assert (response.status_code, code(response)) == (422, "invalid_request")
        assert "the context is 10 tokens" in response.text
        async with rig.network.client() as client:
            manifest = (await client.get(f"http://policy{MANIFEST}/x/manifest", headers=BEARER)).json()
        (failure,) = manifest["failures"]
        assert (failure["position"], len(manifest["records"])) == ("1.2", 1)
        assert "the context is 10 tokens" in failure["reason"]


def servers(folder: Path, **config: Any) -> list[dict[str, Any]]:
    """A stack whose policy has this `config`."""
    counter = {"journal": str(folder / "journal.jsonl")}
    return [
        {"name": "env", "kind": "environment", "server": "single-agent-turn"},
        {"name": "policy", "kind": "model", "server": "scripted", "config": {"base_url": "http://engine", **config}},
        {"name": "agent", "kind": "agent", "server": "simple-agent"},
        {"name": "counter", "kind": "resources", "server": "counter", "config": counter},
    ]


async def test_replies_bring_token_ids_along_where_the_server_is_told_so(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(2, 1), servers=servers(tmp_path, return_token_ids=True)) as rig:
        await rig.until(rig.complete)
        assert rig.account(2).problems == []
    for line in (tmp_path / "output/rollouts.jsonl").read_text().splitlines():
        items = json.loads(line)["response"]["output"]
        trained = [item for item in items if "generation_token_ids" in item]
        assert len(trained) == sum(item["type"] == "function_call" for item in items) + 1
        for item in trained:
            assert len(item["generation_token_ids"]) == len(item["generation_log_probs"])
            assert item["prompt_token_ids"]


async def test_without_checkpoints_there_is_no_capture_route_and_no_ledger(tmp_path: Path) -> None:
    async with foreign(tmp_path, checkpoints={"enabled": False}) as rig:
        await rig.processes()
        await ok(rig, "policy", "/v1/chat/completions", CHAT)
        async with rig.network.client() as client:
            response = await client.get(f"http://policy{MANIFEST}/x/manifest", headers=BEARER)
            assert response.status_code == 404
        assert rig.participant("policy").survey().counts == {"calls": 0, "ledgers": 0}


async def test_c14_versions_that_the_engine_tells_elsewhere_are_of_the_tokens_between(tmp_path: Path) -> None:
    """As vLLM does: its completions do not say with which weights they were sampled."""
    async with foreign(tmp_path, servers=servers(tmp_path, weight_versions=True)) as rig:
        await serving(rig)
        version = "w1"
        changing = False
        inner = rig.network._hosts["engine"]

        async def engine(scope: Any, receive: Any, send: Any) -> None:
            nonlocal version
            from starlette.responses import JSONResponse

            if scope["path"] == "/weight_info":
                await JSONResponse({"weight_version": version})(scope, receive, send)
                return
            await inner[0](scope, receive, send)
            if changing:
                version = "w2"

        rig.network._hosts["engine"] = (engine, inner[1])
        await chat(rig, "1.1")
        changing = True
        await chat(rig, "1.2", messages=[{"role": "user", "content": "add 7"}])
        ledger = await rig.participant("policy").ledger("x")
        assert [[span.version for span in call.spans] for call in ledger.calls] == [["w1"], ["w1..w2"]]


async def test_what_a_call_ends_with_after_its_handler_is_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Staying:
        async def receive(self) -> dict[str, Any]:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def work() -> CallRecord:
        try:
            return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            raise ProtocolError("stale_attempt", "r was retired") from None

    handler = asyncio.create_task(model_app._while_connected(Staying(), work()))  # type: ignore[arg-type]
    await settle()
    handler.cancel()
    await asyncio.wait([handler])
    await settle()
    del handler
    gc.collect()
    assert "never retrieved" not in caplog.text
