"""What is shown of a stack, from the objects alone."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gym_operator.api.objects import format_time
from gym_operator.plugin.views.status import document_of, tables_of
from gym_operator.plugin.views.table import rendered

NOW = 1_800_000_000.0
LAST = {"name": "one", "id": "one-1", "time": format_time(NOW - 60)}


def stack(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "demo", "namespace": "team"}, "spec": {"cells": 2}, "status": status}


def checkpoint(name: str, phase: str | None, at: float = 0, stack: str = "demo", **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team", "creationTimestamp": format_time(NOW + at)}
    told = {"phase": phase, **status} if phase else status
    return {"metadata": metadata, "spec": {"stackRef": {"name": stack}}, "status": told}


def page(stack: dict[str, Any], *checkpoints: dict[str, Any], wide: bool = False) -> str:
    return rendered(tables_of(document_of(stack, checkpoints), NOW, wide=wide))


def participant(name: str, phase: str | None) -> dict[str, Any]:
    return {"name": name, "kind": "agent", "pod": f"demo-{name}-0", "session": "s", "phase": phase}


def test_a_stack_that_nobody_has_looked_at_yet() -> None:
    assert page({"metadata": {"name": "demo", "namespace": "team"}}).splitlines() == [
        "STACK   PHASE     ATTEMPT   CELLS   ROLLOUTS   LAST CHECKPOINT   AGE",
        "demo    Pending   0         0/1     -          -                 -",
    ]


def test_each_cell_has_its_line() -> None:
    cell = {
        "index": 0,
        "phase": "Running",
        "attempt": 3,
        "participants": [participant("a", "idle"), participant("b", "idle"), participant("c", None)],
        "collection": {"expected": 8, "rows": 5, "failed": 1},
        "lastCheckpoint": LAST,
    }
    told = page(stack(phase="Recovering", attempt=3, cells=[cell, {"index": 1, "phase": "Restoring"}]))
    assert [re.split(" {3,}", line) for line in told.splitlines()[4:]] == [
        ["0", "Running", "3", "2 idle, 1 unknown", "5/8, 1 failed", "one", "60s"],
        ["1", "Restoring", "0", "-", "-", "-", "-"],
    ]
    assert told.splitlines()[1].split() == ["demo", "Recovering", "3", "1/2", "-", "-", "-"]


def test_a_wide_page_has_each_participant() -> None:
    cell = {"index": 0, "participants": [participant("a", "idle")]}
    assert "PARTICIPANT   KIND" not in page(stack(cells=[cell]))
    assert ["0", "a", "agent", "idle", "demo-a-0", "s"] in [
        line.split() for line in page(stack(cells=[cell]), wide=True).splitlines()
    ]


def test_what_is_under_way_and_what_holds_it_up() -> None:
    blocker = {"participant": "agent", "id": "7-0", "where": "verify", "ageSeconds": 130.2, "cell": 1}
    other = checkpoint("other", "Preparing", stack="another", blockers=[blocker])
    waiting = {"participant": "agent", "id": "8-0", "since": format_time(NOW - 40)}
    taken = checkpoint("now", "Preparing", blockers=[blocker, waiting], reason="InProgress", message="waits for 7-0")
    told = page(stack(), other, taken, checkpoint("old", "Failed", -50), checkpoint("next", None, 5))
    lines = [line.split() for line in told.splitlines()]
    assert ["now", "Preparing", "InProgress", "waits", "for", "7-0"] in lines
    assert ["next", "Pending", "-", "-"] in lines
    assert ["7-0", "1", "agent", "verify", "2m"] in lines
    assert ["8-0", "0", "agent", "-", "40s"] in lines
    assert "other" not in told and "old" not in told


@pytest.mark.parametrize(("newest", "shown"), [("Failed", True), ("Succeeded", False)])
def test_the_newest_checkpoint_is_shown_where_it_has_failed(newest: str, shown: bool) -> None:
    before = checkpoint("before", "Failed", -50)
    told = page(stack(), checkpoint("newest", newest, 0, reason="PrepareTimedOut"), before)
    assert ("PrepareTimedOut" in told) is shown
    assert "before" not in told


@pytest.mark.parametrize(
    ("type", "status", "trouble"),
    [
        ("Ready", "False", True),
        ("Ready", "Unknown", True),
        ("Ready", "True", False),
        ("Recovering", "True", True),
        ("Recovering", "False", False),
        ("Stalled", "True", True),
        ("Stalled", "False", False),
        ("StorageReady", "Unknown", True),
        ("Checkpointing", "True", False),
    ],
)
def test_conditions_are_shown_where_they_are_not_as_they_should_be(type: str, status: str, trouble: bool) -> None:
    condition = {
        "type": type,
        "status": status,
        "reason": "Because",
        "message": "of that",
        "lastTransitionTime": format_time(NOW),
    }
    assert ("of that" in page(stack(conditions=[condition]))) is trouble


def test_the_operators_own_record_is_not_shown_to_programs() -> None:
    document = document_of(stack(cells=[{"index": 0, "record": {"stage": "running"}}]), [])
    assert "record" not in document["cells"][0]
