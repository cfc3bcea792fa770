"""Aggregate metrics of verified rollouts: overall, and per task over its repeats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any


def aggregate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`count`, `reward_mean`, and `reward_best_of_repeats` (mean over tasks of their best repeat's reward)."""
    rewards = [float(row["reward"]) for row in rows if "reward" in row]
    tasks: dict[Any, list[float]] = defaultdict(list)
    for row in rows:
        if "reward" in row:
            tasks[row.get("_ng_task_index")].append(float(row["reward"]))
    return {
        "count": len(rewards),
        "reward_mean": fmean(rewards) if rewards else None,
        "reward_best_of_repeats": fmean(max(r) for r in tasks.values()) if tasks else None,
    }
