"""The scripted engine's HTTP surface: the part of vLLM's API that the model server uses.

Streams tokens at a settable rate and journals each before it is sent. A prompt that goes on behind its conversation
is one whose generation was interrupted: it is continued. Whoever goes away is not generated for any longer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

from gym_servers.engine.script import logprob, next_text
from gym_servers.http.apps import base_app
from gym_servers.journal.client import Journal
from gym_servers.protocol.digests import digest_of

CHUNKS_PER_SECOND = 5.0  # tokens are sent in groups, so that the rate costs no more events than a reader can take
END_OF_PROMPT = b"\n"


class CompletionRequest(BaseModel):
    model: str = "scripted"
    prompt: list[int]
    max_tokens: int = 4096
    temperature: float = 0.0
    stream: bool = True
    return_token_ids: bool = True
    logprobs: int | None = 0


class WeightVersion(BaseModel):
    new_version: str


class _Weights:
    version = ""


def create_app(tokens_per_second: float, journal: Journal) -> FastAPI:
    app = base_app("scripted-engine", lambda: True)
    weights = _Weights()

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        try:
            conversation, mark, prefix = bytes(body.prompt).partition(END_OF_PROMPT)
            text = next_text(json.loads(conversation)).encode()
        except (ValueError, AttributeError, TypeError) as error:
            return _refused(f"the prompt is no conversation: {type(error).__name__}")
        if not mark or not text.startswith(prefix):
            return _refused("the prompt goes on with what this policy does not say")
        prompt = digest_of(list(conversation + mark))
        request_id = request.headers.get("x-request-id", "-")
        stream = _stream(text, len(prefix), body.max_tokens, prompt, request_id, tokens_per_second, journal, weights)
        return StreamingResponse(stream, media_type="text/event-stream")

    @app.post("/update_weight_version")
    async def update_weight_version(body: WeightVersion) -> dict[str, Any]:
        weights.version = body.new_version
        return {"success": True, "new_version": body.new_version}

    return app


def _refused(reason: str) -> JSONResponse:
    return JSONResponse({"error": {"message": reason, "type": "BadRequestError", "code": 400}}, 400)


async def _stream(
    text: bytes,
    start: int,
    max_tokens: int,
    prompt: str,
    request_id: str,
    tokens_per_second: float,
    journal: Journal,
    weights: _Weights,
) -> AsyncIterator[str]:
    """Tokens of `text` from `start` on. Journal entries count from the generation's first token, whoever asked for it
    first."""
    end = min(len(text), start + max_tokens)
    finish = "stop" if end == len(text) else "length"
    group = max(1, round(tokens_per_second / CHUNKS_PER_SECOND))
    loop = asyncio.get_running_loop()
    due = loop.time()
    for at in range(start, max(end, start + 1), group):
        part = list(text[at : min(at + group, end)])
        due += len(part) / tokens_per_second
        await asyncio.sleep(max(0.0, due - loop.time()))
        last = at + group >= end
        entry: dict[str, Any] = {
            "kind": "tokens",
            "request": request_id,
            "prompt": prompt,
            "from": at,
            "count": len(part),
            "last": last,
        }
        await journal.append([entry])
        choice: dict[str, Any] = {
            "index": 0,
            "token_ids": part,
            "text": bytes(part).decode(errors="replace"),
            "logprobs": {"token_logprobs": [logprob(token) for token in part]},
            "finish_reason": finish if last else None,
        }
        if weights.version:
            choice["weight_version"] = weights.version
        yield f"data: {json.dumps({'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"
