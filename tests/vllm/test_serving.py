"""A policy server before a real engine, as clients and trainers use it: streams, weights, what is left running."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gym_kit.local_run import LocalRun, followed
from gym_servers.capture.inventory import VERSION_PATH
from gym_servers.coordination.client import ParticipantClient
from gym_servers.model.capture_routes import PREFIX
from gym_servers.protocol import headers
from gym_servers.protocol.messages import RetireReply, RetireRequest
from gym_servers.stack.render import cell_folder
from gym_servers.stack.settings import StackIdentity
from gym_vllm.collect import manifest
from gym_vllm.engine import NAME, Engine
from gym_vllm.journal import Generated
from gym_vllm.language import CHAT_TOOLS, rows_of_tests

pytestmark = pytest.mark.timeout(2400)  # the first waits for the engine to start

WORDS = "add 5 then add 6 then add 7 then get the count"
CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": WORDS}], "tools": CHAT_TOOLS}
LONG_TOKENS = 960  # of the 1024 that there are: a generation that lasts until somebody looks at it
LONG = {**CHAT, "max_tokens": LONG_TOKENS, "ignore_eos": True}


class Served(LocalRun):
    """A cell that nobody drives but the test."""

    patience = 240.0

    def url(self, server: str) -> str:
        found = json.loads((self.folder / "addresses.json").read_text())
        return str(found[server])

    def generations(self) -> dict[str, int]:
        """What the policy server says has become of calls."""
        seen = self.runner.view.seen["policy"] if self.runner.view else None
        return dict(seen.status.generations) if seen is not None and seen.status is not None else {}

    @property
    def pid(self) -> int:
        return int((self.folder / "policy.pid").read_text())


def undriven(folder: Path, engine: Engine) -> dict[str, Any]:
    """A manifest whose cell has the engine's storage and token."""
    folder.mkdir(parents=True)
    document = manifest(folder, engine, 1, cut_at_engine=True)
    del document["spec"]["collection"]
    (folder / "control-token").write_text(engine.token)
    document["spec"]["checkpoints"]["storage"] = {"directory": str(engine.storage)}
    return document


@asynccontextmanager
async def served(folder: Path, engine: Engine) -> AsyncIterator[Served]:
    document = undriven(folder, engine)
    async with followed(document, folder) as cell:
        run = Served(folder, cell, 0)
        await run.in_service(0)
        yield run


def client(run: Served, rollout: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{run.url('policy')}/ng-rollout/{rollout}/v1",
        api_key="none",
        max_retries=0,
        timeout=120.0,
        http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
    )


def http() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=120.0, trust_env=False)


async def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.05)


async def stands_still(engine: Engine) -> bool:
    """Whether the engine generates nothing: by its own counts."""
    if engine.running():
        return False
    before = engine.own_count()
    await asyncio.sleep(1.0)
    return engine.own_count() == before


async def test_openai_s_client_gets_a_chat_piece_by_piece(engine: Engine, folder: Path) -> None:
    async with served(folder, engine) as run, client(run, "plain") as plain, client(run, "stream") as other:
        whole = (await plain.chat.completions.create(**CHAT, temperature=0)).choices[0]
        stream = await other.chat.completions.create(**CHAT, temperature=0, stream=True)
        pieces, calls, finish = [], [], None
        async for chunk in stream:
            (choice,) = chunk.choices
            finish = choice.finish_reason or finish
            calls += choice.delta.tool_calls or []
            if choice.delta.content:
                pieces.append(choice.delta.content)
        assert "".join(pieces) == whole.message.content
        assert [(call.function.name, call.function.arguments) for call in calls] == [
            (call.function.name, call.function.arguments) for call in whole.message.tool_calls
        ]
        assert finish == whole.finish_reason == "tool_calls"


async def test_a_piece_is_sent_while_its_generation_stands_in_its_middle(engine: Engine, folder: Path) -> None:
    long = {**CHAT, "max_tokens": LONG_TOKENS, "extra_body": {"ignore_eos": True}}
    async with served(folder, engine) as run, client(run, "early") as early:

        async def first_piece() -> str:
            async with await early.chat.completions.create(**long, temperature=0, stream=True) as stream:
                while not (piece := (await anext(stream)).choices[0].delta.content):
                    pass
                return str(piece)

        reading = asyncio.ensure_future(first_piece())
        async with engine.held_once(4, "early"):
            assert await asyncio.wait_for(reading, 60.0)
            (begun,) = [one for one in engine.generated() if one.key == "early"]
            assert not begun.ended


