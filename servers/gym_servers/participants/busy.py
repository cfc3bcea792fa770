"""Work in progress that a checkpoint waits for, and that a retire of its episode waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from gym_servers.participants.gate import Gate
from gym_servers.protocol.identity import Episode, InvalidIdentity, parse_key
from gym_servers.protocol.messages import Blocker


class Busy:
    """What is being done right now: an id - a capture key, or a session's - and the step it is in."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._entries: dict[object, tuple[str, str, float]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def working(self, key: str, where: str) -> Iterator[None]:
        """Marks the block as work in progress."""
        entry = object()
        self._entries[entry] = (key, where, self._gate.clock())
        try:
            yield
        finally:
            del self._entries[entry]
            self._gate.touch()

    def blockers(self, without: frozenset[str]) -> list[Blocker]:
        now = self._gate.clock()
        return [
            Blocker(id=key, where=where, age_seconds=round(now - since, 3))
            for key, where, since in self._entries.values()
            if key not in without
        ]

    async def wait_done(self, attempts: Mapping[str, int]) -> None:
        """Until nothing is in progress for these rollouts at or below their attempts."""
        await self._gate.wait_until(lambda: not any(_covers(attempts, key) for key, _, _ in self._entries.values()))


def _covers(attempts: Mapping[str, int], key: str) -> bool:
    try:
        episode: Episode = parse_key(key)
    except InvalidIdentity:
        return False  # a session without an episode
    return episode.attempt <= attempts.get(episode.rollout_id, -1)
