"""What was answered already: kept for callers whose reply was lost, so that a repeat never runs anything twice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

REMEMBERED_RESULTS = 256  # results kept; older ones are refused, never run again


class Answered:
    """Results by episode, bound to the request's digest. Attempts stay known until their rollout is forgotten."""

    def __init__(self, bound: int = REMEMBERED_RESULTS) -> None:
        self._bound = bound
        self._attempts: dict[str, int] = {}  # rollout -> highest attempt that has ended
        self._results: OrderedDict[Episode, tuple[str, Any]] = OrderedDict()
        self._kept: dict[str, set[Episode]] = {}  # rollout -> its episodes with a result

    def __len__(self) -> int:
        return len(self._results)

    def remember(self, episode: Episode, digest: str, result: Any) -> None:
        self.ended(episode)
        self._results[episode] = (digest, result)
        self._kept.setdefault(episode.rollout_id, set()).add(episode)
        while len(self._results) > self._bound:
            self._remove(next(iter(self._results)))

    def ended(self, episode: Episode) -> None:
        """The attempt is used up, without a result to give again."""
        self._attempts[episode.rollout_id] = max(episode.attempt, self._attempts.get(episode.rollout_id, -1))

    def known(self, episode: Episode, digest: str) -> tuple[Any] | None:
        """The result of a repeat, None for work to be done. Raises ProtocolError for another request, and for an
        attempt whose result is not kept."""
        if (kept := self._results.get(episode)) is not None:
            same_request(episode, digest, kept[0])
            return (kept[1],)
        if episode.attempt <= self._attempts.get(episode.rollout_id, -1):
            raise ProtocolError("stale_attempt", f"{episode.key} has ended already; use the next attempt")
        return None

    def last(self, rollout_id: str) -> tuple[int, bool] | None:
        """The highest attempt of a rollout that has ended, and whether its result is kept; None where none has."""
        attempt = self._attempts.get(rollout_id)
        return None if attempt is None else (attempt, Episode(rollout_id, attempt) in self._results)

    def rollouts(self) -> Collection[str]:
        """Those with a result that is kept."""
        return self._kept.keys()

    def __iter__(self) -> Iterator[tuple[Episode, str, Any]]:
        """Episode, digest and result of each."""
        return iter([(episode, digest, result) for episode, (digest, result) in self._results.items()])

    def drop(self, episode: Episode) -> None:
        """A retired episode and its rollout's earlier attempts leave no receipt."""
        for kept in list(self._kept.get(episode.rollout_id, ())):
            if kept.attempt <= episode.attempt:
                self._remove(kept)

    def forget(self, rollout_ids: Collection[str]) -> None:
        for rollout in rollout_ids:
            self._attempts.pop(rollout, None)
            for kept in list(self._kept.get(rollout, ())):
                self._remove(kept)

    def clear(self) -> None:
        for known in (self._attempts, self._results, self._kept):
            known.clear()

    def _remove(self, episode: Episode) -> None:
        del self._results[episode]
        kept = self._kept[episode.rollout_id]
        kept.discard(episode)
        if not kept:
            del self._kept[episode.rollout_id]


def same_request(episode: Episode, digest: str, known: str) -> None:
    """Raise `checkpoint_conflict` where an episode's name comes with another request than before."""
    if digest != known:
        raise ProtocolError("checkpoint_conflict", f"{episode.key} is known here with another task")
