"""When a cell gets other pods on purpose, and what is done about it."""

from __future__ import annotations

from typing import Any

import pytest

from gym_operator.api.conditions import ConditionReason
from gym_operator.rules.observed import CellSeen, Observed
from gym_operator.rules.pod_state import PodState
from gym_operator.rules.rollout_status import roll_out
from gym_operator.rules.rollouts import (
    BUDGET_SECONDS,
    EVICTION_SECONDS,
    TRIES,
    Cause,
    Discard,
    Replace,
    Situation,
    Standing,
    Take,
    Turn,
    cause_of,
    is_due,
    left_to_the_drain,
    next_move,
    outdated,
    standing_of,
    whose_turn,
    yields,
)
from gym_servers.coordination.record import CellRecord, Hold, Pin, Recovery, Stage
from gym_servers.stack.spec import Participant

NEW = {"env": "new", "agent": "new"}
PINS = {name: Pin(incarnation=f"{name}/1", session="s") for name in NEW}


def pod(server: str, **parts: Any) -> PodState:
    known: dict[str, Any] = {
        "uid": server,
        "name": f"demo-{server}-0",
        "namespace": "team",
        "stack": "demo",
        "stack_uid": "s",
        "server": server,
        "cell": 0,
        "version": 1,
        "created": "",
        "incarnation": f"{server}/1",
        "alive": True,
        "ready": True,
        "address": "10.0.0.1",
        "node": "node-1",
        "detail": "",
        "grace": None,
        "template": "new",
    }
    return PodState(**{**known, **parts})


def pods(**changes: dict[str, Any]) -> dict[str, PodState]:
    return {name: pod(name, **changes.get(name, {})) for name in NEW}


OLD = {"agent": {"template": "old"}}
LEAVING = {"env": {"leaving": True, "grace": 1.0, "detail": "deleted"}}


def situation(stage: Stage = Stage.RUNNING, changes: Any = None, record: Any = None, **parts: Any) -> Situation:
    known: dict[str, Any] = {"free": True, "templates": NEW}
    found = CellRecord(stage=stage, **{"pins": PINS, **(record or {})})
    return Situation(record=found, pods=pods(**(changes or {})), **{**known, **parts})


def test_what_is_as_it_should_be_is_left_alone() -> None:
    for stage in Stage:
        assert next_move(situation(stage)) is None
    assert cause_of(situation()) is None


@pytest.mark.parametrize(
    ("changes", "parts", "reason", "urgent"),
    [
        (LEAVING, {}, "env is being ended: its pod was deleted", True),
        ({**LEAVING, **OLD}, {"turn": False}, "env is being ended: its pod was deleted", True),
        (OLD, {}, "the spec has another image or other settings for agent", False),
        ({"agent": {"template": None}}, {}, "the spec has another image or other settings for agent", False),
        ({}, {"templates": {**NEW, "tools": "new"}}, "the spec has other servers: tools", False),
        ({}, {"templates": {"env": "new"}}, "the spec has other servers: agent", False),
        ({}, {"cordoned": {"node-1"}}, "node node-1 of agent is cordoned", False),
    ],
)
def test_a_cell_that_loses_its_pods_is_stopped_by_a_last_checkpoint(
    changes: Any, parts: Any, reason: str, urgent: bool
) -> None:
    found = situation(changes=changes, **parts)
    assert cause_of(found) == Cause(reason, urgent, unchanged="cordoned" in reason)
    assert next_move(found) == Take(reason)


def test_a_move_off_a_node_is_one_to_the_same_only_where_that_is_known() -> None:
    """It may stand on its old node with an old image, and an operator that has just begun has applied nothing yet."""
    off = {"cordoned": {"node-1"}}
    for found, unchanged in [
        (situation(**off), True),
        (situation(changes=OLD, **off), False),
        (situation(templates={}, **off), False),
    ]:
        cause = cause_of(found)
        assert cause is not None and cause.unchanged is unchanged


def test_what_is_not_known_is_no_reason() -> None:
    """An operator that has just begun has applied nothing yet."""
    assert cause_of(situation(changes=OLD, templates={})) is None
    assert next_move(Situation(None, pods(), NEW)) is None


@pytest.mark.parametrize("parts", [{"turn": False}, {"storage_ok": False}, {"free": False}])
def test_what_can_wait_waits(parts: Any) -> None:
    found = situation(changes=OLD, **parts)
    assert next_move(found) is None
    assert is_due(found) == ("free" in parts)


@pytest.mark.parametrize(("changes", "tries"), [(LEAVING, 1), (OLD, TRIES)])
def test_a_last_checkpoint_that_fails_is_not_tried_for_ever(changes: Any, tries: int) -> None:
    moves = [next_move(situation(changes=changes, failed=failed)) for failed in range(tries + 1)]
    assert [type(move) for move in moves] == [Take] * tries + [Replace]


