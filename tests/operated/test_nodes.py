"""Nodes that are cordoned and drained under the operator's workers: cells leave them, and a drain comes to an end."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects.fleet import RESYNC_SECONDS
from gym_operator.effects.kube import CHILDREN, NODES, PODS, RESTORES, Body, Resource
from gym_operator.rules.rollouts import BUDGET_SECONDS
from gym_rig.cell import IDENTITY
from gym_rig.collecting import rows, taken, to_the_end, under_way
from gym_rig.operated import OperatedRig, Reopened, operated
from gym_rig.rolling import SLOW, nothing_was_done_twice, recoveries, sources, stage, up_to_date
from gym_rig.virtual import now
from gym_servers import assemble
from gym_servers.coordination.checkpoint import CheckpointFailed
from gym_servers.coordination.controller import CellController


async def test_a_cell_is_moved_off_a_node_that_is_cordoned(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(9), cells=2, nodes=True, rate=20.0) as rig:
        await under_way(rig)
        budget = rig.kube.objects[CHILDREN["PodDisruptionBudget"], IDENTITY.namespace, "rig-servers"]
        assert budget["spec"]["maxUnavailable"] == 0
        rig.node = "node-2"
        rig.cordon("node-1")
        await rig.until(lambda: all(rig.in_service(1, cell=cell) for cell in range(2)), "moved")
        assert [sources(rig, cell) for cell in range(2)] == [["roll-out"]] * 2
        assert "node node-1 of " in recoveries(rig)[0].reason
        assert nodes(rig) == {"node-2"}
        await to_the_end(rig, 9)
        nothing_was_done_twice(rig)


def nodes(rig: OperatedRig) -> set[str]:
    """Where the pods are."""
    pods = [body for (resource, _, _), body in rig.kube.objects.items() if resource == PODS]
    return {body["spec"]["nodeName"] for body in pods}


def is_guarded(rig: OperatedRig, pod: Body) -> bool:
    """Whether the stack's budget keeps a pod from being evicted, by the rules of the API server."""
    spec = rig.kube.objects[CHILDREN["PodDisruptionBudget"], IDENTITY.namespace, "rig-servers"]["spec"]
    labels, selector = pod["metadata"]["labels"], spec["selector"]
    selected = selector["matchLabels"].items() <= labels.items() and not any(
        labels.get(each["key"]) in each["values"] for each in selector["matchExpressions"]
    )
    return selected and spec["maxUnavailable"] == 0


def all_are_guarded(rig: OperatedRig) -> bool:
    return all(is_guarded(rig, body) for (resource, _, _), body in rig.kube.objects.items() if resource == PODS)


async def drained(rig: OperatedRig, node: str) -> None:
    """As kubectl drain does it: asks by name every five seconds, also for a pod that is another one by now. One that
    ends already is let go whatever a budget says."""
    asked_for = {
        name: body["metadata"]["uid"]
        for (resource, _, name), body in rig.kube.objects.items()
        if resource == PODS and body["spec"]["nodeName"] == node
    }
    rig.cordon(node)
    while asked_for:
        for name, uid in list(asked_for.items()):
            pod = rig.kube.objects.get((PODS, IDENTITY.namespace, name))
            ends = pod is None or pod["metadata"].get("deletionTimestamp")
            if pod is not None and not ends and is_guarded(rig, pod):
                continue
            if pod is not None:
                assert pod["metadata"]["uid"] == uid, "what had been moved was evicted"
                cell = int(name.rpartition("-")[2])
                assert ends or rig.record(cell).get("stage") != "running", f"cell {cell} was to be moved in its turn"
                rig.leave(name)
            del asked_for[name]
        await asyncio.sleep(5)


