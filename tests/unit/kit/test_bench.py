"""The pure parts of the operator's measurement."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from gym_bench import objects
from gym_bench.measure import in_order
from gym_bench.options import Options, from_environment
from gym_bench.process import parse
from gym_bench.report import Point, document, per_minute, percentile, table
from gym_kit.api_proxy import Call, call_of
from gym_kit.errors import KitError
from gym_operator.api.checkpoint import GymCheckpoint
from gym_operator.api.schedule import GymCheckpointSchedule
from gym_operator.api.stack import GymStack
from gym_operator.rules.cell_record import from_document
from gym_operator.rules.checkpoint_entries import entry_of
from gym_operator.rules.rest import at_rest

POINT = Point(
    checkpoints=20,
    rss_started=70.0,
    rss_loaded=90.0,
    rss_rest=95.0,
    rss_peak=120.0,
    ready_seconds=1.0,
    all_seen_seconds=2.0,
    start_calls=100,
    start_s3_requests=0,
    cpu_start_seconds=1.5,
    cpu_per_minute=0.2,
    calls={"watch pods": 3.0},
    s3_requests=0.0,
    reconcile=[0.1, 0.2, 0.3],
)


@pytest.mark.parametrize(
    ("method", "path", "watch", "call"),
    [
        ("GET", "/api/v1/pods", True, Call("watch", "pods")),
        ("GET", "/api/v1/namespaces/team/pods", False, Call("list", "pods")),
        ("GET", "/api/v1/namespaces/team/secrets/keys", False, Call("get", "secrets")),
        ("GET", "/api/v1/namespaces/kube-system", False, Call("get", "namespaces")),
        ("GET", "/api/v1/namespaces", False, Call("list", "namespaces")),
        ("GET", "/apis/gymops.dev/v1alpha1/gymstacks", False, Call("list", "gymstacks")),
        (
            "PUT",
            "/apis/gymops.dev/v1alpha1/namespaces/team/gymstacks/demo/status",
            False,
            Call("update", "gymstacks/status"),
        ),
        ("POST", "/apis/apps/v1/namespaces/team/statefulsets", False, Call("create", "statefulsets")),
        ("DELETE", "/api/v1/namespaces/team/pods/one", False, Call("delete", "pods")),
        ("GET", "/apis", False, Call("get", "discovery")),
        ("GET", "/apis/gymops.dev/v1alpha1", False, Call("get", "discovery")),
        ("GET", "/version", False, Call("get", "/version")),
    ],
)
def test_a_request_is_counted_as_what_it_is(method: str, path: str, watch: bool, call: Call) -> None:
    assert call_of(method, path, watch=watch) == call


def test_memory_and_time_are_read_as_the_kernel_writes_them() -> None:
    status = "Name:\tpython (x) y\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n"
    stat = "7 (python (x) y) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 1 0 99 1 1"
    found = parse(status, stat, 100)
    assert (found.rss, found.peak, found.cpu) == (1024 * 1024, 2048 * 1024, 3.0)


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile(values, 1.0)) == (50.0, 99.0, 100.0)
    assert percentile([3.0], 0.99) == 3.0


def test_counts_are_told_for_a_minute() -> None:
    assert per_minute(Counter({"watch pods": 2}), 30.0) == {"watch pods": 4.0}


def test_the_account_has_everything_in_it_and_says_what_history_costs() -> None:
    little = replace(POINT, checkpoints=2, cpu_per_minute=0.1)
    found = document(Options(), [little, POINT], {"cpus": 2.0, "load_before": 1.0, "load_after": 2.0})
    assert json.loads(json.dumps(found)) == found
    assert found["points"][1]["reconcile_p99"] == 0.3
    assert found["ratios"] == {"history": 10.0, "calls_per_minute": 1.0, "cpu_per_minute": 2.0, "rss_rest": 1.0}
    lines = table(found).splitlines()
    assert any(line.split() == ["watch", "pods", "3.0", "3.0"] for line in lines)
    nothing = replace(POINT, calls={}, checkpoints=2)
    assert document(Options(), [nothing, nothing], {})["ratios"]["calls_per_minute"] is None


def test_what_is_measured_is_what_the_operator_reads() -> None:
    """Objects that it refused, or had something to do about, would be another measurement."""
    given = {"uid": "uid", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z", "generation": 1}

    def held(body: objects.Body, status: objects.Body | None = None) -> objects.Body:
        return {**body, "metadata": {**body["metadata"], **given}, "status": status or {}}

    stack = GymStack.parse(held(objects.stack(1, "http://s3"), objects.stack_status("uid", 3)))
    records = [from_document(cell.record) for cell in stack.status.cells]
    assert at_rest(suspended=stack.spec.suspend, records=records, has_pods=False, waiting=False)
    GymCheckpointSchedule.parse(held(objects.schedule(1)))
    body = held(objects.checkpoint(3, "stack", "schedule-uid"), objects.checkpoint_status(3, "uid", "http://s3"))
    GymCheckpoint.parse(body)
    entry = entry_of(body)
    assert (entry.final, entry.schedule_uid, entry.parts[0].order) == (True, "schedule-uid", (1, 3))


@pytest.mark.parametrize(
    ("observed", "proved", "proved_for", "wanted"),
    [(2, "True", 2, True), (1, "True", 1, False), (2, "True", 1, False), (2, "Unknown", 2, False)],
)
def test_a_stack_is_in_order_once_the_storage_of_its_spec_was_tried(
    observed: int, proved: str, proved_for: int, wanted: bool
) -> None:
    """What was found for the spec before does not count: the next operator would try it, beside what is measured."""
    condition = {"type": "StorageReady", "status": proved, "observedGeneration": proved_for}
    body = {"metadata": {"generation": 2}, "status": {"observedGeneration": observed, "conditions": [condition]}}
    assert in_order(body) is wanted
    assert not in_order({"metadata": {"generation": 1}})


@pytest.mark.parametrize(
    ("name", "text"),
    [("STACKS", "0"), ("STACKS", "many"), ("CHECKPOINTS", "9"), ("REST", "-1"), ("SCHEDULES", "201")],
)
def test_what_cannot_be_measured_is_refused(name: str, text: str) -> None:
    with pytest.raises(KitError, match=f"{name}={text} is"):
        from_environment({name: text})


def test_what_is_measured_can_be_chosen() -> None:
    assert from_environment({}) == Options()
    assert from_environment({"STACKS": "7", "SCHEDULES": "7", "REST": ""}) == replace(
        Options(), stacks=7, schedules=7
    )
