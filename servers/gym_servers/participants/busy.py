"""Work in progress that a checkpoint waits for, and that a retire of its episode waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gym_servers.participants.gate import Gate
from gym_servers.protocol.identity import Episode, InvalidIdentity, parse_key
from gym_servers.protocol.messages import Blocker


class Busy:
    """What is being done right now: an id - a capture key, or a session's - and the step it is in.

    Kept by rollout, so that a retire looks at no other rollout's work."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._entries: dict[str, dict[object, tuple[str, str, float]]] = {}

    def __len__(self) -> int:
        return sum(len(entries) for entries in self._entries.values())

    @contextmanager
    def working(self, key: str, where: str) -> Iterator[None]:
        """Marks the block as work in progress."""
        entry, rollout = object(), _rollout(key)
        self._entries.setdefault(rollout, {})[entry] = (key, where, self._gate.clock())
        try:
            yield
        finally:
            entries = self._entries[rollout]
            del entries[entry]
            if not entries:
                del self._entries[rollout]
            self._gate.touch()

    def blockers(self, without: frozenset[str]) -> list[Blocker]:
        now = self._gate.clock()
        return [
            Blocker(id=key, where=where, age_seconds=round(now - since, 3))
            for entries in self._entries.values()
            for key, where, since in entries.values()
            if key not in without
        ]

    def keys(self) -> set[str]:
        return {key for entries in self._entries.values() for key, _, _ in entries.values()}

    async def wait_done(self, attempts: Mapping[str, int]) -> None:
        """Until nothing is in progress for these rollouts at or below their attempts."""
        await self._gate.wait_until(
            lambda: (
                not any(
                    _covers(attempts, key)
                    for rollout in attempts
                    for key, _, _ in self._entries.get(rollout, {}).values()
                )
            )
        )


def _rollout(key: str) -> str:
    try:
        return parse_key(key).rollout_id
    except InvalidIdentity:
        return key  # a session without an episode


def _covers(attempts: Mapping[str, int], key: str) -> bool:
    try:
        episode: Episode = parse_key(key)
    except InvalidIdentity:
        return False
    return episode.attempt <= attempts.get(episode.rollout_id, -1)
