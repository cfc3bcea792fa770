"""One episode's model calls: request digest, token ids, log-probabilities and the reply that was given.

A record is one line of JSON followed by raw little-endian arrays (token ids int32, log-probabilities float32),
because a long rollout has hundreds of thousands of them. Ids and log-probabilities always have equal length.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_servers.protocol.digests import canonical
from gym_servers.protocol.errors import ProtocolError

FORMAT = 1


def int32(values: Sequence[int]) -> array[int]:
    return array("i", values)


def float32(values: Sequence[float]) -> array[float]:
    return array("f", values)


@dataclass(frozen=True)
class CallRecord:
    """One delivered call. `position` is its place in the episode ("<activation>.<n>"), empty where the caller
    named none; `response` is the reply's body. Raises ValueError where the arrays' lengths differ."""

    position: str
    digest: str
    prompt_ids: array[int]
    ids: array[int]
    logprobs: array[float]
    weight_version: str
    response: Mapping[str, Any]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.logprobs):
            raise ValueError(f"{len(self.ids)} token ids but {len(self.logprobs)} log-probabilities")


@dataclass
class Ledger:
    """The calls of one episode in the order of their delivery."""

    calls: list[CallRecord] = field(default_factory=list)

    def at(self, position: str) -> CallRecord | None:
        """The call that was delivered at a position, None for one without a position."""
        return next((c for c in self.calls if c.position == position), None) if position else None


def encode(key: str, ledger: Ledger) -> bytes:
    """A ledger as a record."""
    calls = [
        {
            "position": call.position,
            "digest": call.digest,
            "prompt": len(call.prompt_ids),
            "generated": len(call.ids),
            "weight_version": call.weight_version,
            "response": call.response,
        }
        for call in ledger.calls
    ]
    arrays = b"".join(_bytes(part) for call in ledger.calls for part in (call.prompt_ids, call.ids, call.logprobs))
    return canonical({"format": FORMAT, "key": key, "calls": calls}) + b"\n" + arrays


def decode(name: str, data: bytes) -> tuple[str, Ledger]:
    """The capture key and ledger of a record. Raises `invalid_checkpoint_state`."""
    head, _, arrays = data.partition(b"\n")
    try:
        record = json.loads(head)
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']} is not {FORMAT}")
        calls, at = [], 0
        for call in record["calls"]:
            prompt, generated = int(call["prompt"]), int(call["generated"])
            if at + 4 * (prompt + 2 * generated) > len(arrays):
                raise ValueError("token arrays are cut short")
            prompt_ids, at = _ints(arrays, at, prompt)
            ids, at = _ints(arrays, at, generated)
            logprobs, at = _floats(arrays, at, generated)
            calls.append(
                CallRecord(
                    call["position"],
                    call["digest"],
                    prompt_ids,
                    ids,
                    logprobs,
                    call["weight_version"],
                    call["response"],
                )
            )
        if at != len(arrays):
            raise ValueError("bytes are left over")
        return str(record["key"]), Ledger(calls)
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError("invalid_checkpoint_state", f"record {name}: {error}") from error


def _bytes(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values = array(values.typecode, values)
        values.byteswap()
    return values.tobytes()


def _ints(data: bytes, at: int, count: int) -> tuple[array[int], int]:
    return _array(array("i"), data, at, count)


def _floats(data: bytes, at: int, count: int) -> tuple[array[float], int]:
    return _array(array("f"), data, at, count)


def _array(values: array[Any], data: bytes, at: int, count: int) -> tuple[array[Any], int]:
    end = at + 4 * count
    values.frombytes(data[at:end])
    if sys.byteorder == "big":
        values.byteswap()
    return values, end
