"""What a coordinator does next, for every kind of thing it can find - also when it was away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gym_servers.coordination.decide import (
    End,
    GoOn,
    Hold,
    Install,
    Open,
    Recover,
    Reopen,
    Seen,
    Settle,
    Start,
    Step,
    Tend,
    Wait,
    next_step,
)
from gym_servers.coordination.record import CellRecord, Choice, OpenCheckpoint, Pin, Stage, Stopped, tried_again
from gym_servers.protocol.messages import Report, Status

NAMES = ("agent", "env", "policy")
CHOICE = Choice(uri="u", digest="d", checkpoint_id="cp", name="cp")
OPEN = OpenCheckpoint(checkpoint_id="cp", name="cp", uri="u", sequence=1)
PINS = {name: Pin(incarnation=f"{name}-1", session=f"{name}-s1") for name in NAMES}


def status(name: str, phase: str, **changes: Any) -> Status:
    base = {"session": f"{name}-s1", "cell_attempt": 0}
    return Status(kind="agent", instance=name, phase=phase, report=Report(ready=True), **{**base, **changes})


def seen(phase: str | None = "idle", incarnation: str = "1", **changes: Any) -> dict[str, Seen]:
    """All three, alive; `phase` None: they do not answer."""
    return {
        name: Seen(f"{name}-{incarnation}", True, None if phase is None else status(name, phase, **changes))
        for name in NAMES
    }


def but(base: Mapping[str, Seen], **others: Seen) -> dict[str, Seen]:
    return {**base, **others}


def running(**changes: Any) -> CellRecord:
    return CellRecord(stage=Stage.RUNNING, pins=PINS).model_copy(update=changes)


def starting(**changes: Any) -> CellRecord:
    return CellRecord(stage=Stage.STARTING).model_copy(update=changes)


def step(record: CellRecord, found: Mapping[str, Seen], *, busy: bool = False) -> Step:
    return next_step(record, found, busy=busy)


# ---- replacing --------------------------------------------------------------------------------------------


def test_old_processes_are_ended_until_none_of_them_is_left() -> None:
    record = CellRecord(stage=Stage.REPLACING, ended={"agent": "agent-1", "env": "env-1"})
    assert step(record, seen()) == End({"agent": "agent-1", "env": "env-1"})
    half = but(seen(), agent=Seen("agent-2", True))
    assert step(record, half) == End({"env": "env-1"})
    assert step(record, but(half, env=Seen(None, False))) == Start()
    assert step(CellRecord(stage=Stage.REPLACING), seen()) == Start()


def test_a_process_that_is_ending_is_still_there() -> None:
    record = CellRecord(stage=Stage.REPLACING, ended={"agent": "agent-1"})
    assert step(record, but(seen(), agent=Seen("agent-1", False))) == End({"agent": "agent-1"})


# ---- starting ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", [Seen(None, False), Seen("agent-2", False)])
def test_nothing_is_installed_before_all_have_started(one: Seen) -> None:
    found = step(starting(), but(seen("starting"), agent=one))
    assert found == Wait("waiting for agent to start")


def test_nothing_is_installed_before_all_answer() -> None:
    assert step(starting(), but(seen("starting"), env=Seen("env-1", True))) == Wait("waiting for env to answer")


def test_fresh_processes_are_pinned_as_they_were_met() -> None:
    assert step(starting(), seen("starting")) == Install(PINS)


def test_while_an_installation_runs_only_a_death_matters() -> None:
    assert isinstance(step(starting(pins=PINS), seen("starting"), busy=True), Wait)
    died = step(starting(pins=PINS), but(seen("starting"), env=Seen("env-1", False)), busy=True)
    assert died == Recover("env has ended")


def test_a_coordinator_that_was_away_finishes_the_restore_that_all_come_from() -> None:
    record = starting(pins=PINS, restore=CHOICE, attempt=2)
    one = seen("restored", restored_from="r", cell_attempt=2)
    assert step(record, one) == Open()
    assert (
        step(record, but(one, env=Seen("env-1", True, status("env", "idle", restored_from="r", cell_attempt=2))))
        == Open()
    )


def test_a_coordinator_that_was_away_finishes_a_start_from_the_input() -> None:
    assert step(starting(pins=PINS, attempt=1), seen("idle", cell_attempt=1)) == Open()


@pytest.mark.parametrize(
    ("record", "odd"),
    [
        # restored from two restores
        (starting(pins=PINS, restore=CHOICE), {"phase": "restored", "restored_from": "other"}),
        # one went back to starting
        (starting(pins=PINS, restore=CHOICE), {"phase": "starting"}),
        # under another attempt
        (starting(pins=PINS, restore=CHOICE), {"phase": "restored", "restored_from": "r", "cell_attempt": 1}),
        # resumed without a restore
        (starting(pins=PINS, restore=CHOICE), {"phase": "idle"}),
        # a checkpoint is open in one
        (starting(pins=PINS, restore=CHOICE), {"phase": "prepared", "restored_from": "r"}),
    ],
)
def test_a_cell_that_is_neither_fresh_nor_of_one_restore_recovers_again(
    record: CellRecord, odd: dict[str, Any]
) -> None:
    rest = seen("restored", restored_from="r")
    assert isinstance(step(record, but(rest, env=Seen("env-1", True, status("env", **odd)))), Recover)


def test_a_restore_that_nobody_ordered_recovers_again() -> None:
    assert isinstance(step(starting(pins=PINS), seen("restored", restored_from="r")), Recover)
    assert isinstance(step(starting(pins=PINS, restore=CHOICE), seen("idle")), Recover)


def test_unknown_processes_that_somebody_coordinated_are_replaced() -> None:
    """The record was lost: no pin says which processes are meant."""
    assert isinstance(step(starting(), seen("idle")), Recover)


# ---- running ----------------------------------------------------------------------------------------------

DEATHS = {
    "env is gone": Seen(None, False),
    "env was replaced by another process": Seen("env-2", True, status("env", "starting")),
    "env has ended": Seen("env-1", False),
    "env has ended: OOMKilled": Seen("env-1", False, None, "OOMKilled"),
    "env was started again": Seen("env-1", True, status("env", "starting", session="env-s2")),
}


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("left", [None, OPEN])
@pytest.mark.parametrize("reason", DEATHS)
def test_a_death_in_service_is_a_recovery_whatever_else_goes_on(
    reason: str, left: OpenCheckpoint | None, busy: bool
) -> None:
    assert step(running(open=left), but(seen(), env=DEATHS[reason]), busy=busy) == Recover(reason)


@pytest.mark.parametrize("reason", DEATHS)
def test_a_death_while_starting_is_a_recovery_too(reason: str) -> None:
    found = but(seen("restored", restored_from="r"), env=DEATHS[reason])
    assert step(starting(pins=PINS, restore=CHOICE), found) == Recover(reason)


def test_silence_is_not_death() -> None:
    assert step(running(), but(seen(), env=Seen("env-1", True))) == Wait("no answer on control from env")


def test_back_in_starting_is_a_recovery() -> None:
    found = but(seen(), env=Seen("env-1", True, status("env", "starting")))
    assert step(running(), found) == Recover("env went back to starting")


def test_a_checkpoint_in_progress_is_left_alone() -> None:
    assert isinstance(step(running(open=OPEN), seen("prepared", checkpoint_id="cp"), busy=True), Wait)


def test_a_checkpoint_that_was_left_open_is_settled_first() -> None:
    assert step(running(open=OPEN), seen("prepared", checkpoint_id="cp")) == Settle()
    assert step(running(open=OPEN), seen("idle")) == Settle()


def test_whoever_is_closed_for_no_checkpoint_of_ours_is_opened() -> None:
    found = but(seen(), env=Seen("env-1", True, status("env", "committed", checkpoint_id="x")))
    assert step(running(), found) == Reopen({"env": "x"})


def test_in_service() -> None:
    assert step(running(), seen()) == Tend()


# ---- stopped ----------------------------------------------------------------------------------------------

STOPPED = Stopped(uri="u", digest="d", checkpoint_id="cp", name="cp")


def stopped(**changes: Any) -> CellRecord:
    return CellRecord(stage=Stage.STOPPED, pins=PINS, stopped=STOPPED.model_copy(update=changes))


def test_a_stopped_cell_is_kept_closed_under_the_checkpoint_that_stopped_it() -> None:
    closed = seen("committed", checkpoint_id="cp")
    assert step(stopped(), closed) == Hold(frozenset(NAMES))
    others = but(
        closed,
        env=Seen("env-1", True, status("env", "committed", checkpoint_id="another")),
        agent=Seen("agent-1", True, status("agent", "idle")),
    )
    assert step(stopped(), others) == Hold(frozenset({"policy"}))


@pytest.mark.parametrize("reason", DEATHS)
def test_the_end_of_a_process_of_a_stopped_cell_is_no_death(reason: str) -> None:
    found = but(seen("committed", checkpoint_id="cp"), env=DEATHS[reason])
    assert step(stopped(), found) == Hold(frozenset({"agent", "policy"}))


def test_while_the_checkpoint_that_stopped_it_ends_nothing_is_done() -> None:
    assert isinstance(step(stopped(), seen("committed", checkpoint_id="cp"), busy=True), Wait)


def test_a_released_cell_goes_on_by_its_own_processes_where_all_are_there() -> None:
    closed = seen("committed", checkpoint_id="cp")
    assert step(stopped(stays=False), closed) == GoOn()
    expired = but(closed, env=Seen("env-1", True, status("env", "idle")))
    assert step(stopped(stays=False), expired) == GoOn()
    silent = but(closed, env=Seen("env-1", True))
    assert step(stopped(stays=False), silent) == Wait("no answer on control from env")


@pytest.mark.parametrize(
    "one", [*DEATHS.values(), Seen("env-1", True, status("env", "prepared", checkpoint_id="another"))]
)
def test_a_released_cell_goes_on_by_fresh_processes_where_one_is_not_there(one: Seen) -> None:
    found = but(seen("committed", checkpoint_id="cp"), env=one)
    assert step(stopped(stays=False), found) == Recover("it was stopped by checkpoint cp", planned=True)


def test_a_stalled_cell_stays_as_it_is() -> None:
    for found in (seen(), seen("starting"), {name: Seen(None, False) for name in NAMES}):
        assert isinstance(step(running(stage=Stage.STALLED), found), Wait)


@pytest.mark.parametrize("stage", Stage)
def test_an_empty_cell_is_never_a_crash(stage: Stage) -> None:
    for busy in (True, False):
        assert step(CellRecord(stage=stage), {}, busy=busy) is not None


def test_the_record_survives_being_written_down() -> None:
    record = running(open=OPEN, restore=CHOICE, attempt=3, refused=["u"], stopped=STOPPED)
    assert CellRecord.model_validate_json(record.model_dump_json(by_alias=True)) == record
    assert "checkpointId" in record.model_dump_json(by_alias=True)


# ---- another try --------------------------------------------------------------------------------------------


def test_a_stalled_cell_is_tried_again_by_a_higher_limit() -> None:
    stalled = CellRecord(stage=Stage.STALLED, failures=6)
    assert tried_again(stalled, 5, suspended=False) is None
    raised = tried_again(stalled, 6, suspended=False)
    assert raised is not None
    assert (raised.stage, raised.failures) == (Stage.RUNNING, 5)
    for stage in set(Stage) - {Stage.STALLED}:
        assert tried_again(CellRecord(stage=stage, failures=1), 9, suspended=False) is None


@pytest.mark.parametrize("stage", Stage)
def test_the_recovery_after_a_suspension_is_no_failure_whatever_the_limit(stage: Stage) -> None:
    again = tried_again(CellRecord(stage=stage, failures=3), 0, suspended=True)
    assert again is not None
    assert again.stage is (Stage.RUNNING if stage is Stage.STALLED else stage)
    assert again.failures + 1 <= 0
    assert tried_again(again, 0, suspended=True) is None


# ---- processes that somebody else is about to end ---------------------------------------------------------


def leaving(base: Mapping[str, Seen]) -> dict[str, Seen]:
    return but(base, agent=replace(base["agent"], leaving=True))


def test_a_process_in_service_that_is_about_to_be_ended_is_no_death() -> None:
    assert step(running(), leaving(seen())) == Tend()
    assert step(running(), leaving(seen()), busy=True) == Wait("a checkpoint is being taken")


def test_what_is_restored_into_such_a_process_is_restored_into_others_at_once() -> None:
    asked = Recover("agent is being ended", planned=True)
    assert step(starting(pins=PINS), leaving(seen("starting")), busy=True) == asked
    assert step(starting(pins=PINS), leaving(seen("restored"))) == asked
    assert step(starting(), leaving(seen("starting"))) == Wait("waiting for agent to start")


def test_a_stopped_cell_does_not_go_on_with_such_a_process() -> None:
    stopped = Stopped(uri="u", digest="d", checkpoint_id="cp", name="cp", stays=False)
    record = running(stage=Stage.STOPPED, stopped=stopped)
    found = seen("committed", checkpoint_id="cp")
    assert step(record, found) == GoOn()
    assert step(record, leaving(found)) == Recover("it was stopped by checkpoint cp", planned=True)


@pytest.mark.parametrize("found", [seen("committed", checkpoint_id="cp"), seen(), seen(None), seen("starting", "2")])
def test_a_cell_that_was_stopped_to_be_replaced_is_replaced_whatever_is_there(found: Mapping[str, Seen]) -> None:
    stopped = Stopped(uri="u", digest="d", checkpoint_id="cp", name="cp", stays=False, replacing="another image")
    record = running(stage=Stage.STOPPED, stopped=stopped)
    assert step(record, found) == Recover("another image", planned=True)
    assert step(record, found, busy=True) == Wait("the cell has just been stopped")


def test_a_cell_that_cannot_read_what_it_is_to_restore_waits_for_other_processes() -> None:
    record = starting(pins=PINS, held="it was written by other code")
    assert step(record, seen("starting")) == Wait("it was written by other code")
    assert isinstance(step(record, seen("starting", "2")), Recover)
