"""Engines that say what nobody expects: a call ends with a reason or goes on, and what was captured can be read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_rig.cell import TOKEN, Rig
from gym_rig.verbs import checkpoint, restore, resume
from gym_rig.wire import code, foreign, ok, post, serving
from gym_servers.capture.ledger import decode
from gym_servers.capture.reasons import Reason
from gym_servers.capture.tokens import Span
from gym_servers.model.engine_client import EngineBroke, EngineClient
from gym_servers.protocol import headers

PATH = "/ng-rollout/x/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "go"}]}
POSITION = {headers.MODEL_CALL: "1.1"}
MANIFEST = "http://policy/training-token-capture/control/rollouts/x/manifest"
END = b"data: [DONE]\n\n"
# Each of these ends a line where Python breaks a text; JSON needs none of them escaped but the first four.
BREAKS = "\x0b\x0c\r\x1c\x85\u2028\u2029"
Stream = Iterable[bytes]


def chunk(text: str, finish: str | None = None, **other: Any) -> bytes:
    """Tokens of a text as vLLM sends them: the text stands in it as it is."""
    ids = list(text.encode())
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "text": text, **other}
    document = {"choices": [{**choice, "finish_reason": finish}]}
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


class Odd:
    """In the engine's place: its streams are given one after the other, the last of them for ever."""

    def __init__(self, rig: Rig, *streams: Stream | Callable[[], Stream], **extra: str) -> None:
        self.prompts: list[list[int]] = []
        self.version = ""
        self._streams, self._extra = list(streams), extra
        rig.network._hosts["engine"] = (self, rig.network._hosts["engine"][1])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import JSONResponse, StreamingResponse

        if scope["path"] != "/v1/completions":
            await JSONResponse({"weight_version": self.version})(scope, receive, send)
            return
        self.prompts.append(json.loads((await receive())["body"])["prompt"])
        stream = self._streams.pop(0) if len(self._streams) > 1 else self._streams[0]
        head = self._extra if self._streams and stream is not self._streams[0] else {}

        async def body() -> Any:
            for part in stream() if callable(stream) else stream:
                yield part
                await asyncio.sleep(0.01)

        answer = StreamingResponse(body(), media_type="text/event-stream", headers=head)
        await answer(scope, receive, send)


async def text(rig: Rig) -> str:
    """The text of the reply, which comes before an engine would be asked for ever."""
    async with asyncio.timeout(60.0):
        reply, _ = await ok(rig, "policy", PATH, ASK, **POSITION)
    return str(reply["choices"][0]["message"]["content"])


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_what_a_model_says_ends_no_line_of_the_stream_it_comes_in(tmp_path: Path, size: int) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        said = "".join(f"word{mark}" for mark in BREAKS)
        whole = chunk(said) + chunk("end", "stop") + END
        engine = Odd(rig, [whole[at : at + size] for at in range(0, len(whole), size)])
        assert await text(rig) == f"{said}end"
        assert len(engine.prompts) == 1


