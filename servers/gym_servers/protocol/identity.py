"""How rollouts, attempts and episodes are named.

A rollout is one trajectory that a driver asks for; each try of it has an attempt number that is never used
twice. The capture key is the one-word form of an episode that travels in paths: the rollout's id for attempt 0,
else `<rollout_id>-a<attempt>`. A rollout id may therefore not itself end in `-a<digits>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_ROLLOUT_ID = 200
MAX_ATTEMPT = 10**9
_ROLLOUT_ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{MAX_ROLLOUT_ID - 1}}}")
_ATTEMPT_SUFFIX = re.compile(r"-a([0-9]+)$")


class InvalidIdentity(ValueError):
    """A rollout id, attempt or capture key that cannot name an episode."""


@dataclass(frozen=True, order=True)
class Episode:
    """One attempt of one rollout. Raises InvalidIdentity for names outside the rule above."""

    rollout_id: str
    attempt: int

    def __post_init__(self) -> None:
        if not _ROLLOUT_ID.fullmatch(self.rollout_id) or _ATTEMPT_SUFFIX.search(self.rollout_id):
            raise InvalidIdentity(
                f"rollout id {self.rollout_id[:80]!r}: use letters, digits, '.', '_' and '-', starting with a "
                f"letter or digit, at most {MAX_ROLLOUT_ID} characters, not ending in -a<digits>"
            )
        if not 0 <= self.attempt <= MAX_ATTEMPT:
            raise InvalidIdentity(f"attempts count from 0 and end at {MAX_ATTEMPT}")

    @property
    def key(self) -> str:
        """The capture key: the episode as one word."""
        return self.rollout_id if self.attempt == 0 else f"{self.rollout_id}-a{self.attempt}"

    def under(self, attempt: int) -> Episode:
        """The same rollout under another attempt."""
        return Episode(self.rollout_id, attempt)


def parse_key(key: str) -> Episode:
    """The episode a capture key names. Raises InvalidIdentity; `x-a0` and `x-a01` are not canonical, so refused."""
    match = _ATTEMPT_SUFFIX.search(key)
    if match is None:
        return Episode(key, 0)
    digits = match.group(1)
    if digits.startswith("0"):
        raise InvalidIdentity(f"capture key {key[:80]!r}: attempt 0 has no suffix, others no leading zero")
    if len(digits) > len(str(MAX_ATTEMPT)):
        raise InvalidIdentity(f"attempts count from 0 and end at {MAX_ATTEMPT}")
    return Episode(key[: match.start()], int(digits))


def highest(episodes: Iterable[Episode]) -> dict[str, int]:
    """The highest attempt of each rollout among these: what ends an attempt ends its rollout's earlier ones too."""
    attempts: dict[str, int] = {}
    for episode in episodes:
        attempts[episode.rollout_id] = max(episode.attempt, attempts.get(episode.rollout_id, -1))
    return attempts


def next_attempt(recorded: int | None, cell_attempt: int) -> int:
    """The attempt a rollout continues or starts over under: above its last one, and not below the cell's.

    `recorded` is None for a rollout that never ran. Rule: protocol section 1, "Attempt rule".
    """
    return max(0 if recorded is None else recorded + 1, cell_attempt)
