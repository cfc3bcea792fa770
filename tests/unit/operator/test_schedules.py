"""What a schedule does at its times, and what its status says of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_operator.api import names
from gym_operator.api.conditions import ConditionReason, ConditionType, get_condition
from gym_operator.api.objects import format_time
from gym_operator.api.schedule import GymCheckpointSchedule, ScheduleStatus
from gym_operator.rules import schedules as rules
from gym_operator.rules.schedule_times import times_of
from gym_servers.stack.spec import SpecError

NOW = 1_800_000_000.0
TEMPLATE = {"spec": {"stackRef": {"name": "demo"}}}
SPEC: dict[str, Any] = {"every": "2m", "template": TEMPLATE}


def schedule(status: ScheduleStatus | None = None, created: float = NOW, **spec: Any) -> GymCheckpointSchedule:
    metadata = {
        "name": "often",
        "namespace": "team",
        "uid": "schedule-uid",
        "creationTimestamp": format_time(created),
        "labels": {"app.kubernetes.io/instance": "argo-app", "team": "a"},
        "annotations": {"argocd.argoproj.io/tracking-id": "x"},
    }
    found = GymCheckpointSchedule.parse({"metadata": metadata, "spec": {**SPEC, **spec}})
    return found.model_copy(update={"status": status or rules.counted(found, created)})


def move(found: GymCheckpointSchedule, now: float, *children: dict[str, Any], obstacle: Any = None) -> rules.Move:
    current = found.model_copy(update={"status": rules.counted(found, now)})
    return rules.next_move(current, times_of(found.spec, NOW), now, children, obstacle)


def checkpoint(name: str, phase: str | None = None) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": {"phase": phase} if phase else {}}


def test_it_rests_until_its_time_and_then_makes_one() -> None:
    assert move(schedule(), NOW + 119) == rules.Rest(NOW + 120)
    assert move(schedule(), NOW + 120) == rules.Make(NOW + 120)
    dealt = rules.made(schedule().status, NOW + 120, "x")
    assert move(schedule(dealt), NOW + 125) == rules.Rest(NOW + 240)


def test_k6_after_an_outage_only_the_newest_time_is_made_up_for() -> None:
    assert move(schedule(), NOW + 100_000) == rules.Make(NOW + 99_960)
    dealt = rules.made(schedule().status, NOW + 99_960, "x")
    assert move(schedule(dealt), NOW + 100_001) == rules.Rest(NOW + 100_080)


def test_k6_unsuspending_makes_up_for_one_at_most() -> None:
    assert move(schedule(suspend=True), NOW + 1000) == rules.Rest(None)
    assert move(schedule(), NOW + 1000) == rules.Make(NOW + 960)


def test_k6_what_would_overlap_is_skipped() -> None:
    for phase in (None, "Pending", "Preparing", "Committing", "Publishing"):
        skip = move(schedule(), NOW + 120, checkpoint("older", phase))
        assert isinstance(skip, rules.Skip)
        assert (skip.time, skip.reason) == (NOW + 120, ConditionReason.OVERLAP)
        assert "older" in skip.message
        assert move(schedule(rules.skipped(schedule().status, skip)), NOW + 121) == rules.Rest(NOW + 240)
    for phase in ("Succeeded", "Failed", "Deleting"):
        assert move(schedule(), NOW + 120, checkpoint("older", phase)) == rules.Make(NOW + 120)


def test_k5_what_stands_for_the_time_is_found_again() -> None:
    name = names.scheduled_checkpoint("often", format_time(NOW + 120))
    for phase in (None, "Preparing", "Succeeded", "Failed"):
        assert move(schedule(), NOW + 150, checkpoint(name, phase)) == rules.Made(NOW + 120, name)


def test_a_time_that_is_too_long_ago_is_skipped() -> None:
    assert move(schedule(startingDeadline="30s"), NOW + 150) == rules.Make(NOW + 120)
    late = move(schedule(startingDeadline="30s"), NOW + 151)
    assert isinstance(late, rules.Skip)
    assert late.reason == ConditionReason.TOO_LATE


@pytest.mark.parametrize(
    ("stack", "reason"),
    [
        (None, ConditionReason.STACK_NOT_FOUND),
        ({"spec": {"suspend": True}}, ConditionReason.STACK_NOT_READY),
        ({"spec": {}, "status": {"phase": "Completed"}}, ConditionReason.COLLECTION_COMPLETE),
        ({"spec": {}, "status": {"phase": "Stopped"}}, ConditionReason.STACK_NOT_READY),
    ],
)
def test_a_checkpoint_that_would_be_in_vain_is_skipped(stack: Any, reason: ConditionReason) -> None:
    skip = move(schedule(), NOW + 120, obstacle=rules.obstacle_of(stack, "demo"))
    assert isinstance(skip, rules.Skip)
    assert skip.reason == reason
    assert rules.obstacle_of({"spec": {}, "status": {"phase": "Running"}}, "demo") is None


def test_a_clock_that_was_ahead_does_not_stop_it() -> None:
    """What it has dealt with lies in the future by now: times come again, and what was made for them is found."""
    early = rules.skipped(
        rules.made(schedule().status, NOW + 1e6, "x"), rules.Skip(NOW + 2e6, ConditionReason.OVERLAP, "")
    )
    ahead = schedule().model_copy(update={"status": early})
    counted = rules.counted(ahead, NOW + 121)
    assert (counted.counted_from, counted.last_schedule_time, counted.last_skipped) == (
        format_time(NOW + 121),
        None,
        None,
    )
    back = ahead.model_copy(update={"status": counted})
    assert rules.counted(back, NOW + 122) == counted
    assert move(back, NOW + 122) == rules.Rest(NOW + 240)
    assert move(back, NOW + 240) == rules.Make(NOW + 240)
    behind = schedule(created=NOW + 500)
    assert isinstance(move(behind, NOW + 10), rules.Rest)


def test_times_that_were_changed_count_from_then_on() -> None:
    dealt = rules.made(schedule().status, NOW + 120, "x")
    changed = schedule(dealt, every=None, schedule="* * * * *")
    status = rules.counted(changed.model_copy(update={"status": dealt}), NOW + 1000)
    assert (status.timing, status.counted_from) == ("* * * * * UTC", format_time(NOW + 1000))
    later = changed.model_copy(update={"status": status})
    assert isinstance(move(later, NOW + 1001), rules.Rest)
    assert isinstance(move(later, NOW + 1100), rules.Make)
    assert rules.counted(later, NOW + 2000) == status


def test_k7_a_child_carries_what_is_its_own_and_nothing_of_its_schedule() -> None:
    template: dict[str, Any] = {
        "metadata": {"labels": {"tier": "gold", names.SCHEDULE_UID_LABEL: "forged"}},
        "spec": {"stackRef": {"name": "demo"}, "labels": {"step": "7"}, "timeouts": {"prepare": "30s"}},
    }
    body = rules.child(schedule(template=template), NOW + 120)
    assert body["metadata"] == {
        "name": "often-20270115080200",
        "namespace": "team",
        "labels": {"tier": "gold", names.SCHEDULE_LABEL: "often", names.SCHEDULE_UID_LABEL: "schedule-uid"},
        "annotations": {names.SCHEDULED_AT: "2027-01-15T08:02:00Z"},
    }
    assert body["spec"] == {**template["spec"], "deletionPolicy": "Retain", "stopAfter": False}
    assert "finalizers" not in body["metadata"]
    template["spec"]["deletionPolicy"] = "Delete"
    tied = rules.child(schedule(template=template), NOW + 120)
    assert tied["metadata"]["finalizers"] == [names.DATA_FINALIZER]
    assert rules.is_child_of(body, "schedule-uid")
    assert not rules.is_child_of(body, "another")


def test_its_status_says_how_it_goes() -> None:
    def ready(status: ScheduleStatus) -> tuple[str, str]:
        told = rules.told(status, 3, NOW + 240, False, NOW)
        condition = get_condition(told.conditions, ConditionType.READY)
        assert condition is not None and told.observed_generation == condition.observed_generation == 3
        return condition.status, condition.reason

    begun = schedule().status
    assert ready(begun) == ("True", "Scheduled")
    for reason, expected in (
        (ConditionReason.OVERLAP, ("True", "Scheduled")),
        (ConditionReason.NAME_CONFLICT, ("False", "NameConflict")),
        (ConditionReason.STACK_NOT_FOUND, ("False", "StackNotFound")),
    ):
        gone_by = rules.skipped(begun, rules.Skip(NOW + 120, reason, "why"))
        assert ready(gone_by) == expected
        assert ready(rules.made(gone_by, NOW + 240, "x")) == ("True", "Scheduled")
    suspended = rules.told(begun, 1, None, True, NOW)
    assert (suspended.phase, suspended.next_schedule_time) == ("Suspended", None)
    refused = rules.refused(begun, "why", 1, NOW)
    stalled = get_condition(refused.conditions, ConditionType.STALLED)
    assert stalled is not None and (refused.phase, stalled.status) == ("Failed", "True")
    again = get_condition(rules.told(refused, 2, None, False, NOW).conditions, ConditionType.STALLED)
    assert again is not None and again.status == "False"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"every": None}, "exactly one of schedule"),
        ({"schedule": "* * * * *"}, "exactly one of schedule"),
        ({"timeZone": "UTC"}, "timeZone belongs to schedule"),
        ({"every": "9s"}, "every is at least 10s"),
        ({"every": None, "schedule": "61 * * * *"}, "minute"),
        ({"every": None, "schedule": "* * * * *", "timeZone": "Mars/Olympus"}, "no time zone Mars/Olympus"),
        ({"every": None, "schedule": "* * * * *", "timeZone": "../etc"}, "IANA"),
        ({"concurrencyPolicy": "Allow"}, "Forbid"),
        ({"template": {"metadata": {"labels": {names.INSTANCE_LABEL: "x"}}, **TEMPLATE}}, "leave app.kubernetes.io"),
        ({"template": {"spec": {}}}, "stackRef"),
    ],
)
def test_what_cannot_be_used_says_what_to_write(spec: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        schedule(**spec)


@given(
    interval=st.integers(10, 600),
    steps=st.lists(st.tuples(st.integers(-900, 3000), st.booleans()), min_size=1, max_size=40),
)
def test_each_time_has_one_checkpoint_and_none_overlaps_whatever_the_clock_does(
    interval: int, steps: list[tuple[int, bool]]
) -> None:
    """The clock jumps, checkpoints end when they like, and a status that was to be written is lost at times."""
    found = schedule(every=f"{interval}s")
    now, status = NOW, found.status
    children: dict[str, dict[str, Any]] = {}
    # However it went before: by itself and undisturbed it goes on at its next time.
    quiet = [(0, True), *[(10, True)] * (interval // 10 + 2)]
    for number, (jump, lost) in enumerate([*steps, *quiet]):
        now = max(NOW, now + jump)
        for body in children.values():
            if lost:
                body["status"] = {"phase": "Succeeded"}
        current = found.model_copy(update={"status": status})
        status = rules.counted(current, now)
        current = found.model_copy(update={"status": status})
        if number == len(steps):
            begun = now
        step = rules.next_move(current, times_of(found.spec, NOW), now, list(children.values()), None)
        match step:
            case rules.Make(time):
                body = rules.child(current, time)
                assert rules.active_among(children.values()) is None
                assert body["metadata"]["name"] not in children
                assert time <= now and (time - NOW) % interval == 0
                children[body["metadata"]["name"]] = body
                status = status if lost else rules.made(status, time, body["metadata"]["name"])
            case rules.Made(time, name):
                status = rules.made(status, time, name)
            case rules.Skip():
                status = rules.skipped(status, step)
            case rules.Rest(until):
                assert until is not None and now < until <= now + interval
    expected = names.scheduled_checkpoint("often", format_time(NOW + ((now - NOW) // interval) * interval))
    assert now - begun < interval or expected in children