NUMBERS = [
    ("[65]", "[null]"),
    ("[65]", "[NaN]"),
    ("[65]", "[-Infinity]"),
    ("[65]", "[1e39]"),
    ("[65]", '["x"]'),
    ("[65]", "[]"),
    ("[65]", "5"),
    ("[2147483648]", "[-1]"),
    ("[-1]", "[-1]"),
    ("[null]", "[-1]"),
    ("[1.5]", "[-1]"),
    ('["A"]', "[-1]"),
    ('"A"', "[-1]"),
    ('{"a": 1}', "[-1]"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("ids", "logprobs"), NUMBERS)
async def test_c11_what_is_no_token_is_refused_and_takes_nothing_with_it(
    tmp_path: Path, ids: str, logprobs: str, streamed: bool
) -> None:
    odd = (
        f'data: {{"choices":[{{"token_ids":{ids},"logprobs":{{"token_logprobs":{logprobs}}},"finish_reason":null}}]}}'
    )
    async with foreign(tmp_path) as rig:
        await serving(rig)
        Odd(rig, [odd.encode() + b"\n\n"], [chunk("well", "stop"), END])
        response = await post(rig, "policy", PATH, {**ASK, "stream": streamed}, **POSITION)
        assert (response.status_code, code(response)) == (409, "checkpoint_error"), response.text
        assert "the engine sent" in response.text
        assert await text(rig) == "well"
        async with rig.network.client() as client:
            manifest = await client.get(MANIFEST, headers={"authorization": f"Bearer {TOKEN}"})
        assert manifest.status_code == 200
        (record,), (failure,) = manifest.json()["records"], manifest.json()["failures"]
        assert len(record["generation_token_ids"]) == len(record["generation_log_probs"]) == 4
        assert "the engine sent" in failure["reason"]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff\xfe\n\n",
        b"data: {\n\n",
        b"data: 5\n\n",
        b'data: {"choices": 5}\n\n',
        b'data: {"choices": [{"token_ids": [65], "logprobs": [1]}]}\n\n',
        b"data: " + b"[" * 200_000 + b"\n\n",
        b'data: {"error": {"message": "no"}}\n\n',
        b'data: {"choices": [{"weight_versions": [{"version": "w", "start": 0, "end": 1e999}]}]}\n\n',
        b"",
    ],
)
async def test_a_stream_that_turns_into_nonsense_is_taken_up_behind_its_tokens(
    tmp_path: Path, nonsense: bytes
) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        engine = Odd(rig, [chunk("well "), nonsense], [chunk("done", "stop"), END])
        assert await text(rig) == "well done"
        assert engine.prompts[1] == [*engine.prompts[0], *b"well "]


