"""The episode of a row-shaped request: in its path, or in the row's own `_ng_` keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_servers.http.episode_path import current_episode
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, InvalidIdentity

ATTEMPT = "_ng_attempt_index"


def row_episode(row: Mapping[str, Any]) -> Episode | None:
    """The episode of the running call, None where neither its path nor the row names one. The path goes first: a row
    keeps the attempt it was written with. Raises `invalid_request` for keys that are not usable."""
    return current_episode() or _in_row(row)


def without_attempt(row: Mapping[str, Any]) -> dict[str, Any]:
    """What tells one task from another: a rollout's later attempts bring the same task."""
    return {name: value for name, value in row.items() if name != ATTEMPT}


def row_session(episode: Episode) -> str:
    """The agent session that serves a row: the same for each attempt, so that whoever relayed it can close it."""
    return f"row.{episode.rollout_id}"


def _in_row(row: Mapping[str, Any]) -> Episode | None:
    rollout = row.get("_ng_rollout_id")
    if rollout is None:
        task, repeat = row.get("_ng_task_index"), row.get("_ng_rollout_index")
        if task is None or repeat is None:
            return None
        rollout = f"{task}-{repeat}"
    attempt = row.get(ATTEMPT) or 0
    if not isinstance(rollout, str) or not isinstance(attempt, int):
        raise ProtocolError("invalid_request", f"_ng_rollout_id is a text, {ATTEMPT} a number")
    try:
        return Episode(rollout, attempt)
    except InvalidIdentity as error:
        raise ProtocolError("invalid_request", str(error)) from error
