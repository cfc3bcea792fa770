"""A model's context: what the engine says of it is asked for anew wherever another engine may say something else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import httpx
import pytest

from gym_rig.virtual import now
from gym_servers.model.app import Policy, create_app
from gym_servers.model.engine_client import EngineClient
from gym_servers.model.scripted_dialect import ScriptedDialect
from gym_servers.participants.gate import Gate
from gym_servers.participants.model import ModelParticipant

WANTED = 40  # tokens of each call


@dataclass
class Engine:
    """Says `x` for ever, and refuses what is longer than its context, as vLLM does. After `breaks_after` tokens of a
    stream it is another engine, of `next_length`."""

    length: int
    next_length: int = 0
    breaks_after: int | None = None
    refuses: str = ""  # everything, with this reason
    words: str = "the maximum context length is {} tokens"  # for what is too long
    others: Sequence[int] = ()  # that are behind the same address: each request meets the next of all, in turn
    met: int = 0
    away: int = 0  # requests that find nobody
    asked: int = 0  # for its length
    streams: list[tuple[int, int]] = field(default_factory=list)  # tokens of the prompt, and that were wanted

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.away:
            self.away -= 1
            raise httpx.ConnectError("nobody is there")
        if self.others:
            self.length = self.others[self.met % len(self.others)]
            self.met += 1
        if request.url.path == "/v1/models":
            self.asked += 1
            return httpx.Response(200, json={"data": [{"id": "m", "max_model_len": self.length}]})
        body = json.loads(request.content)
        prompt, wanted = len(body["prompt"]), body["max_tokens"]
        self.streams.append((prompt, wanted))
        too_long = self.words.format(self.length) if prompt + wanted > self.length else ""
        if words := self.refuses or too_long:
            return httpx.Response(400, json={"error": {"message": words}})
        return httpx.Response(200, content=self._said(wanted))

    async def _said(self, wanted: int) -> AsyncIterator[bytes]:
        for number in range(1, wanted + 1):
            finish = "length" if number == wanted else None
            choice = {"token_ids": [ord("x")], "logprobs": {"token_logprobs": [-1.0]}, "finish_reason": finish}
            yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
            if number == self.breaks_after:
                self.length, self.breaks_after, self.away = self.next_length, None, 3
                raise httpx.ReadError("it has died")


@asynccontextmanager
async def policy(engine: Engine, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    client = EngineClient("http://engine", "m")
    client.http = httpx.AsyncClient(transport=httpx.MockTransport(engine))
    app = create_app(
        ModelParticipant(Gate(enabled=False, clock=now)),
        Policy(client, ScriptedDialect(), WANTED, bounded=True, **options),
    )
    async with client.http, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://policy") as asking:
        yield asking


async def ask(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "go"}]})


async def tokens(client: httpx.AsyncClient) -> int:
    """How many a reply has."""
    reply = (await ask(client)).raise_for_status().json()
    text = reply["choices"][0]["message"]["content"]
    assert text == "x" * reply["usage"]["completion_tokens"]
    return len(text)


PROMPT = len(json.dumps([{"content": "go", "role": "user"}], separators=(",", ":"))) + 1


async def test_what_fits_is_asked_about_once() -> None:
    engine = Engine(PROMPT + WANTED)
    async with policy(engine) as client:
        for _ in range(3):
            assert await tokens(client) == WANTED
    assert engine.asked == 1


@pytest.mark.parametrize("before", [PROMPT - 5, PROMPT, PROMPT + 1, PROMPT + 20, 1000])
@pytest.mark.parametrize("after", [PROMPT, PROMPT + 1, PROMPT + 30, PROMPT + WANTED, 2000])
async def test_an_engine_that_was_replaced_while_nothing_was_generated_is_asked_for_its_own_context(
    before: int, after: int
) -> None:
    """Nobody has seen it go: an upgrade between two steps of a trainer."""
    engine = Engine(before)
    async with policy(engine) as client:
        for length in (before, after, before):
            engine.length = length
            room = min(WANTED, length - PROMPT)
            if room > 0:
                assert await tokens(client) == room
            else:
                refused = await ask(client)
                assert refused.status_code == 422
                assert f"the model's context is {length}: send less of it" in refused.text


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (1000, WANTED),
        (PROMPT + 25, 25),
        (PROMPT + 10, 10),  # as much as there was
        (PROMPT + 5, 10),
    ],
)
@pytest.mark.parametrize("before", [1000, PROMPT + 30])
async def test_a_generation_that_an_engine_s_death_has_cut_gets_what_the_next_one_has_room_for(
    before: int, length: int, said: int
) -> None:
    engine = Engine(before, length, breaks_after=10)
    async with policy(engine) as client:
        assert await tokens(client) == said
        engine.length = before
        assert await tokens(client) == min(WANTED, before - PROMPT)


async def test_a_generation_whose_conversation_has_no_room_in_the_next_engine_ends_with_that_reason() -> None:
    engine = Engine(1000, PROMPT, breaks_after=10)
    async with policy(engine) as client:
        refused = await ask(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_request")
        assert f"the model's context is {PROMPT}: send less of it" in refused.text


@pytest.mark.parametrize("given", [None, 2000])
async def test_a_refusal_that_another_length_does_not_explain_is_told_as_it_is(given: int | None) -> None:
    engine = Engine(1000)
    async with policy(engine, context=given) as client:
        assert await tokens(client) == WANTED
        engine.refuses = "an odd option"
        refused = await ask(client)
        assert refused.status_code == 422
        assert "an odd option" in refused.text
        assert len(engine.streams) == 2


async def test_a_length_that_the_server_was_given_is_not_asked_for() -> None:
    engine = Engine(1000)
    async with policy(engine, context=PROMPT + 7) as client:
        assert await tokens(client) == 7
    assert engine.asked == 0


WORDS = [
    "This model's maximum context length is {} tokens. However, you requested 9999 tokens (9000 in the prompt)",
    "Requested token count exceeds the model's maximum context length of {} tokens. You requested 9999 tokens",
    "Input length (9000) exceeds model's maximum context length ({}).",
]


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("lengths", list(product((PROMPT + 10, 1000, 2000), repeat=3)))
async def test_engines_of_different_lengths_behind_one_address_take_every_call_that_each_has_room_for(
    lengths: Sequence[int], words: str
) -> None:
    """They are replaced one after the other, by such as have another length: any of them may be asked for it, and any
    other may get the call."""
    engine = Engine(0, others=lengths, words=words)
    async with policy(engine) as client:
        for _ in range(6):
            assert await tokens(client) in {min(WANTED, length - PROMPT) for length in lengths}


async def test_a_conversation_that_one_of_them_has_no_room_for_ends_with_that_reason() -> None:
    engine = Engine(0, others=(2000, PROMPT))
    async with policy(engine) as client:
        refused = await ask(client)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_request")
        assert f"the model's context is {PROMPT}: send less of it" in refused.text


async def test_an_engine_that_refuses_without_a_length_is_asked_for_it() -> None:
    engine = Engine(1000, words="that is too long")
    async with policy(engine) as client:
        assert await tokens(client) == WANTED
        engine.length = PROMPT + 9
        assert await tokens(client) == 9
