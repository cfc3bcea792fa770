"""What our middleware does beside the engine, cuts apart: replaced attempts are stopped, weights have a version."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gym_rig.guarded import CELL, Guarded, guarded
from gym_rig.wire import ok
from gym_servers.capture.chunks import version_comment, version_of
from gym_servers.capture.inventory import ATTEMPT_PATH, VERSION_PATH, InventoryCall, inventory_of
from gym_servers.capture.staging import unpack
from gym_servers.capture.tokens import Span
from gym_servers.protocol import headers
from gym_servers.worker.attempts import Attempts, Caller, caller_of
from gym_servers.worker.weights import Telling, Weights

WORDS = "add 5 then add 6 then get the count"
LONG = f"run `{'x' * 900}`"  # three quarters of a minute


def of(attempt: int, folder: str = CELL) -> dict[str, str]:
    return {headers.ENGINE_ATTEMPT: f"{folder};{attempt}"}


async def stands_still(engine: Guarded, ticket: str) -> bool:
    """Whether nothing is generated for a stream any more."""
    before = engine.generated(ticket)
    await asyncio.sleep(2)
    return engine.generated(ticket) == before


async def test_what_a_replaced_attempt_generates_is_stopped_and_nothing_else(tmp_path: Path) -> None:
    async with guarded(tmp_path, collection=None) as (rig, engine):
        callers = {"old": of(1), "new": of(2, "other/cell-0"), "else": {}}
        asked = {name: asyncio.ensure_future(engine.ask(name, WORDS, **extra)) for name, extra in callers.items()}
        await asyncio.sleep(1.1)
        journaled = len(rig.journal_file.path.read_text().splitlines())
        said = await engine.say(ATTEMPT_PATH, {"folder": CELL, "attempt": 2})
        assert said.json() == {"stopped": 1}
        assert await stands_still(engine, "old")
        assert not await stands_still(engine, "new")
        assert len(rig.journal_file.path.read_text().splitlines()) > journaled
        for name in ("new", "else"):
            assert (await asked[name]).text.endswith("data: [DONE]\n\n")
        (stopped,) = await asyncio.gather(asked["old"], return_exceptions=True)
        assert "[DONE]" not in getattr(stopped, "text", "")
        late = await engine.ask("late", WORDS, **of(1))
        assert (late.status_code, late.json()["error"]["code"]) == (409, "stale_attempt")
        assert engine.generated("late") == 0


async def test_a_stream_of_a_later_attempt_says_the_same(tmp_path: Path) -> None:
    async with guarded(tmp_path, collection=None) as (_, engine):
        old = asyncio.ensure_future(engine.ask("old", WORDS, **of(0)))
        await asyncio.sleep(1.1)
        new = asyncio.ensure_future(engine.ask("new", WORDS, **of(1)))
        await asyncio.sleep(0.1)
        assert await stands_still(engine, "old")
        assert (await new).text.endswith("data: [DONE]\n\n")
        old.cancel()


async def test_a_cell_that_was_cut_off_generates_no_more_once_its_successor_is_in_service(tmp_path: Path) -> None:
    """The old model server is not dead: its connections stand, as on a node that only its cluster has lost."""
    async with guarded(tmp_path) as (rig, engine):
        await rig.until(lambda: sum(len(call.tokens) > 0 for call in rig.participant("policy")._calls) == 3)
        await rig.checkpoint("cut")
        kept = asyncio.ensure_future(engine.ask("kept", WORDS, **of(0)))
        await asyncio.sleep(0.5)
        assert engine.generated("kept") > 0
        rig.kill("policy")
        await rig.until(lambda: rig.running(1))
        await asyncio.sleep(0.5)
        assert await stands_still(engine, "kept")
        await rig.until(rig.complete)
        assert rig.account(3).problems == []
        kept.cancel()


async def test_a_cell_that_was_cut_off_generates_no_more_also_where_its_successor_has_nothing_to_ask(
    tmp_path: Path,
) -> None:
    """No stream of the new attempt tells the engine of it: its model server does, once it is in service."""
    async with guarded(tmp_path, collection=None) as (rig, engine):
        await rig.until(rig.running)
        callers = {"old": of(0), "other": of(0, "other/cell-0")}
        asked = {name: asyncio.ensure_future(engine.ask(name, LONG, **extra)) for name, extra in callers.items()}
        await asyncio.sleep(1)
        rig.kill("policy")
        await rig.until(lambda: rig.running(1))
        await asyncio.sleep(0.5)
        assert await stands_still(engine, "old")
        assert not await stands_still(engine, "other")
        (stopped,) = await asyncio.gather(asked["old"], return_exceptions=True)
        assert "[DONE]" not in getattr(stopped, "text", "")
        assert (await asked["other"]).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("path", [ATTEMPT_PATH, VERSION_PATH])
async def test_only_the_stack_s_owner_is_listened_to(tmp_path: Path, path: str) -> None:
    async with guarded(tmp_path, collection=None) as (_, engine):
        for extra in ({}, {"authorization": "Bearer other"}):
            assert (await engine.say(path, {"folder": CELL, "attempt": 1, "version": "w"}, extra)).status_code == 401
        for body in ({}, {"folder": "../x", "attempt": 1}, {"folder": CELL, "attempt": -1}, {"version": ""}):
            assert (await engine.say(path, body)).status_code == 422


@pytest.mark.parametrize("header", ["", "x", "a/cell-0;", "a/cell-0;-1", "a/cell-0;1234567890", ";1"])
async def test_a_caller_that_cannot_be_read_is_refused(tmp_path: Path, header: str) -> None:
    async with guarded(tmp_path, collection=None) as (_, engine):
        assert (await engine.ask("a", **{headers.ENGINE_ATTEMPT: header})).status_code == 422


def test_attempts_are_remembered_of_so_many_cells() -> None:
    attempts = Attempts()
    for number in range(5000):
        attempts.raise_to(Caller(f"{number}/cell-0", 3))
    assert len(attempts._highest) == 4096
    assert caller_of(Caller("a/cell-0", 7).header) == ("a/cell-0", 7)


# ---- weights -------------------------------------------------------------------------------------------------


async def set_version(engine: Guarded, version: str) -> None:
    assert (await engine.say(VERSION_PATH, {"version": version})).status_code == 200


async def test_c14_each_token_has_the_version_it_was_sampled_with(tmp_path: Path) -> None:
    """The weights change in the middle of a stream, and nobody breaks it off."""
    async with guarded(tmp_path, collection=None) as (rig, engine):
        await rig.until(rig.running)
        await set_version(engine, "step-1")
        body = {"input": [{"role": "user", "content": WORDS}]}
        asked = asyncio.ensure_future(ok(rig, "policy", "/ng-rollout/x/v1/responses", body))
        await rig.until(lambda: any(len(call.tokens) >= 20 for call in rig.participant("policy")._calls))
        (call,) = rig.participant("policy")._calls
        before = len(call.tokens)
        await set_version(engine, "step-2")
        await asked
        (record,) = (await rig.participant("policy").ledger("x")).calls
        assert [span.version for span in record.spans] == ["step-1", "step-2"]
        assert record.spans[0] == Span("step-1", 0, record.spans[0].end)
        assert before <= record.spans[0].end <= before + 4  # what is sent together
        async with rig.network.client() as client:
            told = await client.get(f"http://engine{VERSION_PATH}")
        assert told.json() == {"version": "step-2"}


async def test_a_cut_at_the_engine_has_the_versions_too(tmp_path: Path) -> None:
    async with guarded(tmp_path, collection=None) as (_, engine):
        await set_version(engine, "step-1")
        asked = asyncio.ensure_future(engine.ask("a", WORDS))
        await asyncio.sleep(1.1)
        await set_version(engine, "step-2")
        await asyncio.sleep(1)
        named = [InventoryCall(ticket="a", episode="r", model_call_id="1.1")]
        receipt = (await engine.cut(inventory_of("cp", CELL, named).model_dump(mode="json"))).json()
        tokens = unpack(engine.store.get(receipt["key"]))["a"]
        assert [span.version for span in tokens.spans] == ["step-1", "step-2"]
        text = (await asked).text
        assert [version_of(line) for line in text.splitlines() if version_of(line)] == ["step-1", "step-2"]


async def test_versions_that_a_trainer_tells_vllm_are_overheard_once_it_has_taken_them(tmp_path: Path) -> None:
    async with guarded(tmp_path, collection=None) as (_, engine):
        inner, status = engine.app._app, 200

        async def vllm(scope: Any, receive: Any, send: Any) -> None:
            from starlette.requests import Request
            from starlette.responses import JSONResponse

            if scope["path"] not in ("/finish_weight_update", "/update_weight_version"):
                await inner(scope, receive, send)
                return
            await Request(scope, receive).body()
            await JSONResponse({}, status)(scope, receive, send)

        engine.app._app = vllm
        for path, field in (("/finish_weight_update", "weight_version"), ("/update_weight_version", "new_version")):
            status = 500
            await engine.say(path, {field: f"{path}-failed"}, {})
            assert engine.app._weights.version != f"{path}-failed"
            status = 200
            await engine.say(path, {field: path}, {})
            assert engine.app._weights.version == path
            for nothing in ({}, {field: None}, {field: 7}, {"other": "x"}, []):
                await engine.say(path, nothing, {})
            assert engine.app._weights.version == path


async def test_a_version_is_told_between_events_and_only_in_streams() -> None:
    weights, sent = Weights(), []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    weights.take('odd "name"\n')
    comment = version_comment(weights.version)
    assert version_of(comment.decode().split("\n")[0]) == weights.version
    for kind, body in (
        (b"text/event-stream; charset=utf-8", comment + b"data: 1"),
        (b"application/json", b"data: 1"),
    ):
        sent.clear()
        telling = Telling(weights, send)
        await telling({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        await telling({"type": "http.response.body", "body": b"data: 1"})
        assert sent[-1] == body
    telling = Telling(weights, send)
    await telling(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
    )
    await telling({"type": "http.response.body", "body": b"data: 1"})
    weights.take("next")
    await telling({"type": "http.response.body", "body": b"23\n\n"})
    assert sent[-1] == b"23\n\n", "inside of an event nothing may stand"
    await telling({"type": "http.response.body", "body": b"data: 2\n\n"})
    assert sent[-1] == version_comment("next") + b"data: 2\n\n"
    assert json.loads(version_comment("next").decode().split(" ", 2)[2]) == "next"
