"""Generation cuts: what calls in progress have generated when a checkpoint closes admission, frozen.

A call that is restored goes on behind its prefix. Where it could not do so faithfully nothing is kept and the call is
generated anew; the reason goes along, so that it can be counted by whoever generates it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from gym_servers.capture.arrays import int32
from gym_servers.capture.ledger import Prefix
from gym_servers.capture.reasons import Reason, What, counted
from gym_servers.capture.tokens import Frozen, Span, Tokens, joined

OF_EVERY_CUT: Final = (What.CUT_KEPT, What.CUT_SKIPPED, What.CUT_FAILED, What.CUT_EMPTY, What.CUT_TOKENS)
"""What the report of a cut says also where it is 0."""


class InFlight(Protocol):
    """A call in progress. `budget`: tokens it may generate in all; `unfaithful`: why a prefix of it cannot be
    continued, empty where it can; `prompt` is None until it is known."""

    @property
    def key(self) -> str: ...
    @property
    def position(self) -> str: ...
    @property
    def digest(self) -> str: ...
    @property
    def parent_chain(self) -> str: ...
    @property
    def prompt(self) -> array[int] | None: ...
    @property
    def tokens(self) -> Tokens: ...
    @property
    def budget(self) -> int: ...
    @property
    def unfaithful(self) -> str: ...


@dataclass(frozen=True)
class Standing:
    """A call as it stood at one moment: its tokens grow no more."""

    key: str
    position: str
    digest: str
    parent_chain: str
    prompt: array[int] | None
    tokens: Tokens
    budget: int
    unfaithful: str


def stand(call: InFlight) -> Standing:
    had = call.tokens
    tokens = Tokens(had.ids[:], had.logprobs[:], had.spans, had.finish)
    return Standing(
        call.key,
        call.position,
        call.digest,
        call.parent_chain,
        call.prompt,
        tokens,
        call.budget,
        call.unfaithful,
    )


def beyond(call: Standing, start: int, engine: Frozen) -> Standing | None:
    """The call with all that the engine has of the stream that began behind `start` tokens; None where that is not
    what had arrived and more."""
    had = call.tokens
    spans: tuple[Span, ...] = ()
    for span in had.spans:
        if span.start < start:
            spans = joined(spans, span.version, span.start, min(span.end, start))
    for span in engine.spans:
        spans = joined(spans, span.version, start + span.start, start + span.end)
    whole = Tokens(had.ids[:start] + engine.ids, had.logprobs[:start] + engine.logprobs, spans, engine.finish)
    return replace(call, tokens=whole) if whole.ids[: len(had)] == had.ids else None


@dataclass(frozen=True)
class Cut:
    """The prefixes of one moment, by capture key, and what became of each call: kept, skipped, failed, or empty where
    it had not generated anything."""

    prefixes: Mapping[str, list[Prefix]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)


def freeze(calls: Iterable[InFlight]) -> Cut:
    """Freeze every call. None is left out, and none can stop the others from being frozen."""
    prefixes: dict[str, list[Prefix]] = {}
    counts = Counter[str](dict.fromkeys(OF_EVERY_CUT, 0))
    for call in calls:
        prefix = prefix_of(call)
        if prefix is None:
            counts[What.CUT_EMPTY] += 1
            continue
        if not prefix.skipped:
            counts.update({What.CUT_KEPT: 1, What.CUT_TOKENS: len(prefix.tokens.ids)})
        elif prefix.skipped == Reason.FAILED:
            counts[What.CUT_FAILED] += 1
        else:
            counts.update(counted(What.CUT_SKIPPED, prefix.skipped))
        prefixes.setdefault(call.key, []).append(prefix)
    return Cut(prefixes, counts)


def prefix_of(call: InFlight) -> Prefix | None:
    """What is kept of a call; None where it has nothing to lose."""
    if call.prompt is None or (not call.tokens and call.tokens.finish is None):
        return None
    why = call.unfaithful
    if not why:
        try:
            tokens = call.tokens.frozen()
            left = max(0, call.budget - len(tokens.ids))
            return Prefix(call.position, call.digest, call.parent_chain, call.prompt, tokens, left)
        except ValueError:
            why = Reason.FAILED
    nothing = Frozen(call.tokens.ids[:0], call.tokens.logprobs[:0])
    return Prefix(call.position, call.digest, call.parent_chain, int32(), nothing, call.budget, why)
