"""Streams one generation from an OpenAI-compatible engine: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from gym_servers.http.peers import CONNECT_RETRY_SECONDS
from gym_servers.protocol.errors import ProtocolError


@dataclass(frozen=True)
class Delta:
    """Tokens that arrived together; `finish_reason` is set on the last."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None


class EngineClient:
    """`/v1/completions` of an engine at `base_url`."""

    def __init__(self, base_url: str, model: str) -> None:
        self._url, self._model = base_url.rstrip("/") + "/v1/completions", model
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(60.0, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=128),
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def generate(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float, request_id: str
    ) -> AsyncIterator[Delta]:
        """Deltas until the generation ends. An engine that cannot be reached is tried again until the first
        delta; after that a broken stream raises ProtocolError, for the call to be issued again."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "return_token_ids": True,
            "logprobs": 0,
        }
        started = False
        while True:
            try:
                async for delta in self._stream(body, request_id):
                    started = True
                    yield delta
                return
            except httpx.TransportError as error:
                if started:
                    raise ProtocolError("checkpoint_error", "the engine broke off a generation") from error
                await asyncio.sleep(CONNECT_RETRY_SECONDS)

    async def _stream(self, body: dict[str, Any], request_id: str) -> AsyncIterator[Delta]:
        async with self._client.stream(
            "POST", self._url, json=body, headers={"x-request-id": request_id}
        ) as response:
            if not response.is_success:
                raise ProtocolError("checkpoint_error", f"the engine answered {response.status_code}")
            async for line in response.aiter_lines():
                payload = line.removeprefix("data: ")
                if payload == line or payload == "[DONE]":
                    continue
                choice = json.loads(payload)["choices"][0]
                yield Delta(
                    choice.get("token_ids") or [],
                    (choice.get("logprobs") or {}).get("token_logprobs") or [],
                    choice.get("finish_reason"),
                )
