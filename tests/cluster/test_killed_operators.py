"""An operator that is killed at each named step of what it does, before the API server has the write that names it or
after that: the next one ends what was begun, and nothing is lost, parked or done twice.

By turns before and after; all of both with `N=1`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from gym_kit.api_proxy import ApiProxy, Call
from gym_kit.operator_rig import NAMESPACE, OperatorRig
from gym_kit.progress import Progress
from gym_operator.api import names
from gym_operator.effects.kube import CHECKPOINTS, RESTORES, Resource
from gym_operator.rules.cell_record import from_document
from gym_servers.storage.manifest import CHECKPOINT, read_publication

pytestmark = pytest.mark.timeout(300)
STACK = "killed"
ROLLOUTS = 1000
"""More than get done meanwhile."""
START_SECONDS = 120.0
STEP_SECONDS = 60.0
END_SECONDS = 120.0

Here = Callable[[Call, Mapping[str, Any]], bool]


def of_phase(resource: Resource, phase: str) -> Here:
    return lambda call, body: (
        call == Call("update", f"{resource.plural}/status") and (body.get("status") or {}).get("phase") == phase
    )


def of_stage(stage: str) -> Here:
    """The record of the only cell."""

    def here(call: Call, body: Mapping[str, Any]) -> bool:
        cells = (body.get("status") or {}).get("cells") or [{}]
        record = from_document(cells[0].get("record"))
        return call == Call("update", "gymstacks/status") and record is not None and record.stage == stage

    return here


def of_resource(verb: str, resource: str) -> Here:
    return lambda call, _: call == Call(verb, resource)


def released(call: Call, body: Mapping[str, Any]) -> bool:
    """The write that lets a checkpoint go."""
    return call == Call("update", "gymcheckpoints") and names.DATA_FINALIZER not in (
        body["metadata"].get("finalizers") or ()
    )


CHECKPOINT_STEPS = {
    phase: of_phase(CHECKPOINTS, phase) for phase in ("Preparing", "Committing", "Publishing", "Succeeded")
}
RECOVERY_STEPS = {
    "replacing": of_stage("replacing"),
    "a pod is deleted": of_resource("delete", "pods"),
    "starting": of_stage("starting"),
    "running": of_stage("running"),
}
RESTORE_STEPS = {
    "Restoring": of_phase(RESTORES, "Restoring"),
    "replacing": of_stage("replacing"),
    "running": of_stage("running"),
    "Succeeded": of_phase(RESTORES, "Succeeded"),
}
DELETION_STEPS = {"Deleting": of_phase(CHECKPOINTS, "Deleting"), "released": released}


def each_step(steps: Mapping[str, Here]) -> pytest.MarkDecorator:
    """Gives a test `here` and `after`."""
    every = int(os.environ.get("N", "0")) > 0
    wanted = [
        pytest.param(here, after, id=f"{'after' if after else 'before'} {step}")
        for number, (step, here) in enumerate(steps.items())
        for after in ((False, True) if every else (number % 2 == 1,))
    ]
    return pytest.mark.parametrize(("here", "after"), wanted)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorRig]:
    with OperatorRig(tmp_path_factory.mktemp("killed"), Progress.to_stderr()) as rig:
        collection = {**rig.manifest(STACK)["spec"]["collection"], "concurrency": 8}
        rig.apply(STACK, rollouts=ROLLOUTS, collection=collection, recovery={"backoffLimit": 100})
        yield rig


@pytest.fixture
def way(cluster: OperatorRig, tmp_path: Path) -> Iterator[ApiProxy]:
    """An operator that goes by a proxy, and a stack in service."""
    with ApiProxy(cluster.kubeconfig, tmp_path) as proxy:
        cluster.start_operator(kubeconfig=proxy.kubeconfig)
        cluster.until("rollouts are under way", lambda: at_work(cluster), START_SECONDS)
        yield proxy
        cluster.kill_operator()


@pytest.fixture
def named() -> str:
    """A name that no other test has."""
    return f"at-{secrets.token_hex(4)}"


def at_work(rig: OperatorRig, attempt: int = 0) -> bool:
    cell = rig.cell(STACK)
    phases = {one.get("phase") for one in cell.get("participants") or ()}
    return cell.get("phase") == "Running" and cell.get("attempt", 0) >= attempt and phases == {"idle"}


def killed_at(rig: OperatorRig, way: ApiProxy, here: Here, begin: Callable[[], object], *, after: bool) -> None:
    """Begin something, kill the operator at a write that it makes for it, and start another."""
    reached = way.stop_at(here, after=after)
    begin()
    rig.until("it comes to the write", reached.is_set, STEP_SECONDS)
    rig.kill_operator()
    rig.start_operator(kubeconfig=way.kubeconfig)


def final(rig: OperatorRig, resource: Resource, name: str) -> bool:
    return rig.status(resource, name).get("phase") in ("Succeeded", "Failed")


def take(rig: OperatorRig, name: str, **spec: Any) -> dict[str, Any]:
    rig.checkpoint(name, STACK, **spec)
    rig.until(f"{name} is final", lambda: final(rig, CHECKPOINTS, name), END_SECONDS)
    status = rig.status(CHECKPOINTS, name)
    assert status["phase"] == "Succeeded", status
    return status


def goes_on(rig: OperatorRig, attempt: int) -> int:
    """Everybody is at work under this attempt or a later one, which is returned, and rows come in."""
    rig.until("all are at work", lambda: at_work(rig, attempt), END_SECONDS)
    rows = rig.rows(STACK)
    rig.until("rows come in", lambda: rig.rows(STACK) > rows, END_SECONDS)
    cell = rig.cell(STACK)
    assert "open" not in cell["record"]
    return int(cell["attempt"])


def recovered(rig: OperatorRig, before: int, checkpoint: str) -> None:
    """The cell goes on from this checkpoint. The operator that was killed may have used a number up, and no more."""
    attempt = goes_on(rig, before + 1)
    assert before < attempt <= before + 2
    last = rig.cell(STACK)["recoveries"][-1]
    assert (last["checkpoint"], last["attempt"]) == (checkpoint, attempt)


@each_step(CHECKPOINT_STEPS)
def test_of_a_checkpoint(cluster: OperatorRig, way: ApiProxy, here: Here, after: bool, named: str) -> None:
    attempt = cluster.cell(STACK)["attempt"]
    killed_at(cluster, way, here, lambda: cluster.checkpoint(named, STACK), after=after)
    cluster.until("the checkpoint is final", lambda: final(cluster, CHECKPOINTS, named), END_SECONDS)
    torn = cluster.status(CHECKPOINTS, named)
    # What landed in storage is the truth, and the status says the same.
    landed = read_publication(cluster.store(torn["uri"]).get(CHECKPOINT))
    assert (torn["phase"] == "Succeeded") == (landed.state == "published"), torn
    if torn["phase"] == "Failed":
        assert torn["reason"] == "OperatorRestarted"
        assert cluster.condition(CHECKPOINTS, named, "Stalled")["status"] == "True"
    take(cluster, f"{named}-next")
    assert goes_on(cluster, attempt) == attempt


@each_step(RECOVERY_STEPS)
def test_of_a_recovery(cluster: OperatorRig, way: ApiProxy, here: Here, after: bool, named: str) -> None:
    kept, attempt = take(cluster, named), cluster.cell(STACK)["attempt"]
    killed_at(cluster, way, here, lambda: cluster.node.kill("agent"), after=after)
    recovered(cluster, attempt, kept["checkpointID"])


@each_step(RESTORE_STEPS)
def test_of_a_restore(cluster: OperatorRig, way: ApiProxy, here: Here, after: bool, named: str) -> None:
    kept, attempt = take(cluster, named), cluster.cell(STACK)["attempt"]
    body = {
        "apiVersion": names.API_VERSION,
        "kind": names.RESTORE_KIND,
        "metadata": {"name": named, "namespace": NAMESPACE},
        "spec": {"stackRef": {"name": STACK}, "checkpointRef": {"name": named}},
    }
    killed_at(cluster, way, here, lambda: cluster.run(cluster.kube.create(RESTORES, NAMESPACE, body)), after=after)
    cluster.until("the restore is final", lambda: final(cluster, RESTORES, named), END_SECONDS)
    assert cluster.status(RESTORES, named)["phase"] == "Succeeded"
    recovered(cluster, attempt, kept["checkpointID"])


@each_step(DELETION_STEPS)
def test_of_a_deletion(cluster: OperatorRig, way: ApiProxy, here: Here, after: bool, named: str) -> None:
    attempt = cluster.cell(STACK)["attempt"]
    uri = take(cluster, named, deletionPolicy="Delete")["uri"]
    assert cluster.store(uri).list("")
    killed_at(cluster, way, here, lambda: cluster.delete(CHECKPOINTS, named), after=after)
    cluster.until("it is gone", lambda: cluster.status(CHECKPOINTS, named) == {}, END_SECONDS)
    assert cluster.store(uri).list("") == {}
    assert goes_on(cluster, attempt) == attempt