def test_what_goes_on_in_a_cell_is_let_end() -> None:
    assert next_move(situation(changes=LEAVING, busy=True, free=False)) is None
    assert next_move(situation(changes=LEAVING, free=False)) is None


@pytest.mark.parametrize("stage", [Stage.REPLACING, Stage.STOPPED])
def test_a_recovery_is_not_disturbed(stage: Stage) -> None:
    assert next_move(situation(stage, OLD)) is None
    assert not is_due(situation(stage, OLD))


def test_pods_that_nothing_was_begun_in_are_made_anew() -> None:
    assert next_move(situation(Stage.STARTING, OLD, {"pins": {}}, free=False)) == Discard(frozenset({"agent"}))
    assert next_move(situation(Stage.STARTING, OLD, free=False)) is None, "they are being restored"
    gone = {"agent": {"template": "old", "grace": 1.0}}
    assert next_move(situation(Stage.STARTING, gone, {"pins": {}}, free=False)) is None, "it goes already"


@pytest.mark.parametrize(("stage", "record"), [(Stage.STARTING, {"held": "other code"}), (Stage.STALLED, {})])
def test_a_cell_that_cannot_get_further_is_tried_again_with_what_the_spec_says_now(stage: Stage, record: Any) -> None:
    move = next_move(situation(stage, OLD, record, free=False))
    assert move == Replace("the spec has another image or other settings for agent")
    assert next_move(situation(stage, {}, record, free=False)) is None


def test_the_names_of_what_is_outdated_are_sorted_and_those_of_others_left_out() -> None:
    found = pods(agent={"template": "old"}, env={"template": "old"})
    assert outdated({**found, "removed": pod("removed", template="old")}, NEW) == ["agent", "env"]


PLACE, SPEC = Cause("its node is cordoned", urgent=False, unchanged=True), Cause("another image", urgent=False)
ENDED = Cause("its pod was deleted", urgent=True)
S, C, W = Standing.SERVES, Standing.COMES, Standing.WAITS


@pytest.mark.parametrize("cause", [PLACE, SPEC])
@pytest.mark.parametrize(
    ("standing", "due", "begun", "turn"),
    [
        ([S, S], [0, 1], [], Turn(0)),
        ([S, S], [1], [], Turn(1)),
        ([S, S], [0, 1], [1], Turn(1)),
        ([C, S], [1], [], Turn(after=(0,))),
        ([S, C], [0], [], Turn(after=(1,))),
        ([C, S], [0], [], Turn()),
        ([S, S], [], [], Turn()),
        ([W, C, S], [2], [], Turn(after=(1,))),
    ],
)
def test_one_cell_at_a_time_and_none_while_another_comes_up(
    standing: list[Standing], due: list[int], begun: list[int], turn: Turn, cause: Cause
) -> None:
    causes = {i: cause if i in due else None for i in range(len(standing))}
    assert whose_turn(dict(enumerate(standing)), causes, begun) == turn


@pytest.mark.parametrize(
    ("causes", "begun", "turn"),
    [
        ([None, PLACE, PLACE], [], Turn(1)),
        ([PLACE, PLACE, PLACE], [], Turn(1)),
        ([None, PLACE, PLACE], [2], Turn(2)),
        ([None, SPEC, SPEC], [], Turn(after=(0,))),
        ([None, SPEC, PLACE], [], Turn(2, after=(0,))),
        ([None, SPEC, PLACE], [1], Turn(after=(0,))),
        ([SPEC, None, None], [], Turn()),
    ],
)
def test_past_a_cell_that_waits_for_people_others_get_another_place_and_nothing_else(
    causes: list[Cause | None], begun: list[int], turn: Turn
) -> None:
    """What the spec says is not known to be good before a cell that has it is in service."""
    assert whose_turn({0: W, 1: S, 2: S}, dict(enumerate(causes)), begun) == turn


@pytest.mark.parametrize("other", [C, W])
@pytest.mark.parametrize(("second", "after"), [(None, ()), (ENDED, ()), (SPEC, (0,))])
def test_a_cell_that_loses_its_pods_whatever_is_done_is_not_said_to_wait(
    other: Standing, second: Cause | None, after: tuple[int, ...]
) -> None:
    assert whose_turn({0: other, 1: S, 2: S}, {0: None, 1: ENDED, 2: second}, []).after == after


DIED, MOVED = {"planned": False}, {"planned": True}


def tries(*each: dict[str, Any]) -> list[Recovery]:
    return [
        Recovery(**{"attempt": n, "reason": "", "checkpoint": None, "started_at": 0.0, **one})
        for n, one in enumerate(each)
    ]


