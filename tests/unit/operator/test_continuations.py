"""What the status says of a recovery to a driver: bounded, of this attempt, and kept over the operator's own
death."""

from __future__ import annotations

from gym_operator.api.driver import MAX_ROLLOUTS, Continuation, RestoredCheckpoint
from gym_operator.rules.continuations import continuation_of, restored_of
from gym_servers.coordination.continuation import Continuation as Found
from gym_servers.protocol.identity import Episode

FOUND = Found(
    attempt=2,
    checkpoint_id="one-1",
    name="one",
    continued=(Episode("a", 2), Episode("b", 4)),
    started_over=("c",),
    labels={"step": "7"},
    driver_state={"value": {"step": 7, "none": None}},
)


def written() -> tuple[Continuation, RestoredCheckpoint]:
    continuation = continuation_of(FOUND, None, 2)
    assert continuation is not None
    restored = restored_of(FOUND, None, continuation)
    assert restored is not None
    return continuation, restored


def test_it_names_what_continues_and_gives_back_what_was_handed_over() -> None:
    continuation, restored = written()
    assert continuation.document() == {
        "attempt": 2,
        "checkpoint": "one-1",
        "continuedCount": 2,
        "continued": [{"rollout": "a", "attempt": 2}, {"rollout": "b", "attempt": 4}],
        "startedOverCount": 1,
        "startedOver": ["c"],
    }
    assert restored.document() == {
        "name": "one",
        "id": "one-1",
        "labels": {"step": "7"},
        "driverState": {"value": {"step": 7, "none": None}},
    }


def test_an_operator_that_did_not_see_the_recovery_keeps_what_is_written() -> None:
    continuation, restored = written()
    assert continuation_of(None, continuation, 2) == continuation
    assert restored_of(None, restored, continuation) == restored


def test_of_another_attempt_nothing_is_said() -> None:
    continuation, restored = written()
    assert continuation_of(FOUND, continuation, 3) is None
    assert continuation_of(None, continuation, 3) is None
    assert continuation_of(None, None, 0) is None
    assert restored_of(FOUND, restored, None) is None
    other = continuation.model_copy(update={"checkpoint": "two-2"})
    assert restored_of(FOUND, restored, other) is None


def test_a_start_from_the_input_gives_nothing_back() -> None:
    continuation, restored = written()
    found = continuation_of(Found(attempt=3), continuation, 3)
    assert found is not None
    assert found.document() == {
        "attempt": 3,
        "continuedCount": 0,
        "continued": [],
        "startedOverCount": 0,
        "startedOver": [],
    }
    assert restored_of(Found(attempt=3), restored, found) is None


def test_a_status_names_so_many_and_counts_all() -> None:
    many = Found(
        attempt=1,
        checkpoint_id="c",
        name="c",
        continued=tuple(Episode(f"r{number}", 1) for number in range(300)),
        started_over=tuple(f"s{number}" for number in range(200)),
    )
    found = continuation_of(many, None, 1)
    assert found is not None
    assert (found.continued_count, len(found.continued)) == (300, MAX_ROLLOUTS)
    assert (found.started_over_count, len(found.started_over)) == (200, MAX_ROLLOUTS)