OPTIONS: dict[str, dict[str, Any]] = {
    Reason.CONSTRAINED: {"response_format": {"type": "json_object"}},
    Reason.PENALTIES: {"presence_penalty": 0.5},
    Reason.STOP_TEXTS: {"stop": ["!"]},
    Reason.SEED: {"seed": 7, "temperature": 1.0},
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("reason", OPTIONS)
async def test_what_is_begun_anew_when_the_engine_broke_off_is_counted_by_reason(
    tmp_path: Path, reason: str, times: int
) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        broken: list[Stream] = [[chunk("bro")] for _ in range(times)]
        engine = Odd(rig, *broken, [chunk("whole", "stop"), END])
        reply, _ = await ok(rig, "policy", PATH, {**ASK, **OPTIONS[reason]}, **POSITION)
        assert reply["choices"][0]["message"]["content"] == "whole"
        assert len({tuple(prompt) for prompt in engine.prompts}) == 1
        assert rig.participant("policy").generations() == {"begun_anew": times, f"begun_anew_{reason}": times}


@pytest.mark.parametrize(
    ("options", "had"), [({}, "wh"), (OPTIONS[Reason.SEED], "")], ids=["continued", "nothing to lose"]
)
async def test_a_stream_that_breaks_off_and_costs_nothing_is_not_counted(
    tmp_path: Path, options: dict[str, Any], had: str
) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        Odd(rig, [chunk(had)], [chunk("whole".removeprefix(had), "stop"), END])
        reply, _ = await ok(rig, "policy", PATH, {**ASK, **options}, **POSITION)
        assert reply["choices"][0]["message"]["content"] == "whole"
        assert rig.participant("policy").generations() == {}


@pytest.mark.parametrize("had", ["wh", ""])
async def test_tokens_that_went_with_an_error_are_counted(tmp_path: Path, had: str) -> None:
    odd = b'data: {"choices":[{"token_ids":[65],"logprobs":{"token_logprobs":[null]}}]}\n\n'
    async with foreign(tmp_path) as rig:
        await serving(rig)
        Odd(rig, [chunk(had), odd], [chunk("whole", "stop"), END])
        response = await post(rig, "policy", PATH, ASK, **POSITION)
        assert code(response) == "checkpoint_error"
        assert rig.participant("policy").generations() == ({"dropped": 1, "dropped_error": 1} if had else {})
        assert await text(rig) == "whole"


async def test_a_body_that_cannot_be_unpacked_is_asked_for_again(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        engine = Odd(rig, [b"no gzip"], [chunk("done", "stop"), END], **{"content-encoding": "gzip"})
        assert await text(rig) == "done"
        assert len(engine.prompts) == 2


def told_elsewhere(tmp_path: Path) -> list[dict[str, Any]]:
    """Servers whose engine tells the version of its weights apart from its streams."""
    counter = {"journal": str(tmp_path / "journal.jsonl")}
    config = {"base_url": "http://engine", "weight_versions": True}
    return [
        {"name": "env", "kind": "environment", "server": "single-agent-turn"},
        {"name": "policy", "kind": "model", "server": "scripted", "config": config},
        {"name": "agent", "kind": "agent", "server": "simple-agent"},
        {"name": "counter", "kind": "resources", "server": "counter", "config": counter},
    ]


async def test_c14_weights_that_changed_before_a_stream_broke_off_are_told_of_its_tokens(tmp_path: Path) -> None:
    async with foreign(tmp_path, servers=told_elsewhere(tmp_path)) as rig:
        await serving(rig)

        def changes() -> Stream:
            yield chunk("one ")
            engine.version = "w2"
            yield chunk("two ")
            yield b'data: {"error": {"message": "it is over"}}\n\n'

        engine = Odd(rig, [chunk("zero ")], changes, [chunk("three", "stop"), END])
        engine.version = "w1"
        assert await text(rig) == "zero one two three"
        (call,) = (await rig.participant("policy").ledger("x")).calls
        assert call.spans == (Span("w1", 0, 5), Span("w1..w2", 5, 13), Span("w2", 13, 18))


@pytest.mark.parametrize(("now", "known"), [("w1", "w1"), ("w2", "w1..w2"), ("w3", "w1..w3")])
async def test_c14_weights_that_may_have_changed_before_a_cut_are_told_of_its_tokens(
    tmp_path: Path, now: str, known: str
) -> None:
    async with foreign(tmp_path, servers=told_elsewhere(tmp_path)) as rig:
        await serving(rig)

        def changes() -> Stream:
            yield chunk("one ")
            engine.version = now
            yield chunk("two ")
            while True:
                yield b": nothing more\n\n"

        engine = Odd(rig, changes, [chunk("three", "stop"), END])
        engine.version = "w1"
        asked = asyncio.ensure_future(post(rig, "policy", PATH, ASK, **POSITION))
        await asyncio.sleep(1.0)
        records = await checkpoint(rig.participant("policy"))
        (prefix,) = decode("x", records["x"])[1].prefixes
        assert prefix.tokens.spans == (Span("w1..", 0, 8),)
        rig.kill("policy")
        await asyncio.wait({asked})
        rig.start("policy")
        fresh = rig.participant("policy")
        restore(fresh, records, "x")
        resume(fresh, "restore")
        await ok(rig, "policy", PATH.replace("/x/", "/x-a1/"), ASK, **POSITION)
        (call,) = (await fresh.ledger("x-a1")).calls
        spans = {n: span.version for span in call.spans for n in range(span.start, span.end)}
        assert [spans[n] for n in range(13)] == [known] * 8 + [now] * 5


@pytest.mark.parametrize(
    "answer",
    [
        httpx.Response(503),
        httpx.Response(200, text="no JSON"),
        httpx.Response(200, json=5),
        httpx.Response(200, json={"data": None}),
        httpx.Response(200, json={"data": [5]}),
        httpx.Response(200, json={"data": [{"id": "m", "max_model_len": "long"}]}),
        httpx.Response(200, text='{"data": [{"id": "m", "max_model_len": 1e999}]}'),
    ],
)
async def test_an_engine_that_does_not_say_its_context_in_its_form_is_asked_again(answer: httpx.Response) -> None:
    client = EngineClient("http://engine", "m")
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer)) as client.http:
        with pytest.raises(EngineBroke, match="/v1/models"):
            await client.context_length()