async def test_openai_s_client_gets_a_response_piece_by_piece(engine: Engine, folder: Path) -> None:
    asked: dict[str, Any] = rows_of_tests()[0]["responses_create_params"]
    async with served(folder, engine) as run, client(run, "plain") as plain, client(run, "stream") as other:
        whole = await plain.responses.create(model=NAME, temperature=0, **asked)
        deltas, last = [], None
        async for event in await other.responses.create(model=NAME, temperature=0, stream=True, **asked):
            last = event
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
        assert last is not None and last.type == "response.completed"
        assert "".join(deltas) == whole.output_text
        assert [item.type for item in last.response.output] == [item.type for item in whole.output]


async def test_a_model_server_that_dies_leaves_nothing_running_in_the_engine(engine: Engine, folder: Path) -> None:
    async with served(folder, engine) as run, http() as asking:
        body = {**LONG, "temperature": 0, "stream": True}
        call = asyncio.ensure_future(asking.post(f"{run.url('policy')}/ng-rollout/x/v1/chat/completions", json=body))
        async with engine.held_once(20, "x"):
            os.kill(run.pid, signal.SIGKILL)
            killed = time.monotonic()
            await until(lambda: all(one.ended for one in engine.generated() if one.key == "x"))
            print(f"the engine has let go of it {time.monotonic() - killed:.2f} s after the kill")
        with suppress(httpx.TransportError):
            await call
        await until(lambda: not engine.running())
        assert await stands_still(engine)
        (stream,) = [one for one in engine.generated() if one.key == "x"]
        assert len(stream.ids) < LONG_TOKENS


async def test_a_stream_of_a_replaced_attempt_is_stopped_though_its_reader_stands(
    engine: Engine, folder: Path
) -> None:
    """As on a node that only its cluster has lost."""
    async with served(folder, engine) as run, http() as asking:
        identity = run.runner.host._settings["policy"]["stack"]
        mine = cell_folder(StackIdentity.model_validate(identity), 0)
        body = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": LONG_TOKENS, "ignore_eos": True, "stream": True}
        body |= {"return_token_ids": True, "logprobs": 0}
        named = {headers.TICKET: "kept", headers.ENGINE_ATTEMPT: f"{mine};0", "x-request-id": "kept/1.1"}
        kept = asyncio.ensure_future(asking.post(f"{engine.url}/v1/completions", json=body, headers=named))
        async with engine.held_once(5, "kept"):
            told = await asking.post(
                f"{engine.url}/ng-control/v1/engine-attempt",
                json={"folder": mine, "attempt": 1},
                headers={"authorization": f"Bearer {engine.token}"},
            )
            assert told.json() == {"stopped": 1}
        await until(lambda: not engine.running(), 5.0)
        assert await stands_still(engine)
        late = await asking.post(f"{engine.url}/v1/completions", json=body, headers=named)
        assert late.status_code == 409
        with suppress(httpx.TransportError):
            await kept


@asynccontextmanager
async def to_be_stopped(
    run: Served, engine: Engine, rollout: str
) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """Two calls of a rollout, the second streamed, while the engine stands in their middle. It is shown that the
    block stops both of them there, and that another rollout's call loses nothing by it."""
    other = f"not-{rollout}"

    def of(key: str) -> list[Generated]:
        return [one for one in engine.generated() if one.key == key]

    async with AsyncExitStack() as stack:
        asking = await stack.enter_async_context(http())

        def ask(key: str, *, stream: bool) -> asyncio.Task[httpx.Response]:
            url = f"{run.url('policy')}/ng-rollout/{key}/v1/chat/completions"
            return asyncio.create_task(asking.post(url, json={**LONG, "temperature": 0, "stream": stream}))

        engine.pause()  # all three begin together
        stack.callback(engine.go_on)
        kept, calls = ask(other, stream=False), [ask(rollout, stream=False), ask(rollout, stream=True)]
        await until(lambda: (len(of(other)), len(of(rollout))) == (1, 2))
        async with engine.held_once(40, rollout):
            assert not any(one.ended for one in [*of(other), *of(rollout)])
            yield calls
            await until(lambda: all(one.ended for one in of(rollout)))
            assert not of(other)[0].ended
            counted, said = engine.own_count(), len(of(other)[0].ids)
        assert (await kept).raise_for_status().json()["usage"]["completion_tokens"] == LONG_TOKENS
        await until(lambda: not engine.running())
        assert await stands_still(engine)
        # What one of the two had still to say is far more than what is on its way while an engine is told to stop.
        assert engine.own_count() - counted < LONG_TOKENS - said + 100
        assert [(one.finish, len(one.ids) < LONG_TOKENS) for one in of(rollout)] == [(None, True)] * 2


