"""What a recovery continues, and what starts over."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gym_servers.coordination.continuation import Continuation, continuation
from gym_servers.protocol.identity import Episode
from gym_servers.storage.manifest import Publication


def publication(**parts: Any) -> Publication:
    return Publication(
        state="published",
        checkpoint_id="one-1",
        name="one",
        stack_uid="u",
        cell=0,
        cell_attempt=0,
        sequence=1,
        created=1.0,
        **parts,
    )


def test_what_is_in_the_checkpoint_continues_and_what_ran_beside_it_starts_over() -> None:
    state = {"uri": "s3://b/k", "digest": "d"}
    found = continuation(
        publication(
            episodes=["b-a3", "a"],
            restarts=["c-a1"],
            not_started=["d"],
            left_out=["e", "a"],
            labels={"step": "7"},
            driver_state=state,
        ),
        2,
    )
    assert found.continued == (Episode("a", 2), Episode("b", 4))
    assert found.started_over == ("c", "d", "e")
    assert (found.attempt, found.checkpoint_id, found.name) == (2, "one-1", "one")
    assert (found.labels, found.driver_state) == ({"step": "7"}, state)


def test_from_the_input_nothing_continues() -> None:
    assert continuation(None, 3) == Continuation(3)


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9)),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 9)),
    st.integers(0, 9),
)
def test_it_names_attempts_above_all_that_were_recorded(
    recorded: dict[str, int], over: dict[str, int], attempt: int
) -> None:
    """Also of a rollout whose other attempts ran beside the one that continues."""
    found = continuation(
        publication(
            episodes=[Episode(*pair).key for pair in recorded.items()],
            restarts=[Episode(*pair).key for pair in over.items()],
        ),
        attempt,
    )
    assert {episode.rollout_id for episode in found.continued} == set(recorded)
    for episode in found.continued:
        assert episode.attempt == max(recorded[episode.rollout_id] + 1, over.get(episode.rollout_id, -1) + 1, attempt)
    assert set(found.started_over) == set(over) - set(recorded)
