"""Planned replacement of pods under the operator's workers: nothing that could continue starts over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects import worker
from gym_operator.effects.kube import CHECKPOINTS, CHILDREN, PODS, RESTORES, Body, Resource
from gym_operator.effects.kube_host import KubeCellHost
from gym_operator.rules.cell_record import from_document
from gym_operator.rules.rollouts import BUDGET_SECONDS
from gym_rig.cell import IDENTITY
from gym_rig.collecting import owners, taken, to_the_end, under_way
from gym_rig.network import Fault
from gym_rig.operated import OperatedRig, operated
from gym_rig.virtual import now
from gym_rig.writes import at_any_write
from gym_servers import assemble
from gym_servers.coordination.checkpoint import CheckpointFailed
from gym_servers.coordination.controller import CellController
from gym_servers.coordination.record import Recovery
from gym_servers.engine.rows import counter_rows
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.store import StorageError

ROWS = 6
SLOW = 12.0  # tokens a second: work is left when something happens


def rows(count: int = ROWS) -> Any:
    return counter_rows(count, 1)


def recoveries(rig: OperatedRig, cell: int = 0) -> list[Recovery]:
    record = from_document(rig.record(cell))
    return record.recoveries if record is not None else []


def stage(rig: OperatedRig) -> str:
    """Where the first cell is: the stage that all begin in is not written down."""
    return str(rig.record().get("stage", "starting"))


def sources(rig: OperatedRig, cell: int = 0) -> list[str]:
    """The checkpoints that a cell's attempts continued from, by name."""
    return [one.checkpoint.name if one.checkpoint is not None else "the input" for one in recoveries(rig, cell)]


def up_to_date(rig: OperatedRig) -> tuple[str, str, str]:
    found = rig.conditions().get("UpToDate", {})
    return str(found.get("status")), str(found.get("reason")), str(found.get("message", ""))


def nothing_was_done_twice(rig: OperatedRig) -> None:
    """Where everything continues from a cut behind which nobody worked, each tool is called once."""
    calls = [entry["call_id"] for entry in rig.cell.journal() if entry["kind"] == "effect"]
    assert len(calls) == len(set(calls))


CHANGES: dict[str, Callable[[OperatedRig], None]] = {
    "another image": lambda rig: rig.change(image="rig:2"),
    "other settings": lambda rig: rig.change(
        servers=[*rig.spec["servers"][:2], with_steps(rig), rig.spec["servers"][3]]
    ),
}


def with_steps(rig: OperatedRig) -> Body:
    return {**rig.spec["servers"][2], "config": {"max_steps": 60}}


# ---- pods that somebody deletes ---------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [["agent"], ["collection"], ["env", "policy", "agent", "counter", "collection"]])
async def test_a_pod_that_somebody_deletes_costs_nothing(tmp_path: Path, servers: list[str]) -> None:
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        before = rig.pods()
        rig.leave(*(f"rig-{server}-0" for server in servers))
        await rig.until(lambda: rig.in_service(1), "continued")
        assert sources(rig) == ["roll-out"]
        (recovery,) = recoveries(rig)
        assert recovery.planned and "is being ended: its pod was deleted" in recovery.reason
        assert not set(before.values()) & set(rig.pods().values())
        assert rig.status()["cells"][0]["lastCheckpoint"]["name"] == "roll-out"
        assert not rig.events("Recovering") and rig.record().get("failures", 0) == 0
        await to_the_end(rig, ROWS)
        nothing_was_done_twice(rig)


async def test_a_pod_that_is_deleted_by_force_is_a_death(tmp_path: Path) -> None:
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert sources(rig) == ["one"]
        await to_the_end(rig, ROWS)


