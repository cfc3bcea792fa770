"""Planned replacement of pods under the operator's workers: nothing that could continue starts over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects import worker
from gym_operator.effects.kube import CHECKPOINTS, CHILDREN, PODS, Body, Resource
from gym_operator.effects.kube_host import KubeCellHost
from gym_rig.cell import IDENTITY
from gym_rig.collecting import ROWS, owners, rows, taken, to_the_end, under_way
from gym_rig.network import Fault
from gym_rig.operated import OperatedRig, operated
from gym_rig.rolling import SLOW, nothing_was_done_twice, recoveries, sources, stage, up_to_date
from gym_rig.virtual import now
from gym_rig.writes import at_any_write
from gym_servers import assemble
from gym_servers.coordination.checkpoint import CheckpointFailed
from gym_servers.coordination.controller import CellController
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.store import StorageError

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
