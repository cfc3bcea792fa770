"""Conditions: when the transition time moves, and what a status can hold."""

from __future__ import annotations

from gym_operator.api.conditions import (
    Condition,
    ConditionReason,
    ConditionStatus,
    ConditionType,
    get_condition,
    is_true,
    set_condition,
)
from gym_operator.api.objects import MAX_MESSAGE, format_time, parse_time

NOON = 1_800_000_000.7


def observed(
    conditions: tuple[Condition, ...], status: ConditionStatus, now: float, message: str = ""
) -> tuple[Condition, ...]:
    return set_condition(conditions, ConditionType.READY, status, ConditionReason.RUNNING, message, 3, now)


def test_a_first_observation_is_added() -> None:
    (condition,) = observed((), "True", NOON, "all servers answer")
    assert condition.document() == {
        "type": "Ready",
        "status": "True",
        "reason": "Running",
        "message": "all servers answer",
        "lastTransitionTime": "2027-01-15T08:00:00Z",
        "observedGeneration": 3,
    }


def test_the_transition_time_stays_while_the_status_does() -> None:
    first = observed((), "True", NOON)
    again = observed(first, "True", NOON + 60, "still")
    assert again[0].last_transition_time == first[0].last_transition_time
    assert again[0].message == "still"


def test_the_transition_time_moves_with_the_status() -> None:
    changed = observed(observed((), "True", NOON), "False", NOON + 60)
    assert parse_time(changed[0].last_transition_time) == int(NOON + 60)


def test_the_others_keep_their_place() -> None:
    conditions = observed((), "True", NOON)
    conditions = set_condition(conditions, ConditionType.STALLED, "False", ConditionReason.RUNNING, "", 3, NOON)
    conditions = observed(conditions, "False", NOON)
    assert [condition.type for condition in conditions] == ["Ready", "Stalled"]
    assert not is_true(conditions, ConditionType.READY)
    assert get_condition(conditions, ConditionType.RECOVERING) is None


def test_a_long_message_is_cut_rather_than_refused() -> None:
    (condition,) = observed((), "True", NOON, "x" * 5000)
    assert len(condition.message) == MAX_MESSAGE


def test_every_reason_is_one_the_api_accepts() -> None:
    for reason in ConditionReason:
        set_condition((), ConditionType.READY, "Unknown", reason, "", 0, NOON)


def test_times_survive_a_round_trip() -> None:
    assert parse_time(format_time(NOON)) == int(NOON)
