"""Aggregate metrics: of whatever rows there are, those with a number for a reward count."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gym_servers.resources.metrics import aggregate

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["", "1", "much", 10**400])
ANY = LEAVES | st.lists(LEAVES, max_size=2) | st.fixed_dictionaries({"a": LEAVES})
ROWS = st.lists(st.fixed_dictionaries({}, optional={"reward": ANY, "_ng_task_index": ANY}), max_size=6)


@given(ROWS)
def test_metrics_of_any_rows_can_be_written(rows: list[dict[str, Any]]) -> None:
    found = aggregate(rows)
    json.dumps(found, allow_nan=False)
    assert 0 <= found["count"] <= len(rows)
    assert (found["reward_mean"] is None) == (found["count"] == 0)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_a_mean_lies_between_its_rewards(rewards: list[float]) -> None:
    mean = aggregate([{"reward": reward} for reward in rewards])["reward_mean"]
    slack = 1e-9 * max(map(abs, rewards))
    assert min(rewards) - slack <= mean <= max(rewards) + slack


def test_the_best_of_a_tasks_repeats_counts_for_the_task() -> None:
    rows = [{"_ng_task_index": task, "reward": reward} for task, reward in ((0, 0.0), (0, 1.0), (1, 0.5), (1, None))]
    assert aggregate(rows) == {"count": 3, "reward_mean": 0.5, "reward_best_of_repeats": 0.75}
