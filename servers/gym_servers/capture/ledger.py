"""One episode's model calls: what was asked, the tokens, and the reply that was given.

Calls form chains: each names its parent, the call whose reply its conversation goes on from. `chain` is a digest over
the parent's chain, the request and the tokens, so that two calls with one chain have one history.

A record is one line of JSON followed by raw arrays. A child's prompt usually begins with all tokens of its parent;
then only what follows is written, or a long rollout's record would grow with the square of its turns.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_servers.capture.arrays import ArrayReader, float32, int32, to_bytes
from gym_servers.capture.tokens import Frozen, Span, check
from gym_servers.protocol.digests import canonical, digest_of, sha256
from gym_servers.protocol.errors import ProtocolError

FORMAT = 2
READABLE = (1, 2)


@dataclass(frozen=True)
class CallRecord:
    """One delivered call.

    `position`: its place in the episode ("<activation>.<n>"), empty where the caller named none. `digest`: of the
    request. `parent`: chain of the call it goes on from, empty for a first one. `turn`: digest of the conversation
    up to and with its reply, by which a child is known. `response`: the reply's body. `thoughts`: digests of the
    reasoning of each message behind the parent's reply, its own reply's last; empty where they are not known. Raises
    ValueError where the arrays' lengths differ.
    """

    position: str
    digest: str
    prompt_ids: array[int]
    ids: array[int]
    logprobs: array[float]
    spans: tuple[Span, ...]
    response: Mapping[str, Any]
    parent: str = ""
    turn: str = ""
    chain: str = ""
    thoughts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check(self.ids, self.logprobs, self.spans)
        if not self.chain:
            tokens = sha256(to_bytes(self.prompt_ids) + to_bytes(self.ids))
            object.__setattr__(self, "chain", digest_of([self.parent, self.digest, tokens]))


@dataclass(frozen=True)
class Prefix:
    """What a call had generated when a checkpoint froze it. `remaining`: tokens it may still generate. `skipped`: why
    nothing of it is kept, empty where it goes on behind `tokens`."""

    position: str
    digest: str
    parent: str
    prompt_ids: array[int]
    tokens: Frozen
    remaining: int
    skipped: str = ""

    @property
    def order(self) -> tuple[str, str, str, bytes]:
        """Equal sets of prefixes make equal records."""
        return self.position, self.digest, self.parent, to_bytes(self.tokens.ids)


@dataclass
class Ledger:
    """The calls of one episode in the order of their delivery, and prefixes of calls that had not ended. `lost`: why
    they are not here, and nothing can be continued with it; empty where they are."""

    calls: list[CallRecord] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    lost: str = ""


def encode(key: str, ledger: Ledger) -> bytes:
    """A ledger as a record."""
    known: dict[str, CallRecord] = {}
    calls, arrays = [], list[bytes]()
    for call in ledger.calls:
        shared = _shared(known.get(call.parent), call.prompt_ids)
        known[call.chain] = call
        calls.append(
            {
                "position": call.position,
                "digest": call.digest,
                "parent": call.parent,
                "turn": call.turn,
                "chain": call.chain,
                "thoughts": call.thoughts,
                "shared": shared,
                "prompt": len(call.prompt_ids) - shared,
                "generated": len(call.ids),
                "spans": _spans(call.spans),
                "response": call.response,
            }
        )
        arrays += [to_bytes(call.prompt_ids[shared:]), to_bytes(call.ids), to_bytes(call.logprobs)]
    prefixes = []
    for prefix in sorted(ledger.prefixes, key=lambda prefix: prefix.order):
        shared = _shared(known.get(prefix.parent), prefix.prompt_ids)
        prefixes.append(
            {
                "position": prefix.position,
                "digest": prefix.digest,
                "parent": prefix.parent,
                "shared": shared,
                "prompt": len(prefix.prompt_ids) - shared,
                "generated": len(prefix.tokens.ids),
                "spans": _spans(prefix.tokens.spans),
                "finish": prefix.tokens.finish,
                "remaining": prefix.remaining,
                "skipped": prefix.skipped,
            }
        )
        tokens = prefix.tokens
        arrays += [to_bytes(prefix.prompt_ids[shared:]), to_bytes(tokens.ids), to_bytes(tokens.logprobs)]
    head = {"format": FORMAT, "key": key, "calls": calls, "prefixes": prefixes}
    if ledger.lost:
        head["lost"] = ledger.lost
    return canonical(head) + b"\n" + b"".join(arrays)


def decode(name: str, data: bytes) -> tuple[str, Ledger]:
    """The capture key and ledger of a record. Raises `invalid_checkpoint_state`."""
    head, _, rest = data.partition(b"\n")
    try:
        record = json.loads(head)
        if record["format"] not in READABLE:
            raise ValueError(f"format {record['format']} is none of {READABLE}")
        arrays, ledger = ArrayReader(rest), Ledger()
        known: dict[str, CallRecord] = {}
        for entry in record["calls"]:
            call = _call(entry, arrays, known)
            known[call.chain] = call
            ledger.calls.append(call)
        ledger.prefixes = [_prefix(entry, arrays, known) for entry in record.get("prefixes", ())]
        arrays.end()
        ledger.lost = str(record.get("lost", ""))
        return str(record["key"]), ledger
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError("invalid_checkpoint_state", f"record {name}: {error}") from error


def _call(entry: Mapping[str, Any], arrays: ArrayReader, known: Mapping[str, CallRecord]) -> CallRecord:
    generated = int(entry["generated"])
    old = "weight_version" in entry  # format 1: one version for all of a call, and no chain
    spans = _old_spans(entry, generated) if old else _read_spans(entry["spans"])
    return CallRecord(
        entry["position"],
        entry["digest"],
        _prompt(entry, arrays, known),
        arrays.ints(generated),
        arrays.floats(generated),
        spans,
        entry["response"],
        entry.get("parent", ""),
        entry.get("turn", ""),
        entry.get("chain", ""),
        tuple(map(str, entry.get("thoughts", ()))),
    )


def _prefix(entry: Mapping[str, Any], arrays: ArrayReader, known: Mapping[str, CallRecord]) -> Prefix:
    generated = int(entry["generated"])
    prompt = _prompt(entry, arrays, known)
    ids, logprobs = arrays.ints(generated), arrays.floats(generated)
    tokens = Frozen(ids, logprobs, _read_spans(entry["spans"]), entry["finish"])
    left, why = int(entry["remaining"]), str(entry["skipped"])
    return Prefix(entry["position"], entry["digest"], entry["parent"], prompt, tokens, left, why)


def _prompt(entry: Mapping[str, Any], arrays: ArrayReader, known: Mapping[str, CallRecord]) -> array[int]:
    own, shared = arrays.ints(int(entry["prompt"])), int(entry.get("shared", 0))
    if not shared:
        return own
    parent = known[entry["parent"]]
    whole = parent.prompt_ids + parent.ids
    if shared != len(whole):
        raise ValueError(f"a prompt goes on from {shared} tokens, its parent has {len(whole)}")
    return whole + own


def _shared(parent: CallRecord | None, prompt: array[int]) -> int:
    """How many tokens of a prompt need not be written: all of its parent's, or none."""
    if parent is None:
        return 0
    whole = parent.prompt_ids + parent.ids
    return len(whole) if prompt[: len(whole)] == whole else 0


def _spans(spans: Iterable[Span]) -> list[list[Any]]:
    return [[span.version, span.start, span.end] for span in spans]


def _read_spans(entries: Sequence[Sequence[Any]]) -> tuple[Span, ...]:
    return tuple(Span(str(version), int(start), int(end)) for version, start, end in entries)


def _old_spans(entry: Mapping[str, Any], generated: int) -> tuple[Span, ...]:
    return (Span(str(entry["weight_version"]), 0, generated),) if generated else ()


__all__ = ["CallRecord", "Ledger", "Prefix", "decode", "encode", "float32", "int32"]
