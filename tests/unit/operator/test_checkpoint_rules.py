"""Checkpoints: which is next, what becomes of it, and which phase may follow which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from gym_operator.api.checkpoint import TERMINAL, CheckpointCell, CheckpointStatus
from gym_operator.api.conditions import ConditionReason, ConditionType, get_condition
from gym_operator.rules import checkpoint_phases as phases
from gym_operator.rules import checkpoint_queue as queue
from gym_servers.coordination.record import Stage
from gym_servers.protocol.messages import Blocker, Report, Status
from gym_servers.storage.manifest import CodeIdentity, Member, Publication
from gym_servers.storage.store import StorageProblem

NOW = 1_800_000_000.0
AT = phases.At(1, NOW)
CALM = queue.Situation(enabled=True, stage=Stage.RUNNING, free=True, open_id=None, obstacle=None)
OBSTACLE = (StorageProblem.FAILED, "the bucket does not exist")


def status(phase: Any = None) -> CheckpointStatus:
    """A checkpoint of one cell whose part is in this phase."""
    if phase in (None, "Pending"):
        return CheckpointStatus(phase=phase)
    return CheckpointStatus(phase=phase, cells=(CheckpointCell(index=0, phase=phase, uri="s3://b/c"),))


def begin(
    before: CheckpointStatus, phase: Any, index: int = 0, among: Sequence[int] = (0,), **standing: str
) -> CheckpointStatus:
    which = phases.Which(index, among)
    return phases.under_way(before, which, phase, "id", f"s3://b/{index}", 2, [pinned()], standing, AT)


def succeed(before: CheckpointStatus, index: int = 0, among: Sequence[int] = (0,)) -> CheckpointStatus:
    which, uri = phases.Which(index, among), f"s3://b/{index}"
    return phases.part_succeeded(before, which, publication(index), uri, "d" * 64, 0.12345 + index, AT)


def fail(
    before: CheckpointStatus, index: int = 0, among: Sequence[int] = (0,), message: str = "no"
) -> CheckpointStatus:
    return phases.part_failed(before, phases.Which(index, among), "PrepareTimeout", message, AT)


def test_ids_are_unique_and_safe() -> None:
    long = phases.checkpoint_id("x" * 253, "7d9c8f5e-0000-4000-8000-000000000001")
    assert long.startswith("xxx")
    assert long.endswith("-7d9c8f5e")
    assert len(long) <= 128


def test_the_order_is_of_creation_then_of_names() -> None:
    def named(name: str, created: str) -> dict[str, Any]:
        return {"metadata": {"name": name, "creationTimestamp": created}}

    given = [
        named("b", "2027-01-15T08:00:01Z"),
        named("c", "2027-01-15T08:00:00Z"),
        named("a", "2027-01-15T08:00:01Z"),
    ]
    assert [each["metadata"]["name"] for each in queue.in_order(given)] == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("phase", "situation", "age", "move"),
    [
        (None, CALM, 0.0, queue.Take),
        ("Pending", CALM, 0.0, queue.Take),
        ("Pending", replace(CALM, free=False), 0.0, queue.Hold),
        ("Pending", replace(CALM, stage=Stage.REPLACING), 1e6, queue.Hold),
        ("Pending", replace(CALM, stage=None), 1e6, queue.Hold),
        ("Pending", replace(CALM, obstacle=OBSTACLE), 1.0, queue.Hold),
        ("Pending", replace(CALM, obstacle=OBSTACLE), 61.0, queue.Fail),
        ("Pending", replace(CALM, storage_proved=False), 1e6, queue.Hold),
        ("Pending", replace(CALM, enabled=False), 0.0, queue.Fail),
        ("Pending", replace(CALM, open_id="id"), 0.0, queue.Adopt),
        ("Preparing", CALM, 0.0, queue.Resolve),
        ("Publishing", replace(CALM, obstacle=OBSTACLE), 1e6, queue.Resolve),
        ("Committing", replace(CALM, open_id="id"), 0.0, queue.Hold),
        ("Committing", replace(CALM, open_id="another"), 0.0, queue.Resolve),
    ],
)
def test_what_to_do_about_the_first(phase: Any, situation: queue.Situation, age: float, move: type) -> None:
    assert isinstance(queue.next_move(phase or "Pending", "id", age, situation), move)


@pytest.mark.parametrize("phase", sorted(phases.OPEN))
def test_k2_what_was_deleted_waits_for_no_tombstone_for_ever_unless_it_may_still_be_published(phase: Any) -> None:
    publishing = replace(CALM, open_id="id")
    given_up, resolved = replace(publishing, given_up=True), CALM
    for situation, before in ((given_up, queue.Hold), (resolved, queue.Resolve)):
        assert queue.hinders(situation, last=False, unwanted=True)
        assert isinstance(queue.next_move(phase, "id", 59.0, situation, unwanted=True), before)
        assert isinstance(queue.next_move(phase, "id", 61.0, situation, unwanted=True), queue.Fail)
        assert isinstance(queue.next_move(phase, "id", 1e6, situation), before), "somebody wants to know"
    assert isinstance(queue.next_move(phase, "id", 59.0, publishing, unwanted=True), queue.Hold)
    assert isinstance(queue.next_move(phase, "id", 61.0, publishing, unwanted=True), queue.Forsake)
    assert isinstance(queue.next_move(phase, "id", 1e6, publishing), queue.Hold)
    elsewhere = replace(given_up, elsewhere=True)
    assert not queue.hinders(elsewhere, last=False, unwanted=True)


def test_a_cell_that_is_not_in_service_is_waited_for_while_others_are_at_work() -> None:
    """In a stack of one cell for as long as it takes; where all other cells are done, not for ever."""
    down = replace(CALM, stage=Stage.REPLACING, free=False)
    assert not queue.hinders(down, last=False)
    assert isinstance(queue.next_move("Pending", "id", 0.0, down), queue.Hold)
    assert queue.hinders(down, last=True)
    assert isinstance(queue.next_move("Pending", "id", 59.0, down, last=True), queue.Hold)
    assert isinstance(queue.next_move("Pending", "id", 61.0, down, last=True), queue.Fail)
    assert queue.hinders(replace(CALM, obstacle=OBSTACLE), last=False)
    assert not queue.hinders(CALM, last=True)


def test_what_is_held_or_failed_says_why() -> None:
    held = queue.next_move("Pending", "id", 0.0, replace(CALM, obstacle=OBSTACLE))
    assert held == queue.Hold(*OBSTACLE)
    assert queue.next_move("Pending", "id", 99.0, replace(CALM, obstacle=OBSTACLE)) == queue.Fail(*OBSTACLE)


def test_a_checkpoint_without_a_stack_waits_a_while() -> None:
    assert isinstance(queue.without_stack(status(), "ghost", 1.0), queue.Hold)
    failed = queue.without_stack(status(), "ghost", 61.0)
    assert isinstance(failed, queue.Fail)
    assert "ghost" in failed.message
    assert isinstance(queue.without_stack(status("Committing"), "ghost", 0.0), queue.Fail)


def test_terminal_is_final_and_every_phase_can_fail() -> None:
    for phase in ("Pending", *phases.OPEN):
        assert phases.failed(status(phase), "Any", "", AT).phase == "Failed"
        assert fail(status(phase)).phase == "Failed"
    for phase, following in product(TERMINAL, phases.OPEN):
        with pytest.raises(ValueError, match="does not go from"):
            begin(status(phase), following)
    with pytest.raises(ValueError, match="Succeeded to Failed"):
        phases.failed(status("Succeeded"), "Any", "", AT)
    with pytest.raises(ValueError, match="Succeeded to Failed"):
        fail(status("Succeeded"))
    with pytest.raises(ValueError, match="Pending to Publishing"):
        begin(status("Pending"), "Publishing")


def test_a_failure_is_stalled_for_tools_and_explained_for_people() -> None:
    begun = begin(status(), "Preparing", env="closed")
    blockers = [("env", Blocker(id="r-1", where="x" * 300, age_seconds=-1.0))] * 150
    later = phases.At(1, NOW + 5)
    final = phases.part_failed(begun, phases.Which(0), "PrepareTimeout", "m" * 2000, later, blockers)
    assert (final.reason, final.start_time, final.completion_time) == (
        "PrepareTimeout",
        "2027-01-15T08:00:00Z",
        "2027-01-15T08:00:05Z",
    )
    assert len(final.message or "") == len(final.cells[0].message or "") == 512
    assert len(final.blockers) == 100
    assert final.cells[0].phase == "Failed"
    succeeded = get_condition(final.conditions, ConditionType.SUCCEEDED)
    stalled = get_condition(final.conditions, ConditionType.STALLED)
    assert succeeded and succeeded.status == "False"
    assert stalled and stalled.status == "True"
    assert stalled.reason == "PrepareTimeout"


def test_what_a_checkpoint_waits_for_is_another_status_only_where_it_is_something_else() -> None:
    def waits(*blockers: Blocker, cell: int = 0, before: CheckpointStatus, after: float = 0.0) -> CheckpointStatus:
        which, told = phases.Which(cell, (0, 1)), [("env", each) for each in blockers]
        return phases.held_up(before, which, told, phases.At(1, NOW + after))

    def names(status: CheckpointStatus) -> list[tuple[int, str, str, str | None]]:
        return [(each.cell, each.id, each.where, each.since) for each in status.blockers]

    both = begin(begin(status(), "Preparing", 0, (0, 1)), "Preparing", 1, (0, 1))
    first = waits(Blocker(id="r-1", where="verify", age_seconds=10), before=both)
    assert names(first) == [(0, "r-1", "verify", "2027-01-15T07:59:50Z")]
    assert waits(Blocker(id="r-1", where="verify", age_seconds=71.3), before=first, after=60) is first
    two = [Blocker(id="r-2", where="", age_seconds=0), Blocker(id="r-1", where="verify", age_seconds=71.3)]
    second = waits(*two, before=first, after=60)
    assert names(second) == [(0, "r-2", "", "2027-01-15T08:01:00Z"), (0, "r-1", "verify", "2027-01-15T07:59:50Z")]
    assert waits(*reversed(two), before=second, after=60) is second, "in whatever order"
    other = waits(Blocker(id="r-9", where="verify", age_seconds=0), before=second, cell=1)
    assert names(other) == [*names(second), (1, "r-9", "verify", "2027-01-15T08:00:00Z")]
    assert names(waits(before=other)) == names(other)[2:]
    assert names(begin(other, "Committing", 0, (0, 1))) == names(other)[2:], "nothing is waited for any more"
    assert len(waits(*[Blocker(id=str(n), where="", age_seconds=0) for n in range(150)], before=both).blockers) == 100
    late = begin(both, "Committing", 0, (0, 1))
    assert waits(*two, before=late) is late, "it was asked too late"
    lost = phases.part_failed(other, phases.Which(0, (0, 1)), "PrepareTimeout", "no", AT, [("env", two[1])])
    assert [(each.cell, each.id, each.age_seconds, each.since is None) for each in lost.blockers] == [
        (1, "r-9", 0, False),
        (0, "r-1", 71.3, True),
    ]
    assert names(phases.failed(lost, "StackNotFound", "gone", AT)) == [(0, "r-1", "verify", None)]


def test_what_is_waited_for_is_what_those_say_that_are_being_prepared_for_it() -> None:
    def said(phase: str, id: str | None, *blockers: str) -> Status:
        report = Report(ready=not blockers, blockers=[Blocker(id=each, where="", age_seconds=1) for each in blockers])
        return Status(
            kind="agent",
            instance="a",
            session="s",
            phase=phase,
            cell_attempt=0,
            checkpoint_id=id,
            report=report,
        )

    statuses = {
        "a": said("preparing", "mine", "r-1", "r-2"),
        "b": said("prepared", "mine", "r-3"),
        "c": said("preparing", "another", "r-4"),
        "d": said("idle", None, "r-5"),
    }
    assert [(name, each.id) for name, each in phases.waited_for(statuses, "mine")] == [("a", "r-1"), ("a", "r-2")]


def test_a_success_says_what_was_kept() -> None:
    final = succeed(begin(status("Committing"), "Publishing"))
    assert (final.phase, final.episodes, final.bytes, final.pause_seconds) == ("Succeeded", 2, 10, 0.123)
    assert (final.restart_count, len(final.restarts)) == (150, 100)
    assert (final.uri, final.digest) == ("s3://b/0", "d" * 64)
    (part,) = final.cells
    (member,) = part.participants
    assert (member.pod, member.session, member.records, member.phase) == ("demo-env-0", "s-2", 3, "committed")
    assert (part.digest, part.attempt, part.episodes, part.bytes) == ("d" * 64, 2, 2, 10)
    assert succeed(final) == final, "said again it is the same"


def test_an_unknown_word_is_no_reason() -> None:
    final = phases.failed(status(), "not a word", "", AT)
    assert get_condition(final.conditions, ConditionType.SUCCEEDED).reason == "Unknown"  # type: ignore[union-attr]


# ---- several cells ----------------------------------------------------------------------------------------


def test_the_whole_never_goes_back_however_its_parts_follow_each_other() -> None:
    """One cell after the other: the second begins when the first has published."""
    among, seen = (0, 1), list[str | None]()
    now = status()
    for index in among:
        for phase in ("Preparing", "Committing", "Publishing"):
            now = begin(now, phase, index, among)
            seen.append(now.phase)
        now = succeed(now, index, among)
        seen.append(now.phase)
    order = ["Preparing", "Committing", "Publishing", "Succeeded"]
    assert seen == sorted(seen, key=lambda phase: order.index(phase or ""))
    assert seen == ["Preparing"] * 5 + ["Committing", "Publishing", "Succeeded"]
    assert (now.episodes, now.bytes, now.pause_seconds, now.restart_count) == (4, 20, 1.123, 300)
    assert (now.uri, now.digest) == (None, None), "each part has its own place"
    assert [part.uri for part in now.cells] == ["s3://b/0", "s3://b/1"]


def test_parts_side_by_side_stand_where_the_slowest_stands() -> None:
    among = (0, 1)
    now = begin(begin(status(), "Preparing", 0, among), "Preparing", 1, among)
    now = begin(now, "Committing", 0, among)
    assert now.phase == "Preparing"
    now = begin(now, "Committing", 1, among)
    assert (now.phase, now.message) == ("Committing", "0 of 2 cells are done; records are being frozen and written")
    now = fail(begin(now, "Publishing", 0, among), 1, among)
    assert now.phase == "Publishing"
    assert succeed(now, 0, among).phase == "Failed"


def test_one_lost_part_fails_the_whole_and_the_others_keep_what_they_have() -> None:
    among = (0, 1, 2, 3)
    now = status()
    for index in among:
        now = begin(now, "Preparing", index, among)
    for index in among:
        now = begin(now, "Committing", index, among)
    now = fail(now, 1, among, "env was not ready")
    assert now.phase == "Committing"
    now = succeed(succeed(now, 0, among), 3, among)
    now = fail(now, 2, among, "env was not ready")
    assert (now.phase, now.reason) == ("Failed", "PrepareTimeout")
    assert now.message == (
        "cells 0, 3 published what their own recovery continues from; cells 1, 2: env was not ready"
    )
    assert [part.phase for part in now.cells] == ["Succeeded", "Failed", "Failed", "Succeeded"]
    assert now.cells[0].digest


def test_what_a_given_up_checkpoint_has_published_stays() -> None:
    among = (0, 1)
    half = succeed(begin(begin(status(), "Preparing", 0, among), "Committing", 0, among), 0, among)
    final = phases.failed(half, "OperatorStopped", "the operator was stopped", AT)
    assert [(part.phase, part.reason) for part in final.cells] == [
        ("Succeeded", None),
        ("Failed", "OperatorStopped"),
    ]


def test_a_part_that_waits_says_so_beside_those_that_go_on() -> None:
    among = (0, 1)
    reason = ConditionReason.STACK_NOT_READY
    alone = phases.waiting(status(), phases.Which(1, among), reason, "waits", AT)
    assert (alone.phase, alone.reason, alone.message, alone.cells) == ("Pending", "StackNotReady", "waits", ())
    beside = phases.waiting(begin(status(), "Preparing", 0, among), phases.Which(1, among), reason, "waits", AT)
    assert (beside.phase, beside.cells[1].phase, beside.cells[1].message) == ("Preparing", "Pending", "waits")
    begun = begin(beside, "Preparing", 1, among)
    assert begun.cells[1].message is None


def pinned() -> phases.Pinned:
    return phases.Pinned("env", "environment", "demo-env-0", "uid", "s-1")


def publication(cell: int = 0) -> Publication:
    code = CodeIdentity(image="", server="single-agent-turn", config_digest="", record_format=1)
    member = Member(
        kind="environment", instance="env", session="s-2", manifest_digest="m", records=3, bytes=10, code=code
    )
    return Publication(
        state="published",
        checkpoint_id="id",
        name="one",
        stack_uid="s",
        cell=cell,
        cell_attempt=2,
        sequence=1,
        created=NOW,
        members=[member],
        episodes=["r-1", "r-2"],
        restarts=[f"r-{n}" for n in range(150)],
    )


@pytest.mark.parametrize("phase", ["Pending", "Preparing", "Committing", "Publishing"])
@pytest.mark.parametrize("last", [True, False])
def test_nothing_is_decided_about_a_part_that_another_operator_is_at(phase: Any, last: bool) -> None:
    """Above all no tombstone is written for what may be published there."""
    for stage, obstacle in product((None, Stage.RUNNING, Stage.REPLACING), (None, OBSTACLE)):
        there = replace(CALM, stage=stage, obstacle=obstacle, free=False, elsewhere=True)
        assert queue.next_move(phase, "id", 1e6, there, last=last) == queue.Hold()
        assert not queue.hinders(there, last)
