"""Chunks of a streamed completion of vLLM's API: token ids, log-probabilities, weight versions."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gym_servers.capture.arrays import float32, int32
from gym_servers.capture.tokens import Span, Tokens

ABORT = "abort"  # the finish reason of a generation that its engine gave up, such as for new weights


class NoChunk(ValueError):
    """An event of a stream that is no chunk of a completion; the message is its reason, where there is one."""


class Lines:
    """The lines of a stream, whose bytes come in any pieces. A line feed ends a line and nothing else does: what
    other readers of text break it at may stand in a chunk as it is, where a model has said it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that end here. Raises NoChunk."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            return [line.decode().removesuffix("\r") for line in lines]
        except UnicodeDecodeError as error:
            raise NoChunk("the engine sent what is no text") from error


@dataclass(frozen=True)
class Delta:
    """Tokens that arrived together; `finish_reason` is set on the last. `version`: of the weights they were sampled
    with; `versions`: what the engine says of all tokens of this stream, counted from its first. Empty where it does
    not say."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str | None
    version: str = ""
    versions: tuple[Span, ...] = ()


def delta_of(line: str) -> Delta | None:
    """The tokens of one line of a stream, None for a line without any. Raises NoChunk."""
    payload = line.removeprefix("data: ")
    if payload == line or payload == "[DONE]":
        return None
    try:
        chunk = json.loads(payload)
        if "error" in chunk:
            raise NoChunk(f"the engine failed: {words_of(chunk)}")
        if not chunk["choices"]:
            return None
        choice = chunk["choices"][0]
        return Delta(
            choice.get("token_ids") or [],
            (choice.get("logprobs") or {}).get("token_logprobs") or [],
            choice.get("finish_reason"),
            str(choice.get("weight_version") or ""),
            _versions(choice.get("weight_versions") or chunk.get("weight_versions")),
        )
    except NoChunk:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise NoChunk("the engine sent what is no chunk of a completion") from error


_VERSION = ": ng-weight-version "


def version_comment(version: str) -> bytes:
    """A comment inside of a stream: what follows is of this version of the weights."""
    return f"{_VERSION}{json.dumps(version)}\n\n".encode()


def version_of(line: str) -> str | None:
    """The version that a line of a stream tells, None for any other line."""
    told = line.removeprefix(_VERSION)
    if told == line:
        return None
    try:
        version = json.loads(told)
    except ValueError:
        return None
    return version if isinstance(version, str) else None


def add(tokens: Tokens, delta: Delta, start: int) -> None:
    """Put a delta behind `tokens`; its stream began when there were `start`. Raises ValueError where its ids and
    log-probabilities differ in number, or are no such numbers; then none of them is taken."""
    tokens.extend(*_numbers(delta), delta.version)
    if delta.versions:
        tokens.versions(delta.versions, start)
    # An engine that aborts what it has has not come to its end.
    tokens.finish = delta.finish_reason if delta.finish_reason != ABORT else None


def _numbers(delta: Delta) -> tuple[array[int], array[float]]:
    try:
        ids, logprobs = int32(delta.ids), float32(delta.logprobs)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError("token ids or log-probabilities that are no such numbers") from error
    if min(ids, default=0) < 0 or not all(map(math.isfinite, logprobs)):
        raise ValueError("a token id below 0 or a log-probability that is not finite")
    return ids, logprobs


def words_of(body: Any, most: int = 300) -> str:
    """The reason in an engine's error, in any of the forms there are; at most so many characters."""
    error = body.get("error", body) if isinstance(body, dict) else {}
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or "")[:most]


def _versions(given: Any) -> tuple[Span, ...]:
    return tuple(Span(str(one["version"]), int(one["start"]), int(one["end"])) for one in given or ())
