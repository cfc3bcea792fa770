"""Who may still act: the floor, the watermarks, and the attempt rule of a restore."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_servers.participants.base import plan_restore
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.fence import Fence
from gym_servers.protocol.identity import Episode, InvalidIdentity

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.sampled_from("rs"), st.integers(0, 6)),
        st.tuples(st.just("mark"), st.sampled_from("rs"), st.integers(0, 6)),
        st.tuples(st.just("floor"), st.just(""), st.integers(0, 6)),
    ),
    max_size=30,
)


@given(OPERATIONS)
def test_what_was_once_stale_stays_stale(operations: list[tuple[str, str, int]]) -> None:
    fence = Fence()
    everything = [Episode(rollout, attempt) for rollout in "rs" for attempt in range(8)]
    for what, rollout, number in operations:
        stale = {episode for episode in everything if fence.is_stale(episode)}
        try:
            if what == "admit":
                fence.admit(Episode(rollout, number))
                assert not fence.is_stale(Episode(rollout, number))
                assert all(fence.is_stale(Episode(rollout, lower)) for lower in range(number))
            elif what == "mark":
                fence.mark(rollout, number)
                assert fence.is_stale(Episode(rollout, number))
            else:
                fence.raise_floor(number)
                assert all(fence.is_stale(Episode("new", lower)) for lower in range(number))
        except ProtocolError as refusal:
            assert refusal.code == "stale_attempt"
        assert stale <= {episode for episode in everything if fence.is_stale(episode)}


def test_a_lower_floor_is_refused_and_changes_nothing() -> None:
    fence = Fence()
    fence.raise_floor(3)
    with pytest.raises(ProtocolError, match="stale_attempt"):
        fence.raise_floor(2)
    assert fence.floor == 3
    fence.raise_floor(3)


def test_a_refusal_says_from_which_attempt_on_work_is_taken() -> None:
    fence = Fence()
    fence.raise_floor(2)
    fence.mark("r", 4)
    with pytest.raises(ProtocolError, match="below 5"):
        fence.check(Episode("r", 4))
    with pytest.raises(ProtocolError, match="below 2"):
        fence.check(Episode("other", 1))


def test_a_mark_never_goes_back_and_forget_removes_it() -> None:
    fence = Fence()
    fence.mark("r", 5)
    fence.mark("r", 1)
    assert fence.is_stale(Episode("r", 5))
    fence.forget("r")
    fence.forget("never-seen")
    assert not fence.is_stale(Episode("r", 0))


def test_without_a_floor_watermarks_alone_fence() -> None:
    """A foreign trainer cannot know the floor: its attempt 0 of a new rollout is taken after any recovery."""
    fence = Fence(enforce_floor=False)
    fence.raise_floor(4)
    fence.check(Episode("new", 0))
    fence.admit(Episode("r", 2))
    with pytest.raises(ProtocolError, match="stale_attempt"):
        fence.check(Episode("r", 1))
    with pytest.raises(ProtocolError, match="stale_attempt"):
        fence.raise_floor(3)


KEYS = st.lists(st.tuples(st.sampled_from("pqrs"), st.integers(0, 5)), unique_by=lambda pair: pair[0], max_size=4)


@given(KEYS, st.integers(0, 8))
def test_a_restored_episode_runs_above_its_record_and_not_below_the_floor(
    pairs: list[tuple[str, int]], cell_attempt: int
) -> None:
    plan = plan_restore([Episode(*pair).key for pair in pairs], cell_attempt, {})
    for pair in pairs:
        restored = plan.restored(Episode(*pair).key)
        assert restored is not None
        assert restored.attempt == max(pair[1] + 1, cell_attempt)
    assert plan.restored("not-in-it") is None


@given(st.integers(0, 5), st.integers(0, 5), st.integers(0, 12))
def test_an_attempt_that_a_coordinator_names_obeys_the_same_rule(recorded: int, floor: int, wanted: int) -> None:
    key = Episode("r", recorded).key
    if wanted < floor or wanted <= recorded:
        with pytest.raises(ProtocolError, match="stale_attempt"):
            plan_restore([key], floor, {"r": wanted})
    else:
        assert plan_restore([key], floor, {"r": wanted}).restored(key) == Episode("r", wanted)


@given(KEYS, KEYS, st.integers(0, 8))
def test_nothing_that_was_recorded_acts_after_a_restore_and_all_that_continues_does(
    pairs: list[tuple[str, int]], restarts: list[tuple[str, int]], cell_attempt: int
) -> None:
    """Also with no floor, and where a rollout is recorded under several attempts."""
    keys, over = ([Episode(*pair).key for pair in some] for some in (pairs, restarts))
    plan = plan_restore(keys, cell_attempt, {}, over)
    fence = Fence(enforce_floor=False)
    fence.restore(plan.marks())
    for pair in (*pairs, *restarts):
        assert fence.is_stale(Episode(*pair))
    for key in keys:
        restored = plan.restored(key)
        assert restored is not None
        assert not fence.is_stale(restored)
        assert fence.is_stale(restored.under(restored.attempt - 1))
    for rollout, attempt in restarts:
        if rollout not in {name for name, _ in pairs}:
            assert not fence.is_stale(Episode(rollout, attempt + 1))


def test_what_a_process_has_retired_does_not_come_back_under_the_same_attempt() -> None:
    plan = plan_restore(["r-a1", "s-a1"], 3, {})
    left = plan.beyond({"r": 3, "s": 2})
    assert left.restored("r-a1") is None
    assert left.restored("s-a1") == Episode("s", 3)
    assert plan_restore(["r-a1"], 4, {}).beyond({"r": 3}).restored("r-a1") == Episode("r", 4)


def test_a_key_that_names_no_episode_is_refused() -> None:
    with pytest.raises(InvalidIdentity):
        plan_restore(["x-a0"], 0, {})
