"""Which call a conversation goes on from: the latest of its turns that is certainly a reply we gave.

A turn is known by what every client sends back. Reasoning is no part of that: some clients leave all of it out, some
that of earlier turns. What comes back of it has to be the same. Where replies differ in reasoning alone, and it does
not come back, any of them may be meant. The wrong one would show the model, and a trainer, a history that was never
sampled: so none is taken, and the conversation goes on from an earlier turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar


class Reply(Protocol):
    """A delivered call: its chain and its parent's. `thoughts`: digests of the reasoning of each message behind its
    parent's reply, its own reply's last, each empty where there was none; without any digest they are not known."""

    @property
    def chain(self) -> str: ...
    @property
    def parent(self) -> str: ...
    @property
    def thoughts(self) -> tuple[str, ...]: ...


R = TypeVar("R", bound=Reply)


def parent_of(replies: Mapping[str, Sequence[R]], turns: Sequence[str], thoughts: Sequence[str]) -> R | None:
    """The parent among `replies`, which are by turn and in their order. `turns` and `thoughts` have one of each for a
    message of the conversation; thoughts may be left out altogether."""
    found: R | None = None
    meant: dict[str, R] = {}  # by chain, whatever may be
    others: set[str] = set()  # chains that what came back contradicts
    unshown: set[str] = set()  # chains whose model was not shown what came back
    for count, turn in enumerate(turns, 1):
        here: list[R] = []
        for reply in replies.get(turn, ()):
            came_back = thoughts[count - len(reply.thoughts) : count]
            if reply.parent in others or _is_another(came_back, reply.thoughts):
                others.add(reply.chain)
                continue
            if reply.parent in unshown or _lacks(came_back, reply.thoughts):
                unshown.add(reply.chain)
            meant[reply.chain] = reply
            here.append(reply)
        shown = all(reply.chain not in unshown for reply in here)
        if shown and (len(here) == 1 or len({_all_thoughts(reply, meant) for reply in here}) == 1):
            found = here[-1]
    return found


def _is_another(came_back: Sequence[str], known: Sequence[str]) -> bool:
    """Whether some reasoning came back that this reply, or a message before it, did not have. A message that a caller
    had sent without any may have had some."""
    pairs = enumerate(zip(came_back, known, strict=False), 1)
    return any(given and given != kept and (kept or number == len(known)) for number, (given, kept) in pairs)


def _lacks(came_back: Sequence[str], known: Sequence[str]) -> bool:
    """Whether reasoning came back with a message that had been sent without."""
    return any(given and not kept for given, kept in zip(came_back, known, strict=False))


def _all_thoughts(reply: R, replies: Mapping[str, R]) -> tuple[str, ...]:
    """From the conversation's first message on."""
    parts = [reply.thoughts]
    while (parent := replies.get(reply.parent)) is not None:
        reply = parent
        parts.append(reply.thoughts)
    return tuple(thought for part in reversed(parts) for thought in part)
