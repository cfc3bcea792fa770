"""Rollouts that hold checkpoints up again and again: how often in a row, and which of them are restarted. Pure.

A rollout that never comes to rest would keep every checkpoint from being taken. To restart it is to retire its
attempt: its driver learns that by `stale_attempt` and starts it over under the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gym_servers.coordination.record import Blocked, Restarted
from gym_servers.protocol.identity import Episode, InvalidIdentity, parse_key
from gym_servers.protocol.messages import Blocker, Status

MAX_COUNTED = 20  # rollouts a record counts; the ones that have blocked most often are kept
MAX_AT_ONCE = 10  # restarts a record remembers, and so how many may be under way
RETIRING = "retire"  # where a blocker stands that is being stopped already


def counted(
    before: Sequence[Blocked], blockers: Sequence[tuple[str, Blocker]], answered: Collection[str]
) -> list[Blocked]:
    """The counts after a checkpoint that failed. `blockers` are what it waited for, each with its participant;
    `answered` are the participants that were asked. Whoever blocked one that was not asked keeps his count: nobody
    knows."""
    known = {one.rollout: one for one in before}
    found: dict[str, Blocked] = {}
    for participant, blocker in blockers:
        episode = _episode(blocker)
        if episode is None or episode.rollout_id in found:
            continue
        last = known.get(episode.rollout_id)
        found[episode.rollout_id] = Blocked(
            rollout=episode.rollout_id,
            attempt=episode.attempt,
            times=last.times + 1 if last is not None else 1,
            participant=participant,
            where=blocker.where[:100],
            age_seconds=round(max(0.0, blocker.age_seconds), 1),
        )
    unknown = [one for one in before if one.rollout not in found and one.participant not in answered]
    return sorted([*found.values(), *unknown], key=lambda one: -one.times)[:MAX_COUNTED]


def due(counts: Sequence[Blocked], limit: int, live: Collection[str]) -> list[Blocked]:
    """Those that have blocked `limit` checkpoints in a row and still run; none where the limit is 0."""
    over = [one for one in counts if 0 < limit <= one.times and key_of(one) in live]
    return over[:MAX_AT_ONCE]


def restarted(counts: Sequence[Blocked], known: Sequence[Restarted], now: float) -> list[Restarted]:
    """The remembered restarts, with these as the newest. `now` in Unix seconds."""
    fresh = [Restarted(**one.model_dump(), at=now) for one in counts]
    return [*known, *fresh][-MAX_AT_ONCE:]


def live_keys(statuses: Mapping[str, Status]) -> frozenset[str]:
    """Capture keys of what the environment runs."""
    return frozenset(
        key
        for status in statuses.values()
        if status.kind == "environment"
        for key in (*(status.report.episodes or ()), *status.report.restarts)
    )


def key_of(one: Blocked) -> str:
    """The capture key of the attempt that blocked."""
    return Episode(one.rollout, one.attempt).key


def described(counts: Sequence[Blocked]) -> str:
    """For people: what blocked, how often, where, and for how long."""
    return "; ".join(
        f"{key_of(one)} blocked {one.times} checkpoints in a row, last in {one.where} at {one.participant} "
        f"for {one.age_seconds:g} s"
        for one in counts
    )


def _episode(blocker: Blocker) -> Episode | None:
    """Whose work a blocker is; None where it is no rollout's, or is being stopped."""
    if blocker.where == RETIRING:
        return None
    try:
        return parse_key(blocker.id)
    except InvalidIdentity:
        return None
