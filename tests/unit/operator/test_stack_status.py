"""A stack's status out of one look: phases, conditions, and what they say to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gym_operator.api.conditions import ConditionReason, ConditionType, get_condition
from gym_operator.api.stack import LastCheckpoint, StackStatus
from gym_operator.rules.cell_record import from_document, to_document
from gym_operator.rules.drain import Drain
from gym_operator.rules.observed import CellSeen, Observed, Storage
from gym_operator.rules.pod_state import PodState
from gym_operator.rules.spec_check import LARGEST_CONFIGS, Problem, check_stack
from gym_operator.rules.stack_status import differs_in_progress_only, stack_status, warnings
from gym_operator.rules.workloads import StackContext
from gym_operator.rules.workloads.config import config_map
from gym_servers.coordination.record import (
    LONGEST_WHY,
    MOST_PASSED_OVER,
    CellRecord,
    Choice,
    OpenCheckpoint,
    Pin,
    Recovery,
    Stage,
    Stopped,
)
from gym_servers.protocol.messages import Report, Status
from gym_servers.stack.spec import MAX_CELLS, Participant
from gym_servers.storage.store import StorageProblem

NOW = 1_800_000_000.0
PARTICIPANTS = (Participant("env", "environment", "single-agent-turn"), Participant("collection", "collection", "c"))
CHOICE = Choice(uri="s3://b/c", digest="d", checkpoint_id="one-1", name="one")
LAST = LastCheckpoint(name="one", id="one-1", uri="s3://b/c", digest="d", time="2027-01-15T08:00:00Z")
GOOD = Storage(True, ConditionReason.STORAGE_REACHABLE, "it can be written")


def pod(server: str, **parts: Any) -> PodState:
    known: dict[str, Any] = {
        "uid": f"{server}-uid",
        "name": f"demo-{server}-0",
        "namespace": "team",
        "stack": "demo",
        "stack_uid": "s",
        "server": server,
        "cell": 0,
        "version": 1,
        "created": "",
        "incarnation": f"{server}-uid/1",
        "alive": True,
        "ready": True,
        "address": "10.0.0.1",
        "node": "node-1",
        "detail": "",
        "grace": None,
    }
    return PodState(**{**known, **parts})


def said(server: str, **parts: Any) -> Status:
    return Status(
        kind="any", instance=server, session="s-1", phase="idle", cell_attempt=0, report=Report(ready=True), **parts
    )


def cell(record: CellRecord | None, index: int = 0, **parts: Any) -> CellSeen:
    known: dict[str, Any] = {
        "pods": {"env": pod("env"), "collection": pod("collection")},
        "statuses": {"env": said("env"), "collection": said("collection")},
    }
    return CellSeen(index=index, record=record, **{**known, **parts})


def seen(*cells: CellSeen | CellRecord | None, **parts: Any) -> Observed:
    """A stack of these cells; a record stands for a cell in which all is well."""
    found = tuple(one if isinstance(one, CellSeen) else cell(one, index) for index, one in enumerate(cells))
    known: dict[str, Any] = {"generation": 3, "participants": PARTICIPANTS, "cells": found, "storage": GOOD}
    return Observed(**{**known, **parts})


def look(observed: Observed) -> tuple[StackStatus, Callable[[str], str]]:
    status = stack_status(StackStatus(), observed, NOW)

    def condition(type: str) -> str:
        found = get_condition(status.conditions, type)  # type: ignore[arg-type]
        return f"{found.status} {found.reason}: {found.message}" if found else "absent"

    return status, condition


def recovery(seconds: float | None, checkpoint: Choice | None = CHOICE) -> Recovery:
    return Recovery(attempt=1, reason="env is gone", checkpoint=checkpoint, started_at=NOW, seconds=seconds)


def test_a_stack_in_service() -> None:
    pins = {"env": Pin(incarnation="env-uid/1", session="s-1")}
    status, condition = look(seen(CellRecord(stage=Stage.RUNNING, pins=pins)))
    assert (status.phase, status.observed_generation) == ("Running", 3)
    assert condition("Ready") == "True Running: all servers are in service"
    assert condition("Stalled").startswith("False")
    assert condition("Recovering") == "False Running: nothing has died"
    assert condition("StorageReady").startswith("True StorageReachable")
    env = status.cells[0].participants[0]
    assert (env.pod, env.pod_uid, env.session, env.phase) == ("demo-env-0", "env-uid", "s-1", "idle")


@pytest.mark.parametrize(
    ("record", "phase", "part", "ready", "recovering"),
    [
        (None, "Pending", "Pending", "False PodsStarting", "False"),
        (CellRecord(), "Starting", "Starting", "False PodsStarting", "False"),
        (
            CellRecord(stage=Stage.REPLACING, attempt=1, recoveries=[recovery(None)]),
            "Recovering",
            "Recovering",
            "False ParticipantDied: env is gone",
            "True ParticipantDied: env is gone",
        ),
        (
            CellRecord(stage=Stage.STARTING, attempt=1, restore=CHOICE, recoveries=[recovery(None)]),
            "Recovering",
            "Restoring",
            "False Restoring",
            "True Restoring",
        ),
        (
            CellRecord(stage=Stage.RUNNING, attempt=1, restore=CHOICE, recoveries=[recovery(2.5)]),
            "Running",
            "Running",
            "True Running",
            "False Recovered: attempt 1 continues from checkpoint one",
        ),
        (
            CellRecord(stage=Stage.RUNNING, attempt=1, recoveries=[recovery(2.5, None)]),
            "Running",
            "Running",
            "True Running",
            "False RestartedFromInput: attempt 1 continues from the input",
        ),
        (
            CellRecord(
                stage=Stage.RUNNING,
                attempt=1,
                recoveries=[recovery(2.5).model_copy(update={"passed_over": ["two is damaged", "three as well"]})],
            ),
            "Running",
            "Running",
            "True Running",
            "False Recovered: attempt 1 continues from checkpoint one; two is damaged; three as well",
        ),
        (
            CellRecord(stage=Stage.STALLED, attempt=1, failures=6, recoveries=[recovery(None)]),
            "Failed",
            "Failed",
            "False BackoffLimitExceeded: 5 recoveries in a row",
            "False",
        ),
    ],
)
def test_where_a_stack_stands(record: CellRecord | None, phase: str, part: str, ready: str, recovering: str) -> None:
    status, condition = look(seen(record))
    assert (status.phase, status.cells[0].phase) == (phase, part)
    assert condition("Ready").startswith(ready)
    assert condition("Recovering").startswith(recovering)
    assert condition("Stalled").startswith("True" if phase == "Failed" else "False")


STOPPED = Stopped(**CHOICE.model_dump())


def test_a_stack_that_a_checkpoint_has_stopped_says_which_and_how_to_go_on() -> None:
    record = CellRecord(stage=Stage.STOPPED, stopped=STOPPED)
    status, condition = look(seen(cell(record, pods={}, statuses={})))
    assert (status.phase, status.cells[0].phase, status.stopped_by) == ("Stopped", "Stopped", "one")
    assert condition("Ready").startswith("False StoppedByCheckpoint: checkpoint one stopped the stack; to go on")
    assert condition("Stalled").startswith("False")
    _, condition = look(seen(record, suspended=True))
    assert condition("Ready") == "False Suspended: spec.suspend is set"


def test_a_stopped_stack_that_goes_on_says_so() -> None:
    released = CellRecord(stage=Stage.STOPPED, stopped=STOPPED.model_copy(update={"stays": False}))
    status, condition = look(seen(released))
    assert (status.phase, status.stopped_by) == ("Starting", None)
    planned = recovery(None).model_copy(update={"planned": True, "reason": "it was stopped by checkpoint one"})
    _, condition = look(seen(CellRecord(stage=Stage.REPLACING, attempt=1, recoveries=[planned])))
    assert condition("Ready") == condition("Recovering").replace("True", "False", 1)
    assert condition("Ready") == "False GoingOn: it was stopped by checkpoint one"


def test_the_record_of_a_stopped_cell_survives_the_status() -> None:
    record = CellRecord(stage=Stage.STOPPED, stopped=STOPPED, open=None)
    assert from_document(to_document(record)) == record
    released = record.model_copy(update={"stopped": STOPPED.model_copy(update={"stays": False})})
    assert from_document(to_document(released)) == released


def test_a_problem_of_the_spec_is_stalled_and_says_what_to_change() -> None:
    problem = Problem(ConditionReason.INVALID_SPEC, "server policy: use scripted")
    status, condition = look(seen(CellRecord(stage=Stage.RUNNING), problem=problem))
    assert status.phase == "Failed"
    assert condition("Ready") == condition("Stalled").replace("True", "False", 1)
    assert ("InvalidSpec", "server policy: use scripted") in warnings(seen(None, problem=problem))


def test_a_participants_problem_is_the_stacks() -> None:
    statuses = {
        "env": said("env"),
        "collection": said("collection", problem="no such file", problem_reason="TasksInvalid"),
    }
    _, condition = look(seen(cell(CellRecord(stage=Stage.RUNNING), statuses=statuses)))
    assert condition("Ready") == "False TasksInvalid: collection: no such file"


def test_a_problem_of_a_kind_that_is_not_known_is_a_servers() -> None:
    """Conditions take single words: no participant may spoil a status by another."""
    other = cell(RUNNING, statuses={"env": said("env", problem="it is ill", problem_reason="a b")})
    assert warnings(seen(other)) == [("ServerProblem", "env: it is ill")]


def test_progress_and_its_end() -> None:
    counts = {"expected": 4, "rows": 4, "failed": 1, "complete": 1}
    statuses = {"env": said("env"), "collection": said("collection", progress=counts)}
    status, condition = look(seen(cell(CellRecord(stage=Stage.RUNNING), statuses=statuses)))
    assert status.phase == "Completed"
    assert condition("Ready").startswith("True CollectionComplete: all 4")
    silent = stack_status(status, seen(cell(CellRecord(stage=Stage.RUNNING), statuses={})), NOW)
    assert silent.cells[0].collection == status.cells[0].collection, "a moment of silence loses no count"


def test_only_counters_can_wait_to_be_written() -> None:
    def at(rows: int, phase: str = "idle") -> StackStatus:
        statuses = {"collection": said("collection", progress={"expected": 4, "rows": rows})}
        statuses["collection"] = statuses["collection"].model_copy(update={"phase": phase})
        return look(seen(cell(CellRecord(stage=Stage.RUNNING), statuses=statuses)))[0]

    assert differs_in_progress_only(at(1), at(2))
    assert not differs_in_progress_only(at(1), at(2, "prepared"))


def test_pods_that_do_not_come_up_say_why_in_ready() -> None:
    pods = {"env": pod("env", alive=False, ready=False, detail="ImagePullBackOff: no such image")}
    _, condition = look(seen(cell(CellRecord(), pods=pods, statuses={}, waits="waiting for env to start")))
    assert "waiting for env to start; env: ImagePullBackOff: no such image" in condition("Ready")


def test_a_storage_that_fails_is_said_where_people_look() -> None:
    bad = Storage(False, StorageProblem.CREDENTIALS_MISSING, "there is no Secret keys")
    _, condition = look(seen(CellRecord(), storage=bad))
    assert "there is no Secret keys" in condition("Ready")
    assert condition("StorageReady") == "False CredentialsMissing: there is no Secret keys"


def test_without_checkpoints_only_pods_count() -> None:
    status, condition = look(seen(None, checkpoints_enabled=False, storage=None))
    assert (status.phase, condition("Ready")) == ("Running", "True Running: all servers are ready")
    assert (condition("Checkpointing"), condition("StorageReady")) == ("absent", "absent")
    half = cell(None, pods={"env": pod("env")})
    _, condition = look(seen(half, checkpoints_enabled=False, storage=None))
    assert "not ready: collection" in condition("Ready")


def test_conditions_that_no_longer_apply_are_taken_away() -> None:
    before, _ = look(seen(CellRecord(stage=Stage.RUNNING), checkpoint="one"))
    after = stack_status(before, seen(None, checkpoints_enabled=False, storage=None), NOW)
    assert {each.type for each in after.conditions} == {"Ready", "Stalled", "Recovering", "UpToDate"}


# ---- several cells ----------------------------------------------------------------------------------------

RUNNING = CellRecord(stage=Stage.RUNNING, attempt=1)
DYING = CellRecord(stage=Stage.REPLACING, attempt=3, recoveries=[recovery(None)])
GIVEN_UP = CellRecord(stage=Stage.STALLED, attempt=2, failures=6, recoveries=[recovery(None)])


def test_a_stack_is_ready_when_all_its_cells_are() -> None:
    status, condition = look(seen(RUNNING, RUNNING))
    assert (status.phase, condition("Ready")) == (
        "Running",
        "True Running: all servers of all 2 cells are in service",
    )
    assert [cell.index for cell in status.cells] == [0, 1]
    status, condition = look(seen(RUNNING, DYING, CellRecord()))
    assert (status.phase, status.attempt) == ("Recovering", 3)
    assert condition("Ready") == "False ParticipantDied: cell 1: env is gone; not ready either: cell 2"
    assert condition("Recovering") == "True ParticipantDied: cell 1: env is gone"
    assert condition("Stalled").startswith("False")
    assert [cell.phase for cell in status.cells] == ["Running", "Recovering", "Starting"]


def test_a_cell_that_has_given_up_needs_people_whatever_the_others_do() -> None:
    status, condition = look(seen(RUNNING, DYING, GIVEN_UP))
    assert status.phase == "Failed"
    assert condition("Stalled").startswith("True BackoffLimitExceeded: cell 2: 5 recoveries in a row")
    assert condition("Recovering") == "True ParticipantDied: cell 1: env is gone"


def test_what_holds_for_the_whole_stack_names_no_cell() -> None:
    problem = Problem(ConditionReason.INVALID_SPEC, "server policy: use scripted")
    _, condition = look(seen(RUNNING, RUNNING, problem=problem))
    assert condition("Ready") == "False InvalidSpec: server policy: use scripted"
    _, condition = look(seen(RUNNING, RUNNING, suspended=True))
    assert condition("Ready") == "False Suspended: spec.suspend is set"


def test_the_youngest_recovery_of_all_is_told() -> None:
    older = recovery(2.0).model_copy(update={"attempt": 7})
    newer = recovery(2.0, None).model_copy(update={"attempt": 4, "started_at": NOW + 9})
    cells = [CellRecord(stage=Stage.RUNNING, recoveries=[each]) for each in (older, newer)]
    _, condition = look(seen(*cells))
    assert condition("Recovering") == "False RestartedFromInput: cell 1: attempt 4 continues from the input"


def test_the_drivers_counts_add_up_and_all_have_to_be_complete() -> None:
    def driver(**counts: int) -> CellSeen:
        return cell(RUNNING, statuses={"collection": said("collection", progress=counts)})

    done = {"expected": 3, "rows": 3, "complete": 1}
    half = [driver(**done), replace(driver(expected=2, rows=1, failed=1), index=1)]
    status, condition = look(seen(*half))
    assert status.collection is not None
    assert status.collection.document() == {"expected": 5, "rows": 4, "failed": 1, "complete": False}
    assert (status.phase, condition("Ready")[:13]) == ("Running", "True Running:")
    status, condition = look(seen(driver(**done), replace(driver(**done), index=1)))
    assert status.collection is not None
    assert (status.phase, status.collection.complete) == ("Completed", True)
    assert condition("Ready") == "True CollectionComplete: all rollouts of all cells have their row"


def test_a_problem_says_whose_it_is() -> None:
    bad = cell(
        RUNNING, statuses={"collection": said("collection", problem="no bucket", problem_reason="OutputFailing")}
    )
    assert warnings(seen(RUNNING, replace(bad, index=1))) == [("OutputFailing", "cell 1: collection: no bucket")]
    assert warnings(seen(bad)) == [("OutputFailing", "collection: no bucket")]


def test_a_cell_that_is_taken_away_counts_no_more_and_is_remembered() -> None:
    before, _ = look(seen(RUNNING, RUNNING, last_of={1: LAST}))
    going = seen(RUNNING, replace(cell(DYING, index=1), stopping=True))
    status = stack_status(before, going, NOW)
    assert (status.phase, [each.phase for each in status.cells]) == ("Running", ["Running", "Stopping"])
    gone = stack_status(status, seen(RUNNING), NOW)
    assert [each.phase for each in gone.cells] == ["Running", "Stopped"]
    assert (gone.cells[1].participants, gone.cells[1].last_checkpoint) == ((), LAST)
    assert get_condition(gone.conditions, ConditionType.READY).message == "all servers are in service"  # type: ignore[union-attr]
    back = stack_status(gone, seen(RUNNING, DYING), NOW)
    assert (back.cells[1].phase, back.cells[1].last_checkpoint) == ("Recovering", LAST)


def test_a_cell_that_drains_says_how_much_still_runs_and_until_when() -> None:
    def going(running: int | None, over: str = "") -> Observed:
        drain = Drain(NOW, NOW + 300, running, over)
        return seen(RUNNING, replace(cell(RUNNING, index=1), stopping=True, drain=drain))

    status = stack_status(StackStatus(), going(2), NOW)
    assert (status.phase, [each.phase for each in status.cells]) == ("Running", ["Running", "Draining"])
    told = status.cells[1].drain
    assert told is not None and told.document() == {
        "startedAt": "2027-01-15T08:00:00Z",
        "until": "2027-01-15T08:05:00Z",
        "running": 2,
    }
    fewer = stack_status(status, going(1), NOW)
    assert fewer != status and differs_in_progress_only(fewer, status)
    silent = stack_status(fewer, going(None), NOW).cells[1].drain
    assert silent is not None and silent.running is None
    over = stack_status(fewer, going(1, "the time is over"), NOW)
    assert (over.cells[1].phase, over.cells[1].drain) == ("Stopping", fewer.cells[1].drain), "until it has stopped"
    gone = stack_status(over, seen(RUNNING), NOW)
    assert (gone.cells[1].phase, gone.cells[1].drain) == ("Stopped", None)
    stays = stack_status(status, seen(RUNNING, RUNNING), NOW)
    assert (stays.cells[1].phase, stays.cells[1].drain) == ("Running", None)


def test_what_a_cell_that_drains_has_done_counts_until_it_is_gone() -> None:
    def driver(index: int, **parts: Any) -> CellSeen:
        progress = {"expected": 3, "rows": 2}
        return replace(
            cell(RUNNING, statuses={"collection": said("collection", progress=progress)}), index=index, **parts
        )

    status, _ = look(seen(driver(0), driver(1, stopping=True)))
    assert status.collection is not None and (status.collection.expected, status.collection.rows) == (6, 4)


def test_k16_a_status_of_the_most_cells_and_servers_fits_into_an_object() -> None:
    """etcd takes 1.5 MB; half of it is left for what the API server keeps beside."""
    many = [Participant(f"{'server' * 4}-{n:05}", "resources", "counter") for n in range(16)]
    names = [each.name for each in many] + ["collection"]
    long = Choice(uri="s3://" + "b" * 400, digest="d" * 64, checkpoint_id="c" * 109, name="n" * 253)
    record = CellRecord(
        stage=Stage.RUNNING,
        pins={name: Pin(incarnation="u" * 36 + "/containerd://" + "c" * 64, session="s" * 32) for name in names},
        recoveries=[
            recovery(1.0, long),
            recovery(1.0, long).model_copy(update={"passed_over": ["w" * LONGEST_WHY] * MOST_PASSED_OVER}),
        ],
    )
    whole = cell(
        record,
        pods={name: pod(name, name=f"{'stack' * 4}-{name}-63", uid="u" * 36) for name in names},
        statuses={name: said(name).model_copy(update={"session": "s" * 32}) for name in names},
    )
    cells = [replace(whole, index=index) for index in range(MAX_CELLS)]
    participants = (*many, Participant("collection", "collection", "collection"))
    status = stack_status(StackStatus(), Observed(1, participants, cells), NOW)
    document = status.document()
    for each in document["cells"]:
        each["record"] = to_document(record)
    assert len(json.dumps(document)) < 800_000


def test_a_record_survives_its_document() -> None:
    record = CellRecord(
        stage=Stage.REPLACING,
        attempt=3,
        ended={"env": "uid/1"},
        restore=CHOICE,
        open=OpenCheckpoint(checkpoint_id="x", name="x", uri="s3://b/x", sequence=4),
        recoveries=[recovery(None, None), recovery(1.0)],
    )
    assert from_document(to_document(record)) == record
    assert from_document(None) is None
    assert to_document(CellRecord()) == {}
    with pytest.raises(ValueError, match="not of a form"):
        from_document({"stage": "upside down"})


def test_server_names_are_checked_beyond_the_schema(spec_document: dict[str, Any]) -> None:
    spec_document["servers"][1]["server"] = "scripted"
    body = {"metadata": {"name": "demo", "namespace": "team", "uid": "u"}, "spec": spec_document}
    assert not isinstance(check_stack(body), Problem)
    spec_document["servers"][1]["server"] = "unheard-of"
    found = check_stack(body)
    assert isinstance(found, Problem)
    assert "server policy: 'unheard-of' is not a known model server" in found.message
    del spec_document["servers"][1]
    found = check_stack(body)
    assert isinstance(found, Problem)
    assert "exactly one server of kind model" in found.message


def test_k16_more_config_than_a_config_map_holds_is_refused_and_its_servers_are_named(
    spec_document: dict[str, Any], context: Callable[[dict[str, Any]], StackContext]
) -> None:
    body = {"metadata": {"name": "demo", "namespace": "team", "uid": "u"}, "spec": spec_document}
    names = {server["name"]: server for server in spec_document["servers"]}
    names["agent"]["config"] = {"prompt": "p" * 500 * 1024}
    names["env"]["config"] = {"note": "n" * 1024}
    names["counter"]["config"] = {
        "numbers": [[1]] * 15_000
    }  # of 75 KB, and several times as much where it is laid out
    assert not isinstance(check_stack(body), Problem)
    held = config_map(context(spec_document))["data"]
    assert 900 * 1024 < sum(len(text.encode()) for text in held.values()) < 1024 * 1024
    names["counter"]["config"] = {"numbers": [[1]] * 20_000}
    found = check_stack(body)
    assert isinstance(found, Problem)
    assert found.reason == ConditionReason.INVALID_SPEC
    assert "keep less of it in server counter (527 KiB), such as" in found.message
    names["agent"]["config"] = {"prompt": "p" * 1000 * 1024}
    found = check_stack(body)
    assert isinstance(found, Problem)
    assert "keep less of it in server agent (1000 KiB), such as" in found.message, "the largest; the rest would fit"


def test_k16_what_is_not_config_has_room_beside_it(
    spec_document: dict[str, Any], context: Callable[[dict[str, Any]], StackContext]
) -> None:
    """As many servers as there may be, with names as long as they may be."""
    servers = spec_document["servers"]
    for server in servers:
        server["name"] = f"{server['name']:x<30}"
    more = [
        {"name": f"{f'tool{n}':x<30}", "kind": "resources", "server": "counter"} for n in range(16 - len(servers))
    ]
    held = config_map(context({**spec_document, "servers": [*servers, *more]}))["data"]
    assert sum(len(text.encode()) for text in held.values()) < 1024 * 1024 - LARGEST_CONFIGS