@pytest.mark.parametrize("cells", [1, 2])
async def test_who_drains_a_node_gets_each_cell_s_pods_when_it_has_had_its_last_checkpoint(
    tmp_path: Path, cells: int
) -> None:
    async with operated(tmp_path, rows(9), cells=cells, nodes=True, rate=SLOW) as rig:
        await under_way(rig)
        rig.node = "node-2"
        async with asyncio.timeout(120):
            await drained(rig, "node-1")
        await rig.until(lambda: all(rig.in_service(1, cell=cell) for cell in range(cells)), "moved")
        assert [sources(rig, cell) for cell in range(cells)] == [["roll-out"]] * cells
        await rig.until(lambda: all_are_guarded(rig), "guarded again")
        await to_the_end(rig, 9)
        nothing_was_done_twice(rig)


def budgets(rig: OperatedRig, seconds: float, monkeypatch: pytest.MonkeyPatch, *, lands: str = "late") -> None:
    """From now on a write of a budget takes so long until it has happened, or until the operator hears of it."""
    replace = rig.kube.replace

    async def slow(resource: Resource, namespace: str, body: Body) -> Body:
        late = resource == CHILDREN["PodDisruptionBudget"]
        if late and lands == "late":
            await asyncio.sleep(seconds)
        written = await replace(resource, namespace, body)
        if late and lands == "at once":
            await asyncio.sleep(seconds)
        return written

    monkeypatch.setattr(rig.kube, "replace", slow)


@pytest.mark.parametrize("seconds", [8.0, 20.0])
@pytest.mark.parametrize("lands", ["late", "at once"])
async def test_who_drains_a_node_has_its_time_from_when_the_budget_lets_it_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lands: str, seconds: float
) -> None:
    """A slow API server may need longer for that than the pods would be left alone. Also where they were before."""
    async with operated(tmp_path, rows(12), nodes=True, rate=SLOW) as rig:
        await under_way(rig)
        budgets(rig, seconds, monkeypatch, lands=lands)
        for attempt, (node, other) in enumerate([("node-1", "node-2"), ("node-2", "node-1")], start=1):
            rig.node = other
            rig.cordon(other, cordoned=False)
            async with asyncio.timeout(120):
                await drained(rig, node)
            await rig.until(lambda a=attempt: rig.in_service(a), "moved")
            await rig.until(lambda: all_are_guarded(rig), "guarded again")
        assert sources(rig) == ["roll-out"] * 2


async def test_a_budget_that_cannot_be_changed_keeps_no_cell_on_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operated(tmp_path, rows(9), nodes=True, rate=SLOW) as rig:
        await under_way(rig)
        rig.kube.permitted = lambda verb, resource, _: (verb, resource) != ("update", CHILDREN["PodDisruptionBudget"])
        rig.node = "node-2"
        rig.cordon("node-1")
        began = now()
        await rig.until(lambda: rig.in_service(1), "moved")
        assert nodes(rig) == {"node-2"} and now() - began < BUDGET_SECONDS + 20


async def no_checkpoint(*_: Any, **__: Any) -> None:
    raise CheckpointFailed("PrepareTimeout", "a tool takes its time")


@pytest.mark.parametrize("why", ["a server dies", "no last checkpoint can be taken", "it is restored"])
async def test_who_drains_a_node_comes_to_an_end_whatever_the_cell_is_replaced_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """kubectl is let through to the old pods, or it would ask for those that come in their place for ever."""
    async with operated(tmp_path, rows(9), nodes=True, rate=SLOW) as rig:
        await under_way(rig)
        await taken(rig, "one")
        monkeypatch.setattr(CellController, "take", no_checkpoint)
        rig.node = "node-2"
        async with asyncio.timeout(120):
            draining = asyncio.create_task(drained(rig, "node-1"))
            await asyncio.sleep(1)
            if why == "a server dies":
                rig.cell.kill("agent")
            elif why == "it is restored":
                source = {"stackRef": {"name": IDENTITY.name}, "checkpointRef": {"name": "one"}}
                rig.kube.put(RESTORES, IDENTITY.namespace, {"metadata": {"name": "back"}, "spec": source})
            await draining
        await rig.until(lambda: rig.in_service(1), "moved")
        assert sources(rig) == ["one"]
        await to_the_end(rig, 9)


