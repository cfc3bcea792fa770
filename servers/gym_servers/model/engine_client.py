"""Streams one generation from an OpenAI-compatible engine: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from gym_servers.http.peers import CONNECT_RETRY_SECONDS
from gym_servers.protocol.errors import ProtocolError

READ_SECONDS = 60.0  # without a byte from the engine: then it is asked again
TELL_SECONDS = 30.0  # how long it is away before people are told


@dataclass(frozen=True)
class Delta:
    """Tokens that arrived together; `finish_reason` is set on the last."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None


class EngineClient:
    """`/v1/completions` of an engine at `base_url`. `tell` gets what keeps the engine from answering, empty once it
    answers again."""

    def __init__(self, base_url: str, model: str, tell: Callable[[str], None] = lambda problem: None) -> None:
        self._url, self._model = base_url.rstrip("/") + "/v1/completions", model
        self._tell = tell
        self._away_since: float | None = None
        self._client = httpx.AsyncClient(
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=128),
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self._client.aclose()

    async def generate(
        self, prompt: Sequence[int], *, max_tokens: int, temperature: float, request_id: str
    ) -> AsyncIterator[Delta]:
        """Deltas until the generation ends. An engine that cannot be reached is tried again until the first
        delta; after that a broken stream raises ProtocolError, for the call to be issued again.

        It is waited for without a bound of its own: a call that failed would fail a rollout that can be continued,
        and what bounds the work is the episode's limit."""
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "return_token_ids": True,
            "logprobs": 0,
        }
        started, read_seconds = False, READ_SECONDS
        while True:
            try:
                async for delta in self._stream(body, request_id, read_seconds):
                    started = True
                    self._answered()
                    yield delta
                return
            except httpx.TransportError as error:
                if started:
                    raise ProtocolError("checkpoint_error", "the engine broke off a generation") from error
                if isinstance(error, httpx.ReadTimeout):
                    read_seconds *= (
                        2  # it is there and slow: asked again in the same way it would never get to answer
                    )
                self._failed(error)
                await asyncio.sleep(CONNECT_RETRY_SECONDS)

    def _answered(self) -> None:
        if self._away_since is not None:
            self._away_since = None
            self._tell("")

    def _failed(self, error: httpx.TransportError) -> None:
        now = asyncio.get_running_loop().time()
        if self._away_since is None:
            self._away_since = now
        away = now - self._away_since
        if away >= TELL_SECONDS:
            self._tell(f"the engine has not answered for {away:.0f} s: {type(error).__name__}")

    async def _stream(self, body: dict[str, Any], request_id: str, read_seconds: float) -> AsyncIterator[Delta]:
        async with self._client.stream(
            "POST",
            self._url,
            json=body,
            headers={"x-request-id": request_id},
            timeout=httpx.Timeout(read_seconds, connect=5.0),
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
