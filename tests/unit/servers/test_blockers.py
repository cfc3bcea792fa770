"""How often a rollout has held checkpoints up in a row, and when that is too often."""

from __future__ import annotations

import pytest

from gym_servers.coordination.blockers import (
    MAX_AT_ONCE,
    MAX_COUNTED,
    counted,
    described,
    due,
    key_of,
    live_keys,
    restarted,
)
from gym_servers.coordination.record import Blocked, CellRecord, Restarted
from gym_servers.protocol.messages import Blocker, Report, Status

ALL = frozenset({"collection", "env", "policy", "agent", "counter"})


def blocker(key: str, where: str = "verify", age: float = 63.24) -> Blocker:
    return Blocker(id=key, where=where, age_seconds=age)


def blocked(rollout: str, times: int, participant: str = "env", attempt: int = 0) -> Blocked:
    return Blocked(
        rollout=rollout, attempt=attempt, times=times, participant=participant, where="verify", age_seconds=1.0
    )


def test_whoever_blocks_again_is_counted_and_whoever_does_not_begins_anew() -> None:
    first = counted((), [("env", blocker("r-1")), ("env", blocker("r-2-a3"))], {"collection", "env"})
    assert [(one.rollout, one.attempt, one.times) for one in first] == [("r-1", 0, 1), ("r-2", 3, 1)]
    second = counted(first, [("env", blocker("r-1", "close_agent", 123.46))], {"collection", "env"})
    (one,) = second
    assert (one.rollout, one.times, one.where, one.age_seconds) == ("r-1", 2, "close_agent", 123.5)
    assert counted(second, [("env", blocker("r-2"))], {"collection", "env"})[0].times == 1
    assert counted(second, [], ALL) == []


def test_an_attempt_that_continues_after_a_recovery_is_the_same_rollout() -> None:
    (one,) = counted([blocked("r", 2)], [("env", blocker("r-a4"))], ALL)
    assert (one.attempt, one.times, key_of(one)) == (4, 3, "r-a4")


def test_a_checkpoint_that_did_not_get_to_a_participant_says_nothing_about_its_rollouts() -> None:
    before = [blocked("slow", 2, "agent"), blocked("done", 2, "env")]
    after = counted(before, [("env", blocker("other"))], {"collection", "env"})
    assert [(one.rollout, one.times) for one in after] == [("slow", 2), ("other", 1)]
    assert counted(before, [], frozenset()) == before


def test_what_is_no_rollout_or_is_being_stopped_is_not_counted() -> None:
    assert (
        counted((), [("env", blocker("a/b")), ("env", blocker("x-a0")), ("env", blocker("r", "retire"))], ALL) == []
    )


def test_a_rollout_that_blocks_in_several_places_counts_once() -> None:
    assert [one.times for one in counted((), [("agent", blocker("r")), ("agent", blocker("r", "close"))], ALL)] == [1]


def test_the_counts_are_bounded_and_keep_the_worst() -> None:
    before = [blocked(f"old-{number}", 2) for number in range(12)]
    many = [("env", blocker(f"old-{n}")) for n in range(12)] + [("env", blocker(f"new-{n}")) for n in range(300)]
    after = counted(before, many, ALL)
    assert len(after) == MAX_COUNTED
    assert sum(one.times == 3 for one in after) == 12


@pytest.mark.parametrize(("limit", "found"), [(0, []), (1, ["a", "b", "c"]), (2, ["b", "c"]), (3, ["c"]), (4, [])])
def test_due_are_those_that_blocked_so_many_and_still_run(limit: int, found: list[str]) -> None:
    counts = [blocked("a", 1), blocked("b", 2), blocked("c", 3), blocked("gone", 9)]
    assert [one.rollout for one in due(counts, limit, {"a", "b", "c", "gone-a1"})] == found


def test_only_so_many_are_restarted_and_remembered_at_once() -> None:
    counts = [blocked(f"r-{number}", 3) for number in range(100)]
    first = due(counts, 3, {one.rollout for one in counts})
    assert len(first) == MAX_AT_ONCE
    known = restarted(first, (), 5.0)
    assert known == [Restarted(**one.model_dump(), at=5.0) for one in first]
    assert restarted([blocked("last", 3)], known, 6.0)[-1].rollout == "last"
    assert len(restarted([blocked("last", 3)], known, 6.0)) == MAX_AT_ONCE


def test_what_runs_is_what_the_environment_says() -> None:
    def said(kind: str, **report: object) -> Status:
        return Status(
            kind=kind,
            instance=kind,
            session="s",
            phase="idle",
            cell_attempt=0,
            report=Report.model_validate({"ready": True, **report}),
        )

    statuses = {
        "env": said("environment", episodes=["a"], restarts=["b-a1"]),
        "agent": said("agent", restarts=["c"]),
        "policy": said("model"),
    }
    assert live_keys(statuses) == {"a", "b-a1"}


def test_people_are_told_who_where_and_for_how_long() -> None:
    assert described([blocked("r", 3, attempt=2)]) == (
        "r-a2 blocked 3 checkpoints in a row, last in verify at env for 1 s"
    )


def test_the_counts_are_part_of_the_record() -> None:
    record = CellRecord(blocked=[blocked("r", 2)], restarted=restarted([blocked("s", 3)], (), 1.5))
    assert CellRecord.model_validate_json(record.model_dump_json(by_alias=True)) == record
