"""Streams generations from an OpenAI-compatible engine: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from gym_servers.capture.chunks import Delta, Lines, NoChunk, delta_of, version_of, words_of
from gym_servers.protocol import headers
from gym_servers.protocol.errors import ProtocolError

READ_SECONDS = 60.0  # without a byte from the engine: then it is asked again
# How engines name their length: "maximum context length is 4096 tokens", "... of 4096", "... (4096)".
_CONTEXT = re.compile(r"context length\D{0,12}?(\d{1,12})", re.ASCII)


class EngineBroke(Exception):
    """The engine cannot be reached, is not able to answer now, or broke off: to be tried again. `slow`: it is there,
    and has not answered in time."""

    def __init__(self, reason: str, *, slow: bool = False) -> None:
        super().__init__(reason)
        self.slow = slow


class NoRoom(ProtocolError):
    """The engine refuses what is longer than its context: prompt and generation together may have `length` tokens."""

    def __init__(self, reason: str, length: int) -> None:
        super().__init__("invalid_request", reason)
        self.length = length


class EngineClient:
    """`/v1/completions` of an engine at `base_url`, which serves `model`. `api_key` where it wants one.
    `says_version`: it tells the version of its weights at `/weight_info`. `headers_of` gives what goes along with
    each stream besides."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str = "",
        *,
        says_version: bool = False,
        headers_of: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        self.base_url, self.model = base_url.rstrip("/"), model
        self._says_version, self._headers_of = says_version, headers_of
        self.http = httpx.AsyncClient(
            timeout=httpx.Timeout(READ_SECONDS, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=128),
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            trust_env=False,
        )

    async def aclose(self) -> None:
        await self.http.aclose()

    async def context_length(self) -> int | None:
        """How many tokens prompt and generation may have together, None where the engine does not say.

        Raises EngineBroke, and `invalid_request` where it does not serve the model."""
        try:
            response = await self.http.get(f"{self.base_url}/v1/models")
            if not response.is_success:
                raise EngineBroke(f"{self.base_url}/v1/models answered {response.status_code}")
            lengths = {str(one["id"]): int(one.get("max_model_len") or 0) for one in response.json()["data"]}
        except (httpx.RequestError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise EngineBroke(f"{type(error).__name__} from {self.base_url}/v1/models") from error
        if self.model not in lengths:
            names = ", ".join(lengths)
            raise ProtocolError("invalid_request", f"the engine does not serve {self.model}; it serves {names}")
        return lengths[self.model] or None

    async def weight_version(self) -> str:
        """The version of the weights that the engine uses now, empty where it does not say."""
        if not self._says_version:
            return ""
        try:
            response = await self.http.get(f"{self.base_url}/weight_info")
            return str(response.json().get("weight_version") or "") if response.is_success else ""
        except (httpx.RequestError, ValueError, AttributeError):
            return ""

    async def stream(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        options: Mapping[str, Any],
        request_id: str,
        ticket: str = "",
        read_seconds: float = READ_SECONDS,
    ) -> AsyncGenerator[Delta, None]:
        """Deltas of one generation until its end. Whoever stops reading stops the engine. `ticket` names this stream
        to what runs beside the engine.

        Raises EngineBroke, and `invalid_request` with the engine's reason for what it refuses: NoRoom where that is
        its length."""
        body = {
            **options,
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "stream": True,
            "return_token_ids": True,
            "logprobs": 0,
        }
        named = {"x-request-id": request_id, **self._headers_of(), **({headers.TICKET: ticket} if ticket else {})}
        version = ""
        try:
            async with self.http.stream(
                "POST",
                f"{self.base_url}/v1/completions",
                json=body,
                headers=named,
                timeout=httpx.Timeout(read_seconds, connect=5.0),
            ) as response:
                if not response.is_success:
                    await response.aread()
                    raise _refused(response)
                lines = Lines()
                async for data in response.aiter_bytes():
                    for line in lines.feed(data):
                        if (told := version_of(line)) is not None:
                            version = told
                        elif (delta := delta_of(line)) is not None:
                            yield delta if delta.version or not version else replace(delta, version=version)
        except httpx.RequestError as error:
            slow = isinstance(error, httpx.ReadTimeout)
            raise EngineBroke(f"{type(error).__name__} from {self.base_url}", slow=slow) from error
        except NoChunk as error:
            raise EngineBroke(str(error)) from error


def _refused(response: httpx.Response) -> Exception:
    if response.status_code >= 500 or response.status_code == httpx.codes.TOO_MANY_REQUESTS:
        return EngineBroke(f"the engine answered {response.status_code}")
    try:
        words = words_of(response.json())
    except ValueError:
        words = ""
    reason = f"the engine answered {response.status_code}: {words or 'no reason given'}"
    named = _CONTEXT.search(words)
    return NoRoom(reason, int(named[1])) if named else ProtocolError("invalid_request", reason)