@pytest.mark.parametrize(
    ("recovery", "reads"), [({"backoffLimit": 0}, "stalled"), ({"policy": "Manual"}, "starting")]
)
async def test_who_drains_a_node_is_let_through_to_pods_that_nobody_moves(
    tmp_path: Path, recovery: dict[str, Any], reads: str
) -> None:
    """Nothing goes on in them, for as long as it takes somebody to mend that."""
    async with operated(tmp_path, rows(), nodes=True, rate=SLOW, recovery=recovery) as rig:
        await under_way(rig)
        rig.cell.kill("agent")
        await rig.until(lambda: stage(rig) == reads, reads)
        await asyncio.sleep(30)
        rig.node = "node-2"
        async with asyncio.timeout(60):
            await drained(rig, "node-1")


async def kept_waiting(rig: OperatedRig, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cell's agent dies, and what comes of that is for people."""
    with monkeypatch.context() as context:
        if why == "CodeMismatch":
            context.setattr(assemble, "FORMAT", 0)  # of the processes that come now
        rig.cell.kill("agent")
        await rig.until(lambda: rig.conditions()["Ready"]["reason"] == why, why)
        await rig.until(lambda: len(rig.pods(0)) == len(rig.pods(1)), "its fresh pods are there")


WAITING: dict[str, dict[str, Any]] = {
    "BackoffLimitExceeded": {"backoffLimit": 0},
    "RecoveryHeld": {"policy": "Manual"},
    "CodeMismatch": {},
}


@pytest.mark.parametrize("why", WAITING)
async def test_cells_in_service_leave_a_node_though_another_waits_for_people(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """It may wait for days, and a node that is drained cannot; one of them after the other all the same."""
    async with operated(tmp_path, rows(9), cells=3, nodes=True, rate=SLOW, recovery=WAITING[why]) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        await kept_waiting(rig, why, monkeypatch)
        told, down = rig.kube.watch, list[set[int]]()

        def watch(resource: Resource, deleted: bool, body: Body) -> None:
            told(resource, deleted, body)
            down.append({cell for cell in (1, 2) if not rig.in_service(cell=cell)})

        rig.kube.watch = watch
        rig.node, waits = "node-2", rig.pods(0)
        rig.cordon("node-1")
        await rig.until(lambda: all(rig.in_service(1, cell=cell) for cell in (1, 2)), "moved")
        assert max(map(len, down)) == 1, "the others work on"
        assert [sources(rig, cell) for cell in (1, 2)] == [["roll-out"]] * 2
        assert (rig.conditions()["Ready"]["reason"], rig.pods(0)) == (why, waits)
        async with asyncio.timeout(120):
            await drained(rig, "node-1")
        await rig.until(lambda: nodes(rig) == {"node-2"}, "the node is empty")


async def test_another_image_waits_for_a_cell_that_people_decide_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets the image first, and nobody knows yet what becomes of it with that."""
    async with operated(tmp_path, rows(9), cells=3, nodes=True, rate=SLOW, recovery={"policy": "Manual"}) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        await kept_waiting(rig, "RecoveryHeld", monkeypatch)
        rig.change(image="rig:2")
        rig.cordon("node-1")
        rig.node = "node-2"
        await rig.until(lambda: rig.images(0) == {"rig:2"}, "tried by the one that does nothing")
        await asyncio.sleep(60)
        assert rig.images(1) | rig.images(2) == {"rig:1"}
        _, reason, message = up_to_date(rig)
        assert (reason, message[:79]) == (
            "RollingOut",
            "cell 0 has to be in service first; cell 1: the spec has another image or other ",
        )
        rig.change(recovery={"policy": "Restore"})
        await rig.until(lambda: rig.images() == {"rig:2"} and rig.all_in_service(), "replaced")
        assert [sources(rig, cell) for cell in range(3)] == [["one"], ["roll-out"], ["roll-out"]]


async def test_a_cell_that_does_not_come_up_where_it_was_moved_to_is_followed_by_none(tmp_path: Path) -> None:
    """Though it has given up as well."""
    async with operated(tmp_path, rows(9), cells=2, nodes=True, rate=SLOW, recovery={"backoffLimit": 1}) as rig:
        await under_way(rig)
        told = rig.kube.watch

        def dies(resource: Resource, deleted: bool, body: Body) -> None:
            told(resource, deleted, body)
            if rig.record().get("pins") and rig.record().get("attempt") and stage(rig) == "starting":
                rig.cell.kill("agent")

        rig.kube.watch = dies
        rig.cordon("node-1")
        rig.node = "node-2"
        await rig.until(lambda: stage(rig) == "stalled", "given up")
        await asyncio.sleep(60)
        assert rig.in_service(cell=1) and not recoveries(rig, 1)
        assert up_to_date(rig)[2].startswith("cell 0 has to be in service first; cell 1: node node-1 of ")


def silence(rig: OperatedRig) -> None:
    """The watch of nodes tells nothing any more; the others go on."""
    told = rig.kube.watch

    def watch(resource: Resource, deleted: bool, body: Body) -> None:
        if resource != NODES:
            told(resource, deleted, body)

    rig.kube.watch = watch


async def test_k17_a_cell_leaves_a_cordoned_node_that_the_watch_does_not_tell_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operated(tmp_path, rows(9), nodes=True, rate=SLOW) as rig:
        for node in ("node-1", "node-2"):
            rig.cordon(node, cordoned=False)
        await under_way(rig)
        operator = rig.operator
        assert operator is not None
        await rig.until(operator.fleet._resync.complete.is_set, "all was told once")
        opened = Reopened(rig)
        monkeypatch.setattr(operator.fleet, "_reopen", opened)
        silence(rig)
        rig.node = "node-2"
        rig.cordon("node-1")
        began = now()
        await rig.until(lambda: rig.in_service(1), "moved")
        assert now() - began < RESYNC_SECONDS + 20
        assert (sources(rig), nodes(rig)) == (["roll-out"], {"node-2"})
        await asyncio.sleep(2 * RESYNC_SECONDS)
        assert opened.times == 1, "once, and that helped"
        assert operator.fleet.health()["ok"]


async def test_k17_a_watch_of_nodes_that_stays_silent_ends_in_a_restart(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), nodes=True, suspend=True) as rig:
        await rig.until(lambda: rig.status().get("phase") == "Suspended", "suspended")
        operator = rig.operator
        assert operator is not None
        silence(rig)
        for number in range(9):
            rig.cordon("node-1", cordoned=number % 2 == 0)
            await asyncio.sleep(RESYNC_SECONDS)
        assert operator.fleet.health()["silentWatches"] == ["nodes"]
        assert not operator.fleet.health()["ok"]


async def test_an_operator_that_may_not_watch_nodes_lets_evictions_through(tmp_path: Path) -> None:
    """One before it may have been allowed to."""
    async with operated(tmp_path, rows(), rate=SLOW, nodes=True) as rig:
        await under_way(rig)
        key = (CHILDREN["PodDisruptionBudget"], IDENTITY.namespace, "rig-servers")
        assert key in rig.kube.objects
        rig.nodes_are_watched = False
        rig.kill_operator()
        rig.start_operator()
        await rig.until(lambda: key not in rig.kube.objects, "let through")
        rig.cordon("node-1")
        await asyncio.sleep(60)
        assert not recoveries(rig)


async def test_a_node_that_is_in_use_again_keeps_its_pods(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOW, nodes=True) as rig:
        rig.cordon("node-1")
        rig.cordon("node-1", cordoned=False)
        await under_way(rig)
        await asyncio.sleep(60)
        assert not recoveries(rig)
