"""Generated tokens while they arrive, and how they look when they are frozen in the middle.

Three things belong to each token: its id, its log-probability, and the version of the weights it was sampled with.
They are joined in one place, here, and never differ in number.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from gym_servers.capture.arrays import float32, int32


@dataclass(frozen=True)
class Span:
    """Tokens `start` up to `end` of a generation were sampled with weights `version`; empty where the engine does not
    say."""

    version: str
    start: int
    end: int


def joined(spans: Sequence[Span], version: str, start: int, end: int) -> tuple[Span, ...]:
    """`spans` and one more behind them; neighbours of one version are one span."""
    if start == end:
        return tuple(spans)
    last = spans[-1] if spans else None
    if last is not None and last.version == version and last.end == start:
        return (*spans[:-1], Span(version, last.start, end))
    return (*spans, Span(version, start, end))


def check(ids: Sequence[int], logprobs: Sequence[float], spans: Sequence[Span]) -> None:
    """Raises ValueError where a token lacks its log-probability or its weight version, or has two."""
    if len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} token ids but {len(logprobs)} log-probabilities")
    at = 0
    for span in spans:
        if span.start != at or span.end <= at:
            raise ValueError(f"the weight versions of tokens {at} and after do not follow each other")
        at = span.end
    if at != len(ids):
        raise ValueError(f"{len(ids)} token ids but weight versions for {at}")


@dataclass(frozen=True)
class Frozen:
    """Tokens as they stood at one moment. `finish`: why the generation ended, None where it had not."""

    ids: array[int]
    logprobs: array[float]
    spans: tuple[Span, ...] = ()
    finish: str | None = None

    def __post_init__(self) -> None:
        check(self.ids, self.logprobs, self.spans)


@dataclass
class Tokens:
    """A generation that grows. Begins with what an earlier process had of it."""

    ids: array[int] = field(default_factory=int32)
    logprobs: array[float] = field(default_factory=float32)
    spans: tuple[Span, ...] = ()
    finish: str | None = None

    @classmethod
    def after(cls, prefix: Frozen) -> Tokens:
        """What goes on behind a prefix."""
        return cls(prefix.ids[:], prefix.logprobs[:], prefix.spans, prefix.finish)

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: Sequence[int], logprobs: Sequence[float], version: str) -> None:
        """Tokens that arrived together. Raises ValueError where they do not have a log-probability each."""
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} token ids but {len(logprobs)} log-probabilities")
        start = len(self.ids)
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.spans = joined(self.spans, version, start, len(self.ids))

    def versions(self, spans: Sequence[Span], start: int) -> None:
        """What an engine says of the versions of the tokens from `start` on, once it knows. Raises ValueError."""
        known: tuple[Span, ...] = ()
        for span in self.spans:
            if span.start < start:
                known = joined(known, span.version, span.start, min(span.end, start))
        for span in spans:
            known = joined(known, span.version, start + span.start, start + span.end)
        check(self.ids, self.logprobs, known)
        self.spans = known

    def restart(self) -> None:
        """Drop everything: it is generated anew."""
        self.ids, self.logprobs, self.spans, self.finish = int32(), float32(), (), None

    def frozen(self) -> Frozen:
        return Frozen(self.ids[:], self.logprobs[:], self.spans, self.finish)