@pytest.mark.parametrize(
    ("record", "standing"),
    [
        (CellRecord(stage=Stage.RUNNING), S),
        (CellRecord(stage=Stage.STALLED), W),
        (CellRecord(stage=Stage.STALLED, recoveries=tries(DIED, DIED)), W),
        (CellRecord(stage=Stage.STALLED, recoveries=tries({**MOVED, "seconds": 1.0}, DIED)), W),
        (CellRecord(stage=Stage.STALLED, recoveries=tries(MOVED, DIED)), C),
        (CellRecord(stage=Stage.STARTING, held="people decide", held_for=Hold.POLICY), W),
        (CellRecord(stage=Stage.STARTING, held="other code", recoveries=tries(MOVED)), W),
        (CellRecord(stage=Stage.STARTING), C),
        (CellRecord(stage=Stage.REPLACING, held="people decide", held_for=Hold.POLICY), C),
        (CellRecord(stage=Stage.STOPPED), C),
        (None, C),
    ],
)
def test_a_cell_waits_for_people_unless_it_was_moved_and_did_not_come_up_again(
    record: CellRecord | None, standing: Standing
) -> None:
    """Where the next one would be moved to as well: that stops at one."""
    assert standing_of(record) is standing


# ---- what the stack says ----------------------------------------------------------------------------------


def said(*cells: CellSeen) -> tuple[str, str, str]:
    return roll_out(Observed(generation=1, participants=(Participant("env", "environment", "e"),), cells=cells))


def test_the_condition_says_why_and_how_far() -> None:
    cause = Cause("node a of env is cordoned", urgent=False)
    assert said(CellSeen(0), CellSeen(1)) == ("True", ConditionReason.UP_TO_DATE, "")
    assert said(CellSeen(0), CellSeen(1, cause=cause, trouble="full")) == (
        "False",
        ConditionReason.ROLLING_OUT,
        "cell 1: node a of env is cordoned (its last checkpoint failed: full)",
    )


def test_pods_that_do_not_come_up_are_told_before_all_else() -> None:
    stuck = {"agent": pod("agent", alive=False, ready=False, detail="ImagePullBackOff: no such image")}
    cause = Cause("another image", urgent=False)
    value, reason, message = said(CellSeen(0, cause=cause), CellSeen(1, pods=stuck))
    assert (value, reason) == ("False", ConditionReason.PODS_NOT_STARTING)
    assert message == (
        "cell 1: agent: ImagePullBackOff: no such image; no other cell is replaced before it is in service: put the "
        "image or the settings in the spec right"
    )
    assert said(CellSeen(0, pods=stuck))[2].startswith("agent: ImagePullBackOff: no such image: put the image")
    given_up = CellRecord(stage=Stage.STALLED)
    message = said(CellSeen(0, cause=cause), CellSeen(1, pods=stuck, record=given_up))[2]
    assert "; no other cell gets another image or other settings before it is in service: put the" in message


@pytest.mark.parametrize(
    ("after", "begins"),
    [((1,), "cell 1 has to be in service first; "), ((1, 2), "cells 1, 2 have to be in service ")],
)
def test_the_condition_says_who_is_waited_for(after: tuple[int, ...], begins: str) -> None:
    cells = (CellSeen(0, cause=PLACE), CellSeen(1), CellSeen(2))
    seen = Observed(generation=1, participants=(), cells=cells, after=after)
    message = roll_out(seen)[2]
    assert message.startswith(begins) and message.endswith("; cell 0: its node is cordoned")


REPLACING = CellRecord(stage=Stage.REPLACING)


@pytest.mark.parametrize(
    ("record", "changes", "yielded"),
    [
        (REPLACING, {}, True),
        (REPLACING, {"agent": {"node": "node-2"}}, True),
        (REPLACING, {"agent": {"node": "node-2"}, "env": {"node": "node-2"}}, False),
        (REPLACING, {"agent": {"grace": 1.0}, "env": {"grace": 1.0}}, False),
        (CellRecord(stage=Stage.STALLED), {}, True),
        (CellRecord(stage=Stage.STARTING), {}, True),
        (CellRecord(stage=Stage.STARTING, pins=PINS), {}, False),
        (CellRecord(stage=Stage.STARTING, pins=PINS, held="people decide"), {}, True),
        (CellRecord(stage=Stage.RUNNING, pins=PINS), {}, False),
        (CellRecord(stage=Stage.STOPPED, pins=PINS), {}, False),
        (None, {}, False),
    ],
)
def test_pods_are_for_who_drains_where_nothing_that_they_do_counts(
    record: CellRecord | None, changes: Any, yielded: bool
) -> None:
    assert yields(record, pods(**changes), {"node-1"}) is yielded


@pytest.mark.parametrize(
    ("wanted", "evictable", "left"),
    [
        (0.0, None, True),
        (BUDGET_SECONDS - 1, None, True),
        (BUDGET_SECONDS, None, False),
        (30.0, 0.0, True),
        (30.0, EVICTION_SECONDS - 1, True),
        (30.0, EVICTION_SECONDS, False),
        (0.0, 100.0, True),
        (EVICTION_SECONDS, 100.0, False),
    ],
)
def test_who_drains_has_its_time_from_when_it_is_let_through_and_from_when_the_pod_is_to_go(
    wanted: float, evictable: float | None, left: bool
) -> None:
    assert left_to_the_drain(wanted, evictable) is left
