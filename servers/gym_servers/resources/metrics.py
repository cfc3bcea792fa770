"""Aggregate metrics of verified rollouts: overall, and per task over its repeats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any

from pydantic import BaseModel


class AggregateRequest(BaseModel):
    """The body of `/aggregate_metrics`, which every server that sees rows answers."""

    verify_responses: list[dict[str, Any]]


def aggregate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`count`, `reward_mean`, and `reward_best_of_repeats` (mean over tasks of their best repeat's reward). Rows
    whose reward is no finite number are not counted."""
    tasks: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if (reward := _reward(row)) is not None:
            tasks[str(row.get("_ng_task_index"))].append(reward)
    rewards = [reward for repeats in tasks.values() for reward in repeats]
    return {
        "count": len(rewards),
        "reward_mean": _mean(rewards),
        "reward_best_of_repeats": _mean([max(repeats) for repeats in tasks.values()]),
    }


def _reward(row: Mapping[str, Any]) -> float | None:
    given = row.get("reward")
    try:
        reward = float(given) if isinstance(given, int | float) else None
    except OverflowError:
        return None
    return reward if reward is not None and isfinite(reward) else None


def _mean(values: Sequence[float]) -> float | None:
    if not values:
        return None
    try:
        return fmean(values)
    except OverflowError:  # of their sum
        return sum(value / len(values) for value in values)
