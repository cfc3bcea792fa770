"""Which of the last checkpoints that nobody asked for may go, and what forbids it."""

from __future__ import annotations

from typing import Any

import pytest

from gym_operator.rules.cell_record import to_document
from gym_operator.rules.checkpoint_entries import entry_of
from gym_operator.rules.unasked import PREFIXES, Successor, is_unasked, may_be_unasked, needed, successor
from gym_servers.coordination.record import CellRecord, Choice, Chosen, OpenCheckpoint, Stage, Stopped
from gym_servers.storage.manifest import Publication

UID = "stack-uid"
PLACE = "s3://gym/checkpoints/stack-uid/cell-0/checkpoints"
OLD, NEW = f"{PLACE}/000001-000003-roll-out-1-0a1b2c3d", f"{PLACE}/000002-000004-nightly-5e6f7a8b"
CHOICE = {"uri": OLD, "digest": "d", "checkpoint_id": "roll-out-1-0a1b2c3d", "name": "roll-out"}


def publication(**changes: Any) -> Publication:
    fields = {
        "state": "published",
        "checkpoint_id": "roll-out-1-0a1b2c3d",
        "name": "roll-out",
        "stack_uid": UID,
        "cell": 0,
        "cell_attempt": 1,
        "sequence": 3,
        "created": 1.0,
    }
    return Publication.model_validate({**fields, **changes})


def stack(record: CellRecord | None = None, last: dict[str, Any] | None = None, index: int = 0) -> dict[str, Any]:
    record = record or CellRecord(stage=Stage.RUNNING, attempt=2)
    cell = {"index": index, "record": to_document(record), "lastCheckpoint": last or {}}
    return {"metadata": {"namespace": "a", "name": "one", "uid": UID}, "status": {"cells": [cell]}}


def test_their_directories_are_told_by_name() -> None:
    assert may_be_unasked("000001-000003-roll-out-1-0a1b2c3d")
    assert may_be_unasked("000001-000003-scale-down_12-0a1b2c3d")
    for other in (
        "000001-000003-nightly-0a1b2c3d",
        "000001-000003-roll-out-0a1b2c3d",
        "000001-000003-my-roll-out-1-0a1b2c3d",
        "000001-000003-roll-out-1-0a1b2c3d-copy",
        "roll-out-1-0a1b2c3d",
        "",
    ):
        assert not may_be_unasked(other), other
    assert set(PREFIXES) == {"roll-out", "scale-down"}


@pytest.mark.parametrize(
    "changes",
    [
        {"state": "abandoned"},
        {"name": "roll-out-1"},
        {"name": "scale-down"},
        {"stack_uid": "another"},
        {"cell": 1},
        {"cell_attempt": 2},
        {"sequence": 4},
        {"checkpoint_id": "roll-out-1-ffffffff"},
        {"checkpoint_id": "nightly-0a1b2c3d"},
    ],
)
def test_what_it_holds_has_to_say_the_same(changes: dict[str, Any]) -> None:
    directory = OLD.rpartition("/")[2]
    assert is_unasked(publication(), directory, UID, 0)
    assert not is_unasked(publication(**changes), directory, UID, 0)


def last(uri: str = NEW, **changes: Any) -> dict[str, Any]:
    return {"name": "nightly", "id": "x", "uri": uri, "digest": "d", "time": "2026-01-01T00:00:00Z", **changes}


def test_what_a_cell_would_continue_from_instead_is_newer_and_beside_it() -> None:
    found = successor(stack(last=last()), 0, OLD)
    assert found == Successor(NEW, "d", 1767225600.0)
    assert successor(stack(CellRecord(stage=Stage.STOPPED), last()), 0, OLD) == found


@pytest.mark.parametrize(
    "body",
    [
        stack(),
        stack(last=last(OLD)),
        stack(last=last(f"{PLACE}/000001-000002-nightly-5e6f7a8b")),
        stack(last=last(NEW.replace("cell-0", "cell-1"))),
        stack(last=last(NEW.replace(UID, "another"))),
        stack(last=last(digest=None)),
        stack(last=last(), index=1),
        stack(CellRecord(stage=Stage.STARTING), last()),
        stack(CellRecord(stage=Stage.REPLACING), last()),
        stack(CellRecord(stage=Stage.STALLED), last()),
        {"metadata": {"uid": UID}},
    ],
)
def test_otherwise_there_is_none(body: dict[str, Any]) -> None:
    assert successor(body, 0, OLD) is None


@pytest.mark.parametrize(
    "record",
    [
        CellRecord(stage=Stage.STARTING, restore=Choice(**CHOICE)),
        CellRecord(stage=Stage.STOPPED, stopped=Stopped(**CHOICE)),
        CellRecord(stage=Stage.RUNNING, chosen=Chosen(choice=Choice(**CHOICE), by="restore-uid", attempt=3)),
        CellRecord(open=OpenCheckpoint(checkpoint_id="roll-out-1-0a1b2c3d", name="roll-out", uri=OLD, sequence=3)),
    ],
)
def test_what_the_record_of_any_stack_names_is_needed(record: CellRecord) -> None:
    assert OLD in needed(stack(record), [stack()], [], [], [])
    assert OLD in needed(stack(), [stack(), stack(record)], [], [], [])


def test_what_a_cell_that_runs_was_restored_from_is_needed_by_others_alone() -> None:
    """Its own next recovery begins with what is newer."""
    record = CellRecord(stage=Stage.RUNNING, restore=Choice(**CHOICE))
    assert OLD not in needed(stack(record), [], [], [], [])
    assert OLD in needed(stack(), [stack(record)], [], [], [])


def test_what_a_status_names_as_last_is_needed() -> None:
    assert OLD in needed(stack(last=last(OLD)), [], [], [], [])


def gymcheckpoint(spec: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"namespace": "b", "name": "c", "uid": "u"}, "spec": spec, "status": status}


def test_what_a_gymcheckpoint_stands_for_or_is_about_to_is_needed() -> None:
    adopted = gymcheckpoint({}, {"phase": "Succeeded", "cells": [{"index": 0, "uri": OLD, "phase": "Succeeded"}]})
    adopting = gymcheckpoint({"source": {"uri": f"{OLD}/", "digest": "d"}}, {})
    assert OLD in needed(stack(), [], [entry_of(adopted)], [], [])
    assert OLD in needed(stack(), [], [], [adopting], [])
    assert OLD not in needed(stack(), [], [], [gymcheckpoint({}, {})], [])


@pytest.mark.parametrize(("phase", "is_needed"), [(None, True), ("Restoring", True), ("Succeeded", False)])
def test_what_is_being_restored_is_needed(phase: str | None, is_needed: bool) -> None:
    restore = gymcheckpoint({"uri": f"{OLD}/", "digest": "d"}, {"phase": phase} if phase else {})
    assert (OLD in needed(stack(), [], [], [], [restore])) is is_needed


def test_where_a_record_cannot_be_read_nothing_is_known() -> None:
    body = stack()
    body["status"]["cells"][0]["record"] = {"stage": "of-another-version"}
    with pytest.raises(ValueError):
        needed(body, [], [], [], [])
    with pytest.raises(ValueError):
        needed(stack(), [body], [], [], [])
