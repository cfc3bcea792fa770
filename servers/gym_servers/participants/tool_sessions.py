"""Tool sessions as a table - by id, by episode, by rollout - and as records."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gym_servers.participants.base import RestorePlan
from gym_servers.participants.records import from_bytes, reading
from gym_servers.protocol.identity import Episode, parse_key

REMEMBERED_ENDS = 4096  # ended sessions known by name, so that a seed that comes late does not begin one again


@dataclass(eq=False)
class ToolSession:
    """One session. `seed` is the digest of what it was seeded with, empty where that is not known; `replies` answer
    repeated calls; `effects` counts the calls that changed something. `touched`: a call has run on it. `ended`: its
    state is being freed, or it is gone."""

    id: str
    episode: Episode | None
    seed: str = ""
    replies: dict[str, tuple[str, Any]] = field(default_factory=dict)
    effects: int = 0
    touched: bool = False
    ended: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class SessionTable:
    """The sessions of one server, and which ones have ended."""

    def __init__(self) -> None:
        self._by_id: dict[str, ToolSession] = {}
        self._by_key: dict[str, ToolSession] = {}
        self._by_rollout: defaultdict[str, set[ToolSession]] = defaultdict(set)
        self._ended: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._by_id))

    def values(self) -> list[ToolSession]:
        return list(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, session_id: str) -> ToolSession | None:
        return self._by_id.get(session_id)

    def of(self, episode: Episode | None) -> ToolSession | None:
        """The session an episode has."""
        return self._by_key.get(episode.key) if episode is not None else None

    def up_to(self, rollout_id: str, attempt: int) -> list[ToolSession]:
        """The sessions of a rollout at or below an attempt."""
        of_rollout = self._by_rollout.get(rollout_id, ())
        return [one for one in of_rollout if one.episode is not None and one.episode.attempt <= attempt]

    def of_rollout(self, rollout_id: str) -> list[ToolSession]:
        """The sessions of a rollout, whatever their attempts."""
        return list(self._by_rollout.get(rollout_id, ()))

    def keys(self) -> frozenset[str]:
        return frozenset(self._by_key)

    def add(self, session: ToolSession) -> None:
        self._by_id[session.id] = session
        if session.episode is not None:
            self._by_key[session.episode.key] = session
            self._by_rollout[session.episode.rollout_id].add(session)

    def remove(self, session: ToolSession) -> None:
        if self._by_id.get(session.id) is session:
            del self._by_id[session.id]
        if session.episode is None:
            return
        if self._by_key.get(session.episode.key) is session:
            del self._by_key[session.episode.key]
        of_rollout = self._by_rollout[session.episode.rollout_id]
        of_rollout.discard(session)
        if not of_rollout:
            del self._by_rollout[session.episode.rollout_id]

    def clear(self) -> None:
        self._by_id.clear()
        self._by_key.clear()
        self._by_rollout.clear()

    def end(self, session_id: str, episode: Episode | None) -> None:
        """Remember that this session is over. Another attempt may use its name again."""
        self._ended[pair(session_id, episode)] = None
        while len(self._ended) > REMEMBERED_ENDS:
            self._ended.popitem(last=False)

    def has_ended(self, session_id: str, episode: Episode | None) -> bool:
        return pair(session_id, episode) in self._ended


def pair(session_id: str, episode: Episode | None) -> tuple[str, str]:
    """What a session is called: its name is its episode's own."""
    return session_id, episode.key if episode is not None else ""


def record_of(session: ToolSession, state: Any) -> dict[str, Any]:
    """A session and its server's state, as they stand."""
    assert session.episode is not None
    return {
        "session": session.id,
        "episode": session.episode.key,
        "seed": session.seed,
        "touched": session.touched,
        "state": state,
        "effects": session.effects,
        "replies": {call: [digest, reply] for call, (digest, reply) in session.replies.items()},
    }


def decode(name: str, data: bytes, plan: RestorePlan) -> tuple[ToolSession, Any] | None:
    """The session of a record as it is restored, and its state; None for one that is not in the plan. Raises
    `invalid_checkpoint_state`."""
    record = from_bytes(name, data)
    with reading(name):
        episode = plan.restored(parse_key(record["episode"]).key)
        if episode is None:
            return None
        session = ToolSession(record["session"], episode, record.get("seed", ""), effects=int(record["effects"]))
        session.touched = bool(record.get("touched", True))
        session.replies = {call: (digest, reply) for call, (digest, reply) in record["replies"].items()}
        return session, record["state"]