async def test_a_pod_whose_last_checkpoint_fails_is_recovered_as_after_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operated(tmp_path, rows(), rate=SLOW) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        failing(monkeypatch, "roll-out")
        began = now()
        rig.leave("rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert now() - began < 30, "it is not waited for"
        assert sources(rig) == ["one"]
        assert any("no space" in said for said in rig.events("LastCheckpointFailed"))
        await to_the_end(rig, ROWS)


def failing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Records of this checkpoint cannot be written."""
    create = DirectoryStore.create

    def fails(self: DirectoryStore, key: str, data: bytes) -> None:
        if f"-{name}-" in self.uri and not key.endswith(CHECKPOINT):
            raise StorageError("no space is left")
        create(self, key, data)

    monkeypatch.setattr(DirectoryStore, "create", fails)


async def test_a_pod_that_is_deleted_and_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOW) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"

        rig.cell.network.faults.append(Fault("unreachable", host="agent-control", calls=1000))
        rig.leave("rig-agent-0")
        began = now()
        await rig.until(lambda: bool(recoveries(rig)), "recovered")
        assert now() - began < 30
        rig.cell.network.faults.clear()
        await rig.until(lambda: rig.in_service(1), "in service")
        assert sources(rig)[0] == "one"


async def test_a_checkpoint_that_somebody_takes_is_let_end_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none begins between it and the last one, however long that takes to begin."""
    announce = KubeCellHost.announce

    async def slow(self: KubeCellHost, level: Any, reason: str, message: str) -> None:
        await asyncio.sleep(2 if reason == "RollingOut" else 0)
        await announce(self, level, reason, message)

    monkeypatch.setattr(KubeCellHost, "announce", slow)
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        rig.checkpoint("theirs")
        rig.checkpoint("zlater")
        await rig.reaches("theirs", "Preparing")
        rig.leave("rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "continued")
        assert rig.status(CHECKPOINTS, "theirs")["phase"] == "Succeeded"
        assert sources(rig) == ["roll-out"]
        await rig.until(lambda: rig.final("zlater"), "final")
        assert rig.status(CHECKPOINTS, "zlater")["phase"] == "Succeeded"
        uris = [rig.status(CHECKPOINTS, "theirs")["uri"], recoveries(rig)[0].checkpoint.uri]  # type: ignore[union-attr]
        assert [uri.rsplit("/", 1)[1][:13] for uri in uris] == ["000000-000001", "000000-000002"]
        assert "/000001-" in rig.status(CHECKPOINTS, "zlater")["uri"]
        await to_the_end(rig, ROWS)
        nothing_was_done_twice(rig)


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("first", ["theirs", "deleted"])
async def test_of_two_checkpoints_that_begin_together_neither_harms_the_other(
    tmp_path: Path, first: str, seconds: float
) -> None:
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        if first == "theirs":
            rig.checkpoint("theirs")
            await asyncio.sleep(seconds)
            rig.leave("rig-agent-0")
        else:
            rig.leave("rig-agent-0")
            await asyncio.sleep(seconds)
            rig.checkpoint("theirs")
        await rig.until(lambda: rig.in_service(1) and rig.final("theirs"), "continued")
        assert rig.status(CHECKPOINTS, "theirs")["phase"] == "Succeeded"
        assert sources(rig) == ["roll-out"]
        assert not rig.events("LastCheckpointFailed")


async def test_one_that_another_came_before_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was free when that was decided, and is not any more."""
    take, came = CellController.take, False

    async def slow(self: CellController, id: str, name: str, *arguments: Any, **options: Any) -> Any:
        nonlocal came
        if name == "roll-out" and not came:
            came = True
            theirs = asyncio.ensure_future(take(self, "theirs-id", "theirs", *arguments))
            await asyncio.sleep(0)
            with pytest.raises(CheckpointFailed, match="try again"):
                await take(self, id, name, *arguments, **options)
            await theirs
            raise CheckpointFailed("CellNotRunning", "another came first")
        return await take(self, id, name, *arguments, **options)

    monkeypatch.setattr(CellController, "take", slow)
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        rig.leave("rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "continued")
        assert came and sources(rig) == ["roll-out"]
        assert not rig.events("LastCheckpointFailed")
        await to_the_end(rig, ROWS)
        nothing_was_done_twice(rig)


async def test_a_policy_for_deaths_does_not_start_a_planned_replacement_over(tmp_path: Path) -> None:
    """Nor where its first try ends in a death."""
    async with operated(tmp_path, rows(), recovery={"policy": "Restart"}) as rig:
        await under_way(rig)
        told, died = rig.kube.watch, False

        def dies(resource: Resource, deleted: bool, body: Body) -> None:
            nonlocal died
            told(resource, deleted, body)
            if not died and rig.record().get("attempt") and stage(rig) == "starting" and rig.record().get("pins"):
                died = True
                rig.kube.remove(PODS, IDENTITY.namespace, "rig-env-0")

        rig.kube.watch = dies
        rig.leave("rig-agent-0")
        await rig.until(lambda: rig.in_service(2), "continued")
        assert sources(rig) == ["roll-out"] * 2
        await to_the_end(rig, ROWS)


async def test_pods_that_go_with_a_suspended_stack_are_no_reason_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the API server is slow, so that they go long before the stack's objects are all seen to."""
    ensure = worker.ensure_children

    async def slow(*arguments: Any, **options: Any) -> None:
        await ensure(*arguments, **options)
        await asyncio.sleep(3)

    monkeypatch.setattr(worker, "ensure_children", slow)
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        kept = await taken(rig, "kept")
        rig.change(suspend=True)
        await rig.until(lambda: not rig.pods() and rig.status()["phase"] == "Suspended", "suspended")
        assert not rig.events("RollingOut")
        rig.change(suspend=False)
        await rig.until(lambda: rig.in_service(1), "in service again")
        assert rig.part()["recoveries"][-1]["checkpoint"] == kept["checkpointID"]


# ---- another image, other settings ------------------------------------------------------------------------


@pytest.mark.parametrize("change", CHANGES)
async def test_cells_are_replaced_one_after_the_other_and_go_on_where_they_were(tmp_path: Path, change: str) -> None:
    async with operated(tmp_path, rows(9), cells=3, rate=20.0) as rig:
        await under_way(rig)
        await rig.until(lambda: up_to_date(rig)[0] == "True", "up to date")
        before, down = rig.pods(), list[set[int]]()
        told = rig.kube.watch

        def watch(resource: Resource, deleted: bool, body: Body) -> None:
            told(resource, deleted, body)
            down.append({cell for cell in range(3) if not rig.in_service(cell=cell)})

        rig.kube.watch = watch
        CHANGES[change](rig)
        await rig.until(lambda: all(rig.in_service(1, cell=cell) for cell in range(3)), "replaced")
        await rig.until(lambda: up_to_date(rig)[0] == "True", "up to date again")
        assert max(map(len, down)) == 1, "the others work on"
        assert [next(iter(cells)) for cells in down if cells] == sorted(next(iter(cells)) for cells in down if cells)
        assert not set(before.values()) & set(rig.pods().values())
        assert [sources(rig, cell) for cell in range(3)] == [["roll-out"]] * 3
        assert rig.images() == {rig.spec["image"]}
        assert not rig.events("CodeMismatch"), "neither is other code"
        await to_the_end(rig, 9)
        nothing_was_done_twice(rig)


async def test_a_stack_that_is_as_its_spec_says_is_left_alone(tmp_path: Path) -> None:
    """Also by an operator that is started again, and where what changed is nothing to a process."""
    async with operated(tmp_path, rows(), rate=SLOW) as rig:
        await under_way(rig)
        before = rig.pods()
        rig.kill_operator()
        rig.start_operator()
        checkpoints = {**rig.spec["checkpoints"], "prepareTimeout": "90s", "cellOrder": "Together"}
        rig.change(checkpoints=checkpoints, recovery={"backoffLimit": 7})
        await asyncio.sleep(90)
        assert rig.pods() == before
        assert up_to_date(rig)[0] == "True"
        (grace,) = {
            body["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
            for (resource, _, _), body in rig.kube.objects.items()
            if resource == CHILDREN["StatefulSet"]
        }
        assert grace == 90 + 120 + 20


@pytest.mark.parametrize("how", ["absent", "broken"])
async def test_an_image_that_does_not_come_up_stops_at_one_cell_and_the_old_one_mends_it(
    tmp_path: Path, how: str
) -> None:
    async with operated(tmp_path, rows(9), cells=3, rate=SLOW) as rig:
        await under_way(rig)
        getattr(rig, f"{how}_images").add("rig:bad")
        rig.change(image="rig:bad")
        await rig.until(lambda: up_to_date(rig)[1] == "PodsNotStarting", "told")
        others = {cell: rig.pods(cell) for cell in (1, 2)}
        await asyncio.sleep(20)
        said = up_to_date(rig)[2]
        assert said.startswith("cell 0: agent: ") and "BackOff" in said
        assert "no other cell is replaced before it is in service" in said
        assert "BackOff" in rig.conditions()["Ready"]["message"]
        assert {cell: rig.pods(cell) for cell in (1, 2)} == others
        assert all(rig.in_service(cell=cell) and not recoveries(rig, cell) for cell in (1, 2))
        rig.change(image="rig:1")
        await rig.until(rig.all_in_service, "mended")
        await rig.until(lambda: up_to_date(rig)[0] == "True", "up to date again")
        assert sources(rig) == ["roll-out"]
        assert {cell: rig.pods(cell) for cell in (1, 2)} == others
        await to_the_end(rig, 9)
        nothing_was_done_twice(rig)


async def test_a_cell_that_has_given_up_is_tried_again_with_another_image(tmp_path: Path) -> None:
    """Its servers come up, and end while they are restored."""
    async with operated(tmp_path, rows(), rate=SLOW, recovery={"backoffLimit": 1}) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"

        def dies(resource: Resource, deleted: bool, body: Body) -> None:
            told(resource, deleted, body)
            if rig.images() == {"rig:1"} and rig.record().get("pins") and stage(rig) == "starting":
                rig.cell.kill("agent")

        told, rig.kube.watch = rig.kube.watch, dies
        rig.cell.kill("agent")
        await rig.until(lambda: rig.status()["phase"] == "Failed", "given up")
        rig.change(image="rig:2")
        await rig.until(rig.in_service, "in service again")
        assert sources(rig)[-1] == "one"
        assert rig.images() == {"rig:2"}


async def test_a_cell_that_can_wait_has_several_tries_at_its_last_checkpoint_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operated(tmp_path, rows(), rate=4.0) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        failing(monkeypatch, "roll-out")
        rig.change(image="rig:2")
        await rig.until(lambda: "its last checkpoint failed: " in up_to_date(rig)[2], "told")
        assert rig.in_service(), "it works on"
        await rig.until(lambda: rig.in_service(1), "replaced")
        assert sources(rig) == ["one"]
        assert rig.record()["sequence"] == 5, "four tries"
        assert rig.images() == {"rig:2"}


@pytest.mark.parametrize("at", ["replacing", "starting"])
async def test_a_change_that_comes_during_a_recovery_is_taken_into_it_or_waits(tmp_path: Path, at: str) -> None:
    async with operated(tmp_path, rows(), rate=20.0) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        told, changed = rig.kube.watch, False

        def watch(resource: Resource, deleted: bool, body: Body) -> None:
            nonlocal changed
            told(resource, deleted, body)
            if not changed and stage(rig) == at:
                changed = True
                rig.change(image="rig:2")

        rig.kube.watch = watch
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: changed and rig.in_service(1) and rig.images() == {"rig:2"}, "replaced")
        await rig.until(lambda: up_to_date(rig)[0] == "True", "up to date")
        assert sources(rig) in (["one"], ["one", "roll-out"])
        await to_the_end(rig, ROWS)


@pytest.mark.parametrize("servers", ["one more", "one less"])
async def test_other_servers_are_no_reason_to_start_over_silently(tmp_path: Path, servers: str) -> None:
    more = {"name": "zcounter", "kind": "resources", "server": "counter"}
    async with operated(tmp_path, rows(), rate=SLOW) as rig:
        await under_way(rig)
        before = rig.spec["servers"]
        other = (
            [*before, more]
            if servers == "one more"
            else [{**each, "name": "tools"} if each["kind"] == "resources" else each for each in before]
        )
        rig.held_back.add(0)  # what the cell's processes are is not what matters
        rig.change(servers=other)
        await rig.until(lambda: stage(rig) == "starting", "replaced")
        assert sources(rig) == ["roll-out"]
        rig.change(servers=before)
        rig.held_back.clear()
        await rig.until(lambda: rig.in_service(1), "in service")
        assert set(sources(rig)) == {"roll-out"}
        await to_the_end(rig, ROWS)
        nothing_was_done_twice(rig)


async def test_without_checkpoints_pods_follow_the_spec_too(tmp_path: Path) -> None:
    checkpoints = {"enabled": False, "storage": {"directory": str(tmp_path / "checkpoints")}}
    async with operated(tmp_path, rows(), rate=SLOW, cells=2, checkpoints=checkpoints) as rig:
        await rig.until(lambda: rig.conditions().get("Ready", {}).get("status") == "True", "ready")
        before = rig.pods()
        rig.change(image="rig:2")
        await rig.until(lambda: rig.images() == {"rig:2"}, "replaced")
        assert not set(before.values()) & set(rig.pods().values())


# ---- other code -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mended", ["put back", "accepted"])
async def test_what_other_code_has_written_is_neither_restored_nor_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mended: str
) -> None:
    """The image that is rolled out reads no records of the format that the one before writes."""
    async with operated(tmp_path, rows(), rate=SLOW) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        monkeypatch.setattr(assemble, "FORMAT", 0)
        rig.change(image="rig:0")
        await rig.until(lambda: rig.conditions()["Ready"]["reason"] == "CodeMismatch", "refused")
        message = rig.conditions()["Ready"]["message"]
        assert "checkpoint roll-out was written by other code: agent reads records up to format 0" in message
        assert "spec.recovery.codeMismatch" in message
        assert rig.conditions()["Stalled"]["status"] == "True"
        assert any("format 0" in said for said in rig.events("CodeMismatch"))
        await asyncio.sleep(150)
        assert stage(rig) == "starting"
        assert sources(rig) == ["roll-out"], "neither an older one nor the input"
        if mended == "put back":
            monkeypatch.setattr(assemble, "FORMAT", 1)
            rig.change(image="rig:1")
        else:
            rig.change(recovery={"codeMismatch": "Accept"})
        await rig.until(rig.in_service, "in service")
        assert set(sources(rig)) == {"roll-out"}
        assert rig.conditions()["Stalled"]["status"] == "False"
        await to_the_end(rig, ROWS)
        nothing_was_done_twice(rig)


# ---- nodes ------------------------------------------------------------------------------------------------


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


# ---- the operator's own death -----------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["deleted", "another image"])
@at_any_write(12)
async def test_an_operator_killed_at_any_write_of_a_roll_out(
    tmp_path: Path, write: int, after: bool, why: str
) -> None:
    """Whoever comes after it goes on with it: nothing starts over, nothing stays parked, no attempt is used twice."""
    async with operated(tmp_path, rows(), rate=20.0) as rig:
        await under_way(rig)
        if why == "another image":
            rig.change(image="rig:2")
            await rig.until(
                lambda: (
                    "rig:2"
                    in str(rig.kube.objects[CHILDREN["StatefulSet"], IDENTITY.namespace, "rig-policy"]["spec"])
                ),
                "applied",
            )
        else:
            rig.leave("rig-agent-0")
        await rig.replace_operator(write, after=after, ended=rig.complete)
        await rig.until(lambda: rig.in_service(1), "continued")
        await to_the_end(rig, ROWS)
        assert set(sources(rig)) == {"roll-out"}
        attempts = [one.attempt for one in recoveries(rig)]
        assert attempts == sorted(set(attempts))
        assert "open" not in rig.record() and "stopped" not in rig.record()
        assert rig.phases() == {"idle"}
        if why == "another image":
            assert rig.images() == {"rig:2"}


async def test_two_cells_whose_pods_are_deleted_together_both_continue(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), cells=2) as rig:
        await under_way(rig)
        rig.leave("rig-agent-0", "rig-env-1")
        await rig.until(lambda: all(rig.in_service(1, cell=cell) for cell in range(2)), "continued")
        assert [sources(rig, cell) for cell in range(2)] == [["roll-out"]] * 2
        for cell in range(2):
            uri = rig.part(cell)["lastCheckpoint"]["uri"]
            assert read_publication(open_store(uri).get(CHECKPOINT)).cell == cell
        await to_the_end(rig, ROWS)
        assert owners(rig, {f"{n}-0" for n in range(ROWS)}) == {0, 1}
        nothing_was_done_twice(rig)
