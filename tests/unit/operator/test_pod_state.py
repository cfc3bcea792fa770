"""What pods say about their processes."""

from __future__ import annotations

from typing import Any

import pytest

from gym_operator.api import names
from gym_operator.rules.pod_state import by_server, is_cordoned, is_hopeless, node_is_lost, observe, pod_uid

RUNNING = {"name": "server", "containerID": "containerd://1", "state": {"running": {}}}


def pod(uid: str = "uid-1", server: str = "env", container: Any = RUNNING, **parts: Any) -> dict[str, Any]:
    status = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [container] if container else []}
    return {
        "metadata": {
            "name": f"demo-{server}-0",
            "namespace": "team",
            "uid": uid,
            "resourceVersion": "7",
            "creationTimestamp": "2027-01-15T08:00:00Z",
            "labels": {names.STACK_LABEL: "demo", names.STACK_UID_LABEL: "s", names.SERVER_LABEL: server},
            **parts.get("metadata", {}),
        },
        "spec": {"nodeName": "node-1"},
        "status": {**status, **parts.get("status", {})},
    }


def test_a_running_container_is_a_process() -> None:
    seen = observe(pod())
    assert (seen.incarnation, seen.alive, seen.detail) == ("uid-1/containerd://1", True, "")
    assert (seen.stack, seen.server, seen.cell, seen.address, seen.node) == ("demo", "env", 0, "10.0.0.1", "node-1")
    assert pod_uid(seen.incarnation or "") == "uid-1"


def test_a_pod_without_a_container_has_no_process() -> None:
    seen = observe(pod(container=None, status={"phase": "Pending"}))
    assert (seen.incarnation, seen.alive, seen.detail) == (None, False, "pending")


def test_a_restart_in_place_is_another_process() -> None:
    again = {**RUNNING, "containerID": "containerd://2"}
    assert observe(pod()).incarnation != observe(pod(container=again)).incarnation


@pytest.mark.parametrize(
    ("parts", "detail"),
    [
        (
            {
                "metadata": {"deletionTimestamp": "2027-01-15T08:00:10Z"},
                "container": {**RUNNING, "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
            },
            "deleted",
        ),
        ({"status": {"phase": "Failed", "reason": "Evicted", "message": "low on memory"}}, "Evicted: low on memory"),
        (
            {"container": {**RUNNING, "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}},
            "OOMKilled, exit code 137",
        ),
        (
            {
                "container": {
                    **RUNNING,
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                    "lastState": {"terminated": {"exitCode": 2}},
                }
            },
            "CrashLoopBackOff, last exit code 2: back-off",
        ),
        (
            {
                "metadata": {"deletionTimestamp": "2027-01-15T08:00:10Z"},
                "container": {**RUNNING, "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}},
                "status": {
                    "conditions": [
                        {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"},
                    ]
                },
            },
            "deleted by EvictionByEvictionAPI",
        ),
        (
            {
                "container": None,
                "status": {
                    "phase": "Pending",
                    "conditions": [
                        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no cpu"}
                    ],
                },
            },
            "Unschedulable: no cpu",
        ),
    ],
)
def test_a_process_that_is_not_alive_says_why(parts: dict[str, Any], detail: str) -> None:
    container = parts.pop("container", RUNNING)
    seen = observe(pod(container=container, **parts))
    assert not seen.alive
    assert seen.detail == detail


@pytest.mark.parametrize(
    ("conditions", "detail"),
    [
        ([], "deleted"),
        (
            [{"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}],
            "deleted by EvictionByEvictionAPI",
        ),
    ],
)
def test_a_process_whose_pod_is_deleted_is_alive_until_it_ends(conditions: list[Any], detail: str) -> None:
    parts = {"metadata": {"deletionTimestamp": "2027-01-15T08:00:10Z"}, "status": {"conditions": conditions}}
    seen = observe(pod(**parts))
    assert (seen.alive, seen.leaving, seen.detail) == (True, True, detail)
    assert not observe(pod()).leaving
    assert not observe(pod(container=None, **parts)).leaving


@pytest.mark.parametrize(
    ("reason", "hopeless"),
    [("ErrImagePull", True), ("ImagePullBackOff", True), ("CrashLoopBackOff", True), ("ContainerCreating", False)],
)
def test_what_a_pod_was_made_from_may_keep_it_from_coming_up(reason: str, hopeless: bool) -> None:
    container = {"name": "server", "state": {"waiting": {"reason": reason, "message": "m"}}}
    assert is_hopeless(observe(pod(container=container, status={"phase": "Pending"}))) == hopeless
    deleted = {"deletionTimestamp": "2027-01-15T08:00:10Z"}
    assert not is_hopeless(observe(pod(container=container, metadata=deleted)))


def test_a_cordoned_node_takes_nothing_new() -> None:
    assert is_cordoned({"spec": {"unschedulable": True}})
    assert not is_cordoned({"spec": {}})
    assert not is_cordoned({"metadata": {"name": "gone"}})


def test_an_end_that_nobody_confirms_is_overdue() -> None:
    """Whatever time the API server's clock has: only how long it was waited for counts."""
    deleted = {"deletionTimestamp": "2027-01-15T08:00:00Z", "deletionGracePeriodSeconds": 30}
    seen = observe(pod(metadata=deleted))
    assert not seen.overdue(45)
    assert seen.overdue(51)
    assert not observe(pod()).overdue(1e12)


def test_the_youngest_pod_of_a_server_counts() -> None:
    old = observe(pod("old"))
    new = observe(pod("new", metadata={"creationTimestamp": "2027-01-15T08:00:01Z"}))
    assert by_server([new, old])["env"].uid == "new"


@pytest.mark.parametrize(("status", "lost"), [("True", False), ("False", False), ("Unknown", True), (None, False)])
def test_a_node_is_lost_when_nothing_is_heard_of_it(status: str | None, lost: bool) -> None:
    conditions = [{"type": "Ready", "status": status}] if status else []
    assert node_is_lost({"status": {"conditions": conditions}}) == lost
