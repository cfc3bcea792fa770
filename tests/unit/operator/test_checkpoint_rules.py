"""Checkpoints: which is next, what becomes of it, and which phase may follow which."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from gym_operator.api.checkpoint import TERMINAL, CheckpointStatus
from gym_operator.api.conditions import ConditionReason, ConditionType, get_condition
from gym_operator.rules import checkpoint_phases as phases
from gym_operator.rules import checkpoint_queue as queue
from gym_servers.coordination.record import Stage
from gym_servers.protocol.messages import Blocker
from gym_servers.storage.manifest import CodeIdentity, Member, Publication

NOW = 1_800_000_000.0
CALM = queue.Situation(enabled=True, stage=Stage.RUNNING, free=True, open_id=None, obstacle=None)
OBSTACLE = (ConditionReason.STORAGE_FAILED, "the bucket does not exist")


def status(phase: Any = None) -> CheckpointStatus:
    return CheckpointStatus(phase=phase)


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
    assert isinstance(queue.next_move(status(phase), "id", age, situation), move)


def test_what_is_held_or_failed_says_why() -> None:
    held = queue.next_move(status(), "id", 0.0, replace(CALM, obstacle=OBSTACLE))
    assert held == queue.Hold(*OBSTACLE)
    assert queue.next_move(status(), "id", 99.0, replace(CALM, obstacle=OBSTACLE)) == queue.Fail(*OBSTACLE)


def test_a_checkpoint_without_a_stack_waits_a_while() -> None:
    assert isinstance(queue.without_stack(status(), "ghost", 1.0), queue.Hold)
    failed = queue.without_stack(status(), "ghost", 61.0)
    assert isinstance(failed, queue.Fail)
    assert "ghost" in failed.message
    assert isinstance(queue.without_stack(status("Committing"), "ghost", 0.0), queue.Fail)


def test_terminal_is_final_and_every_phase_can_fail() -> None:
    for phase in ("Pending", *phases.OPEN):
        assert phases.failed(status(phase), "Any", "", 1, NOW).phase == "Failed"
    for phase, following in product(TERMINAL, phases.OPEN):
        with pytest.raises(ValueError, match="does not go from"):
            phases.under_way(status(phase), following, "id", "uri", 0, (), {}, 1, NOW)
    with pytest.raises(ValueError, match="Succeeded to Failed"):
        phases.failed(status("Succeeded"), "Any", "", 1, NOW)
    with pytest.raises(ValueError, match="Pending to Publishing"):
        phases.under_way(status("Pending"), "Publishing", "id", "uri", 0, (), {}, 1, NOW)


def test_a_failure_is_stalled_for_tools_and_explained_for_people() -> None:
    begun = phases.under_way(status(), "Preparing", "id", "s3://b/c", 2, [pinned()], {"env": "closed"}, 1, NOW)
    blockers = [("env", Blocker(id="r-1", where="x" * 300, age_seconds=-1.0))] * 150
    final = phases.failed(begun, "PrepareTimeout", "m" * 2000, 1, NOW + 5, blockers)
    assert (final.reason, final.start_time, final.completion_time) == (
        "PrepareTimeout",
        "2027-01-15T08:00:00Z",
        "2027-01-15T08:00:05Z",
    )
    assert len(final.message or "") == 1024
    assert len(final.blockers) == 100
    assert final.cells[0].phase == "Failed"
    succeeded = get_condition(final.conditions, ConditionType.SUCCEEDED)
    stalled = get_condition(final.conditions, ConditionType.STALLED)
    assert succeeded and succeeded.status == "False"
    assert stalled and stalled.status == "True"
    assert stalled.reason == "PrepareTimeout"


def test_a_success_says_what_was_kept() -> None:
    begun = phases.under_way(status("Committing"), "Publishing", "id", "s3://b/c", 2, [pinned()], {}, 1, NOW)
    final = phases.succeeded(begun, publication(), "s3://b/c", "d" * 64, 0.12345, 1, NOW)
    assert (final.phase, final.episodes, final.bytes, final.pause_seconds) == ("Succeeded", 2, 10, 0.123)
    assert (final.restart_count, len(final.restarts)) == (150, 100)
    (member,) = final.participants
    assert (member.pod, member.session, member.records, member.phase) == ("demo-env-0", "s-2", 3, "committed")
    assert final.cells[0].digest == "d" * 64


def test_an_unknown_word_is_no_reason() -> None:
    final = phases.failed(status(), "not a word", "", 1, NOW)
    assert get_condition(final.conditions, ConditionType.SUCCEEDED).reason == "Unknown"  # type: ignore[union-attr]


def pinned() -> phases.Pinned:
    return phases.Pinned("env", "environment", "demo-env-0", "uid", "s-1")


def publication() -> Publication:
    code = CodeIdentity(image="", server="single-agent-turn", config_digest="", record_format=1)
    member = Member(
        kind="environment", instance="env", session="s-2", manifest_digest="m", records=3, bytes=10, code=code
    )
    return Publication(
        state="published",
        checkpoint_id="id",
        name="one",
        stack_uid="s",
        cell=0,
        cell_attempt=2,
        sequence=1,
        created=NOW,
        members=[member],
        episodes=["r-1", "r-2"],
        restarts=[f"r-{n}" for n in range(150)],
    )
