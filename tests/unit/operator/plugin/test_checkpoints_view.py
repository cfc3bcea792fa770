"""What is shown of checkpoints, and what is said of one."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gym_operator.api.objects import format_time
from gym_operator.plugin.views import checkpoints as views
from gym_operator.plugin.views.table import rendered

NOW = 1_800_000_000.0


def checkpoint(name: str, at: float = 0.0, stack: str = "demo", **status: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": "team", "creationTimestamp": format_time(NOW + at)}
    return {
        "metadata": metadata,
        "spec": {"stackRef": {"name": stack}, "labels": {"b": "2", "a": "1"}},
        "status": status,
    }


def done(name: str, at: float = 0.0) -> dict[str, Any]:
    cells = [{"index": 0, "phase": "Succeeded", "uri": "s3://b/one", "digest": "d" * 64}]
    return checkpoint(name, at, phase="Succeeded", episodes=4, bytes=2048, pauseSeconds=0.25, cells=cells)


def lines(*checkpoints: dict[str, Any], wide: bool = False) -> list[list[str]]:
    document = views.document_of("demo", checkpoints)
    text = rendered(views.tables_of(document, NOW, wide=wide))
    return [re.split(" {3,}", line) for line in text.splitlines()]


def test_the_newest_comes_last_and_other_stacks_are_left_out() -> None:
    failed = checkpoint("failed", -300, phase="Failed", reason="PrepareTimedOut")
    told = lines(checkpoint("new", 0), done("old", -7200), failed, checkpoint("other", stack="another"))
    assert told == [
        ["CHECKPOINT", "PHASE", "AGE", "EPISODES", "SIZE", "PAUSE", "LABELS", "REASON"],
        ["old", "Succeeded", "2h", "4", "2.0 KiB", "0.2s", "a=1,b=2", "-"],
        ["failed", "Failed", "5m", "-", "-", "-", "a=1,b=2", "PrepareTimedOut"],
        ["new", "Pending", "0s", "-", "-", "-", "a=1,b=2", "-"],
    ]


def test_a_wide_table_says_where_they_are() -> None:
    told = lines(done("old", -1), checkpoint("failed", phase="Failed"), wide=True)
    assert told[1][-2:] == ["Retain", "s3://b/one"]
    assert told[2][-2:] == ["Retain", "-"]


def test_programs_get_places_with_their_digests() -> None:
    (entry,) = views.document_of("demo", [done("old")])["checkpoints"]
    assert entry["places"] == [{"cell": 0, "uri": "s3://b/one", "digest": "d" * 64}]


def test_one_that_is_being_deleted_says_so() -> None:
    body = done("old")
    body["metadata"]["deletionTimestamp"] = format_time(NOW)
    assert lines(body)[1][1] == "Deleting"


@pytest.mark.parametrize(
    ("status", "line"),
    [
        ({}, "Pending"),
        ({"phase": "Pending", "message": "waits for another"}, "Pending: waits for another"),
        ({"phase": "Committing", "message": "not worth telling"}, "Committing"),
        (
            {"phase": "Preparing", "cells": [{"index": 0, "phase": "Succeeded"}, {"index": 1}]},
            "Preparing, 1 of 2 cells done",
        ),
        (
            {"phase": "Preparing", "blockers": [{"participant": "env", "id": str(i)} for i in range(5)]},
            "Preparing: waits for 0 (env, running), 1 (env, running), 2 (env, running) and 2 more",
        ),
        (
            {"phase": "Preparing", "blockers": [{"participant": "env", "id": "7-0", "where": "verify"}]},
            "Preparing: waits for 7-0 (env, verify)",
        ),
    ],
)
def test_progress_is_a_line(status: dict[str, Any], line: str) -> None:
    assert views.progress_of(checkpoint("one", **status)) == line


def test_what_came_of_it_is_a_line() -> None:
    assert views.outcome_of(done("one")) == "4 rollouts in 2.0 KiB, paused for 0.2s"
    assert views.outcome_of(checkpoint("one", restartCount=1)).endswith(", 1 would start over")
    assert views.failure_of(checkpoint("one", reason="Because", message="of that")) == "Because: of that"
    assert views.failure_of(checkpoint("one")) == "without a reason"
