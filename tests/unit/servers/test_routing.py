"""Rollouts and their cells: the same for everybody, evenly spread, and moved by a change of their number as little as
can be."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_servers.protocol.routing import cell_of

ROLLOUTS = [f"{task}-{repeat}" for task in range(400) for repeat in range(4)]


@given(st.text(min_size=1, max_size=40), st.integers(1, 40))
def test_a_rollout_has_one_cell_and_always_the_same(rollout: str, cells: int) -> None:
    cell = cell_of(rollout, cells)
    assert 0 <= cell < cells
    assert cell_of(rollout, cells) == cell


@pytest.mark.parametrize("cells", [1, 2, 5])
def test_one_cell_more_takes_rollouts_from_all_and_moves_no_other(cells: int) -> None:
    before = {rollout: cell_of(rollout, cells) for rollout in ROLLOUTS}
    after = {rollout: cell_of(rollout, cells + 1) for rollout in ROLLOUTS}
    moved = {rollout for rollout in ROLLOUTS if before[rollout] != after[rollout]}
    assert moved == {rollout for rollout in ROLLOUTS if after[rollout] == cells}
    assert {before[rollout] for rollout in moved} == set(range(cells))


@pytest.mark.parametrize("cells", [2, 3, 8])
def test_rollouts_are_spread_evenly(cells: int) -> None:
    counts = Counter(cell_of(rollout, cells) for rollout in ROLLOUTS)
    fair = len(ROLLOUTS) / cells
    assert all(0.75 * fair < counts[cell] < 1.25 * fair for cell in range(cells))


def test_no_cell_is_no_place() -> None:
    with pytest.raises(ValueError, match="empty"):
        cell_of("r", 0)


def test_a_rollout_s_cell_stays_the_same_in_later_versions() -> None:
    """Drivers bring their own copy of this function: SHA-256 of `<cell>/<rollout id>`, the highest wins."""
    assert {rollout: cell_of(rollout, 3) for rollout in ("0-0", "12-3", "a.b_c", "7-1")} == {
        "0-0": 0,
        "12-3": 2,
        "a.b_c": 0,
        "7-1": 0,
    }
