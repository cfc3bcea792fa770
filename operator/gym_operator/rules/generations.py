"""What a stack's policy servers say of their generations, added up over all their processes.

A server counts since its process began, and its status says the sum. Only what it adds while it is listened to counts
here: what it had said before this operator first heard it was counted by the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from gym_servers.capture.reasons import BY_REASON, Reason, What, of_reason
from gym_servers.protocol.messages import Status

MOST: Final = 2**53
"""No server counts so far; what one says is a number of its image's choice, and has to stay one for Prometheus."""


class Series(NamedTuple):
    """What is counted, and for which reason where it has some."""

    what: What
    reason: Reason | None = None


class Generations:
    """One stack's. `totals` never fall, and are empty until a server was heard."""

    def __init__(self) -> None:
        self.totals: Counter[Series] = Counter()
        self._heard: dict[tuple[int, str], tuple[str, Mapping[Series, int]]] = {}

    def hear(self, cell: int, server: str, status: Status) -> None:
        """A server of a cell says this now; one that is no policy server counts nothing."""
        if status.kind != "model":
            return
        said, known = counts_of(status.generations), self._heard.get((cell, server))
        before = known[1] if known is not None and known[0] == status.session else said
        highest = {series: max(count, before[series]) for series, count in said.items()}
        self._heard[cell, server] = (status.session, highest)
        self.totals.update({series: count - before[series] for series, count in highest.items()})


def counts_of(said: Mapping[str, int]) -> dict[Series, int]:
    """The counts of a status, each call once: by its reason where it has one. Always the same series, whatever a
    server says: of a word that is not known there is none, and a reason that is not known is another one."""
    counts: dict[Series, int] = {}
    for what in What:
        total = _count(said, what)
        if what not in BY_REASON:
            counts[Series(what)] = total
            continue
        known = {reason: _count(said, of_reason(what, reason)) for reason in Reason if reason is not Reason.OTHER}
        counts.update({Series(what, reason): count for reason, count in known.items()})
        counts[Series(what, Reason.OTHER)] = max(0, total - sum(known.values()))
    return counts


def _count(said: Mapping[str, int], word: str) -> int:
    return min(max(said.get(word, 0), 0), MOST)
