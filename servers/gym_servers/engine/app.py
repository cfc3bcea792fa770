"""The scripted engine's HTTP surface: the part of vLLM's `/v1/completions` that the model server uses.

Streams tokens at a settable rate and journals each before it is sent.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from gym_servers.engine.script import logprob, next_text
from gym_servers.http.apps import base_app
from gym_servers.journal.client import Journal
from gym_servers.protocol.digests import digest_of

CHUNKS_PER_SECOND = 5.0  # tokens are sent in groups, so that the rate costs no more events than a reader can take


class CompletionRequest(BaseModel):
    model: str = "scripted"
    prompt: list[int]
    max_tokens: int = 4096
    temperature: float = 0.0
    stream: bool = True
    return_token_ids: bool = True
    logprobs: int | None = 0


def create_app(tokens_per_second: float, journal: Journal) -> FastAPI:
    app = base_app("scripted-engine", lambda: True)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> StreamingResponse:
        request_id = request.headers.get("x-request-id", "-")
        return StreamingResponse(
            _stream(body, request_id, tokens_per_second, journal), media_type="text/event-stream"
        )

    return app


async def _stream(
    body: CompletionRequest, request_id: str, tokens_per_second: float, journal: Journal
) -> AsyncIterator[str]:
    ids = list(next_text(json.loads(bytes(body.prompt))).encode())
    finish = "stop"
    if len(ids) > body.max_tokens:
        ids, finish = ids[: body.max_tokens], "length"
    group = max(1, round(tokens_per_second / CHUNKS_PER_SECOND))
    prompt = digest_of(body.prompt)
    loop = asyncio.get_running_loop()
    due = loop.time()
    for start in range(0, len(ids), group):
        part = ids[start : start + group]
        due += len(part) / tokens_per_second
        await asyncio.sleep(max(0.0, due - loop.time()))
        last = start + group >= len(ids)
        entry: dict[str, Any] = {
            "kind": "tokens",
            "request": request_id,
            "prompt": prompt,
            "from": start,
            "count": len(part),
            "last": last,
        }
        await journal.append([entry])
        choice = {
            "index": 0,
            "token_ids": part,
            "text": bytes(part).decode(errors="replace"),
            "logprobs": {"token_logprobs": [logprob(token) for token in part]},
            "finish_reason": finish if last else None,
        }
        yield f"data: {json.dumps({'choices': [choice]})}\n\n"
    yield "data: [DONE]\n\n"
