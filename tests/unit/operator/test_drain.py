"""How long a cell that is to go is waited for."""

from __future__ import annotations

from typing import Any

import pytest

from gym_operator.api.stack import CellStatus, StackStatus
from gym_operator.api.stack import Drain as DrainStatus
from gym_operator.rules.drain import Drain, drain, drain_told, running_in
from gym_operator.rules.pod_state import PodState
from gym_servers.protocol.messages import Report, Status

BEGAN = 1_800_000_000.0


def pod(**parts: Any) -> PodState:
    known: dict[str, Any] = {
        "uid": "env",
        "name": "demo-env-2",
        "namespace": "team",
        "stack": "demo",
        "stack_uid": "s",
        "server": "env",
        "cell": 2,
        "version": 1,
        "created": "",
        "incarnation": "env/1",
        "alive": True,
        "ready": True,
        "address": "10.0.0.1",
        "node": "node-1",
        "detail": "",
        "grace": None,
    }
    return PodState(**{**known, **parts})


def said(kind: str, **counts: int) -> Status:
    report = Report(ready=True, counts=counts)
    return Status(kind=kind, instance=kind, session="s", phase="idle", cell_attempt=0, report=report)


@pytest.mark.parametrize(
    ("statuses", "running"),
    [
        ([said("environment", live=2, unclaimed=1)], 3),
        ([said("environment", live=2), said("collection", outstanding=1)], 2),
        ([said("environment", live=0, unclaimed=0), said("collection", outstanding=1, rows=9)], 1),
        ([said("environment"), said("collection", rows=9)], 0),
        ([said("environment"), None], None),
        ([], None),
    ],
    ids=["restored ones too", "the same rollout", "a row not written yet", "all ended", "one is silent", "nobody"],
)
def test_what_runs_is_what_has_begun_and_not_ended(statuses: list[Status | None], running: int | None) -> None:
    assert running_in(statuses) == running


@pytest.mark.parametrize(
    ("running", "parts", "cordoned", "seconds", "over"),
    [
        (2, {}, (), 299, ""),
        (None, {}, (), 299, ""),
        (0, {}, (), 1, "all that it had begun had ended"),
        (2, {}, (), 300, "2 of its rollouts had not ended within spec.scaleDown.drainTimeout"),
        (None, {}, (), 301, "its rollouts had not ended within spec.scaleDown.drainTimeout"),
        (2, {"leaving": True, "detail": "deleted"}, (), 1, "the pod of env was deleted"),
        (2, {}, ("node-1",), 1, "node node-1 of env is cordoned"),
        (2, {"node": None}, ("node-1",), 1, ""),
        (2, {}, ("node-2",), 1, ""),
    ],
)
def test_it_is_waited_for_until_nothing_runs_or_the_time_is_over_or_somebody_asks_for_it(
    running: int | None, parts: dict[str, Any], cordoned: tuple[str, ...], seconds: float, over: str
) -> None:
    found = drain(BEGAN, 300, running, {"env": pod(**parts)}, cordoned, BEGAN + seconds)
    assert found == Drain(BEGAN, BEGAN + 300, running, over)


def test_a_drain_is_taken_up_as_it_was_told() -> None:
    told = DrainStatus(started_at="2027-01-15T08:00:00Z", until="2027-01-15T08:05:00Z", running=2)
    status = StackStatus(cells=(CellStatus(index=1), CellStatus(index=2, drain=told)))
    assert drain_told(status, 2) == Drain(BEGAN, BEGAN + 300, 2)
    assert drain_told(status, 1) is drain_told(status, 3) is None