async def test_what_a_retired_rollout_generates_is_stopped_and_nothing_else(engine: Engine, folder: Path) -> None:
    async with served(folder, engine) as run, http() as asking, to_be_stopped(run, engine, "retired") as calls:
        control = run.runner.host._process("policy").control_url
        assert control is not None
        policy = ParticipantClient("policy", "model", control, engine.token, asking)
        asked = RetireRequest(checkpoint_id="retire", deadline_ts=time.time() + 60.0, episode_ids=["retired"])
        assert (await policy.call("retire", asked, RetireReply)).retired == ["retired"]
        assert ["stale_attempt" in (await call).text for call in calls] == [True, True]


async def test_what_a_client_that_left_had_asked_for_is_stopped_and_nothing_else(
    engine: Engine, folder: Path
) -> None:
    """Half a minute later: until then it may come back."""
    async with served(folder, engine) as run:
        async with to_be_stopped(run, engine, "left") as calls:
            for call in calls:
                call.cancel()
            await asyncio.wait(calls)
        await until(lambda: run.generations().get("abandoned") == 2)


async def versions(run: Served, engine: Engine, rollout: str) -> list[dict[str, Any]]:
    async with http() as asking:
        reply = await asking.get(
            f"{run.url('policy')}{PREFIX}/{rollout}/manifest", headers={"authorization": f"Bearer {engine.token}"}
        )
    (record,) = reply.raise_for_status().json()["records"]
    found: list[dict[str, Any]] = record["weight_versions"]
    return found


async def test_c14_versions_that_a_trainer_tells_vllm_are_of_the_tokens_sampled_under_them(
    engine: Engine, folder: Path
) -> None:
    """As trainers do it: generation is paused where it is, weights are changed and named, and it goes on."""
    async with served(folder, engine) as run, http() as asking:

        async def trainer(path: str, **body: str) -> None:
            (await asking.post(f"{engine.url}{path}", json=body or None)).raise_for_status()

        await trainer("/update_weight_version", new_version="step-1")
        assert (await asking.get(f"{engine.url}/weight_info")).json() == {"weight_version": "step-1"}
        assert (await asking.get(f"{engine.url}{VERSION_PATH}")).json() == {"version": "step-1"}
        body = {**LONG, "temperature": 0}
        call = asyncio.ensure_future(asking.post(f"{run.url('policy')}/ng-rollout/w/v1/chat/completions", json=body))
        async with engine.held_once(40, "w"):
            await asyncio.sleep(0.5)
            (stream,) = [one for one in engine.generated() if one.key == "w"]
            before = len(stream.ids)
            await trainer("/update_weight_version", new_version="step-2")
        (await call).raise_for_status()
        assert await versions(run, engine, "w") == [
            {"version": "step-1", "start": 0, "end": before},
            {"version": "step-2", "start": before, "end": LONG_TOKENS},
        ]


async def test_c8_a_checkpoint_keeps_what_a_call_has_generated_however_slow_everything_is(
    engine: Engine, folder: Path
) -> None:
    """All of it, though the last of it has not arrived at the policy server."""
    async with served(folder, engine) as run, http() as asking:
        with engine.one_behind():
            body = {**LONG, "temperature": 0}
            url = f"{run.url('policy')}/ng-rollout/k/v1/chat/completions"
            call = asyncio.ensure_future(asking.post(url, json=body))
            async with engine.held_once(20, "k"):
                taken = await run.runner.checkpoint("cut")
                assert taken.publication.state == "published"
                (stream,) = [one for one in engine.generated() if one.key == "k"]
                said = len(stream.ids)
                assert said > len(stream.but_last_message)
                assert not stream.ended
            await until(lambda: run.generations().get("cut_kept") == 1)
            assert run.generations()["cut_tokens"] == said
            (await call).raise_for_status()
