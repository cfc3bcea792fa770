"""A stack of several cells under the operator's workers: each is checkpointed, fails and recovers on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects import worker
from gym_operator.effects.kube import CHECKPOINTS, CHILDREN, PODS, Body, Resource
from gym_operator.effects.worker import TORN_SECONDS
from gym_operator.rules.cell_record import from_document
from gym_rig.cell import IDENTITY, LONGEST_SECONDS
from gym_rig.collecting import owners, published, taken, to_the_end, under_way
from gym_rig.fake_kube import FakeKube
from gym_rig.network import Fault, Seen
from gym_rig.operated import OperatedRig, operated
from gym_rig.virtual import now
from gym_rig.writes import at_any_write
from gym_servers.coordination.controller import CellController
from gym_servers.coordination.record import CellRecord, Choice
from gym_servers.engine.rows import counter_rows
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import StorageError

ROWS = 6
CALLS = ("prepare", "commit", "resume")


def rows(count: int = ROWS) -> Any:
    return counter_rows(count, 1)


def identities(rig: OperatedRig, cell: int) -> Mapping[str, Any]:
    """Which processes a cell has, and under which attempt."""
    part = rig.part(cell)
    sessions = {each["name"]: (each["podUID"], each["session"]) for each in part["participants"]}
    return {"attempt": part["attempt"], "pods": rig.pods(cell), "sessions": sessions}


# ---- at work ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cells", [2, 3])
async def test_cells_share_a_collection_and_run_to_its_end(tmp_path: Path, cells: int) -> None:
    async with operated(tmp_path, rows(), cells=cells) as rig:
        await under_way(rig)
        assert len(rig.pods()) == cells * 5
        await to_the_end(rig, ROWS)
        assert [part["collection"]["rows"] for part in rig.status()["cells"]] == [ROWS // cells] * cells
        assert rig.conditions()["Ready"]["reason"] == "CollectionComplete"


@pytest.mark.parametrize("how", ["pod", "container"])
async def test_a_cell_that_dies_recovers_and_the_others_go_on_undisturbed(tmp_path: Path, how: str) -> None:
    async with operated(tmp_path, rows(), cells=3) as rig:
        await under_way(rig)
        status = await taken(rig, "one")
        assert status["phase"] == "Succeeded", status
        await rig.until(lambda: all(len(rig.part(i)["participants"]) == 5 for i in range(3)))
        before = {cell: identities(rig, cell) for cell in (0, 2)}
        seen = set[str]()
        rig.cell.network.on_request = lambda request: seen.add(f"{request.host}{request.path}")
        if how == "pod":
            rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-1")
        else:
            rig.cells[1].kill("agent")
        await rig.until(lambda: not rig.in_service(cell=1), "seen")
        assert rig.status()["phase"] == "Recovering"
        assert rig.conditions()["Recovering"]["message"].startswith("cell 1: agent")
        assert rig.conditions()["Ready"]["status"] == "False"
        await rig.until(lambda: rig.in_service(1, cell=1), "recovered")
        assert rig.part(1)["recoveries"][-1]["checkpoint"] == status["checkpointID"]
        assert {cell: identities(rig, cell) for cell in (0, 2)} == before
        closed = [each for each in seen for verb in ("prepare", "restore", "resume") if each.endswith(verb)]
        assert closed and all("-1-control" in each for each in closed)
        await to_the_end(rig, ROWS)
        assert [rig.part(cell)["attempt"] for cell in range(3)] == [0, 1, 0]
        assert rig.status()["attempt"] == 1


async def test_two_cells_that_die_at_once_recover_each_by_itself(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), cells=3) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-env-2")
        await rig.until(lambda: rig.in_service(1, cell=0) and rig.in_service(1, cell=2), "recovered")
        assert rig.record(1).get("attempt", 0) == 0
        await to_the_end(rig, ROWS)


@pytest.mark.parametrize("stuck", ["deletion", "silence", "storage"])
async def test_a_stuck_cell_delays_nobody_elses_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: str
) -> None:
    """Cell 1 hangs: the API server does not take the end of its pods, a server does not answer, or its storage does
    not say what there is to restore."""
    delete, choice = FakeKube.delete, CellController._choice

    async def slow_delete(self: FakeKube, resource: Any, namespace: Any, name: str, *rest: Any) -> None:
        if stuck == "deletion" and name.endswith("-1"):
            await asyncio.sleep(40)
        await delete(self, resource, namespace, name, *rest)

    async def slow_choice(self: CellController, record: CellRecord, planned: bool) -> Choice | None:
        if stuck == "storage" and self.settings.cell == 1:
            await asyncio.sleep(40)
        return await choice(self, record, planned)

    async with operated(tmp_path, rows(), cells=2) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        monkeypatch.setattr(FakeKube, "delete", slow_delete)
        monkeypatch.setattr(CellController, "_choice", slow_choice)
        if stuck == "silence":
            rig.cell.network.faults.append(Fault("delay", "policy-1-control", calls=30, seconds=30.0))
            await rig.until(lambda: rig.cell.network.harmed, "silent")
        else:
            rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-1")
            await asyncio.sleep(1)
        began = now()
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.in_service(1, cell=0), "recovered")
        assert now() - began < 2
        assert stuck == "silence" or not rig.in_service(1, cell=1)
        await rig.until(lambda: rig.in_service(0 if stuck == "silence" else 1, cell=1), "the other one")
        await to_the_end(rig, ROWS)


# ---- checkpoints ------------------------------------------------------------------------------------------


def closed_at(rig: OperatedRig) -> list[tuple[float, str, int]]:
    """Filled with when each cell's environment was asked to prepare, and when it was told to resume."""
    found: list[tuple[float, str, int]] = []

    def on_request(request: Seen) -> None:
        verb = request.path.rsplit("/", 1)[1]
        if request.host in ("env-control", "env-1-control") and verb in CALLS:
            found.append((now(), verb, int("-1-" in request.host)))

    rig.cell.network.on_request = on_request
    return found


async def test_cells_are_checkpointed_one_after_the_other(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), cells=2) as rig:
        await under_way(rig)
        verbs = closed_at(rig)
        status = await taken(rig, "one")
        assert [verb for _, verb, cell in verbs if cell == 0] == list(CALLS)
        assert [(verb, cell) for _, verb, cell in verbs] == [(verb, cell) for cell in (0, 1) for verb in CALLS]
        assert status["phase"] == "Succeeded"
        assert [part["phase"] for part in status["cells"]] == ["Succeeded", "Succeeded"]
        assert all(published(part["uri"]) for part in status["cells"])
        assert [f"/cell-{index}/" in part["uri"] for index, part in enumerate(status["cells"])] == [True, True]
        assert all(len(part["participants"]) == 5 for part in status["cells"])
        assert status["episodes"] == sum(part["episodes"] for part in status["cells"]) == ROWS
        assert "uri" not in status
        await rig.until(lambda: rig.status().get("lastCheckpoint"), "told")
        last = rig.status()["lastCheckpoint"]
        assert (last["name"], "uri" in last) == ("one", False)
        for index, part in enumerate(status["cells"]):
            own = rig.part(index)["lastCheckpoint"]
            assert (own["name"], own["uri"], own["digest"]) == ("one", part["uri"], part["digest"])
        await to_the_end(rig, ROWS)


async def test_cells_are_checkpointed_together_where_that_is_wanted(tmp_path: Path) -> None:
    checkpoints = {"storage": {"directory": str(tmp_path / "checkpoints")}, "cellOrder": "Together"}
    async with operated(tmp_path, rows(), cells=2, checkpoints=checkpoints) as rig:
        await under_way(rig)
        rig.cell.network.latency = 0.05
        verbs = closed_at(rig)
        status = await taken(rig, "one")
        assert status["phase"] == "Succeeded", status
        prepared = {cell: at for at, verb, cell in verbs if verb == "prepare"}
        resumed = {cell: at for at, verb, cell in verbs if verb == "resume"}
        assert max(prepared.values()) < min(resumed.values())
        await to_the_end(rig, ROWS)


async def test_phases_of_a_checkpoint_never_go_back(tmp_path: Path) -> None:
    order = ["Pending", "Preparing", "Committing", "Publishing", "Succeeded"]
    told: list[str] = []
    async with operated(tmp_path, rows(), cells=3) as rig:
        await under_way(rig)
        watch = rig.kube.watch

        def watching(resource: Any, deleted: bool, body: Any) -> None:
            watch(resource, deleted, body)
            if resource == CHECKPOINTS and "phase" in body.get("status", {}):
                told.append(body["status"]["phase"])

        rig.kube.watch = watching
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        assert told == sorted(told, key=order.index)
        assert {"Preparing", "Committing", "Publishing", "Succeeded"} <= set(told)


async def test_a_part_that_fails_costs_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint fails, and says whose part; what a cell has published serves its own recovery."""
    original, broken = DirectoryStore.create, [True]

    def create(self: DirectoryStore, key: str, data: bytes) -> None:
        if broken and "/cell-1/" in self.uri and "manifest" in key:
            raise StorageError("the bucket is full")
        original(self, key, data)

    monkeypatch.setattr(DirectoryStore, "create", create)
    async with operated(tmp_path, rows(), cells=3) as rig:
        await under_way(rig)
        status = await taken(rig, "torn")
        assert [part["phase"] for part in status["cells"]] == ["Succeeded", "Failed", "Succeeded"]
        assert (status["phase"], status["reason"]) == ("Failed", status["cells"][1]["reason"])
        assert status["message"].startswith("cells 0, 2 published what their own recovery continues from; cell 1: ")
        assert [published(part.get("uri")) for part in status["cells"]] == [True, False, True]
        broken.clear()
        for cell in (0, 1):
            rig.kube.remove(PODS, IDENTITY.namespace, f"rig-env-{cell}")
        await rig.until(lambda: rig.in_service(1, cell=0) and rig.in_service(1, cell=1), "recovered")
        assert rig.part(0)["recoveries"][-1]["checkpoint"] == status["checkpointID"]
        assert "checkpoint" not in rig.part(1)["recoveries"][-1]
        assert rig.phases() == {"idle"}
        assert (await taken(rig, "next"))["phase"] == "Succeeded"
        await to_the_end(rig, ROWS)


async def test_a_cell_that_does_not_come_up_is_waited_for_and_not_for_ever(tmp_path: Path) -> None:
    """The other cells' checkpoints do not depend on it."""
    async with operated(tmp_path, rows(), cells=2) as rig:
        await under_way(rig)
        rig.held_back.add(1)
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-env-1")
        await rig.until(lambda: not rig.in_service(cell=1), "down")
        began = now()
        rig.checkpoint("half")
        await rig.until(lambda: len(rig.status(CHECKPOINTS, "half").get("cells", ())) == 2, "begun")
        await rig.until(lambda: rig.status(CHECKPOINTS, "half")["cells"][0]["phase"] == "Succeeded", "published")
        await rig.until(lambda: "message" in rig.status(CHECKPOINTS, "half")["cells"][1], "told")
        assert rig.status(CHECKPOINTS, "half")["phase"] == "Preparing"
        await rig.until(lambda: rig.final("half"), "final")
        assert 55 < now() - began < 75
        status = rig.status(CHECKPOINTS, "half")
        assert [part["phase"] for part in status["cells"]] == ["Succeeded", "Failed"]
        assert (status["phase"], status["reason"]) == ("Failed", "StackNotReady")
        assert rig.part(0)["lastCheckpoint"]["name"] == "half"
        rig.held_back.clear()
        await rig.until(lambda: rig.in_service(1, cell=1), "up")
        await to_the_end(rig, ROWS)


async def test_a_cell_that_comes_up_in_time_has_its_part(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), cells=2) as rig:
        await under_way(rig)
        rig.held_back.add(1)
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-env-1")
        await rig.until(lambda: not rig.in_service(cell=1), "down")
        rig.checkpoint("whole")
        await rig.until(lambda: len(rig.status(CHECKPOINTS, "whole").get("cells", ())) == 2, "begun")
        await asyncio.sleep(30)
        rig.held_back.clear()
        await rig.until(lambda: rig.final("whole"), "final")
        status = rig.status(CHECKPOINTS, "whole")
        assert [(part["phase"], part["attempt"]) for part in status["cells"]] == [("Succeeded", 0), ("Succeeded", 1)]
        assert status["phase"] == "Succeeded"


async def looks_at_cell_0(rig: OperatedRig, seconds: float) -> int:
    """How often it is asked how it is, in so many seconds."""
    looks = [0]

    def on_request(request: Seen) -> None:
        looks[0] += (request.host, request.method) == ("env-control", "GET")

    rig.cell.network.on_request = on_request
    await asyncio.sleep(seconds)
    return looks[0]


async def test_a_cell_that_is_free_is_not_looked_at_more_often_because_another_is_waited_for(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=1.0, cells=2) as rig:
        await rig.until(rig.all_in_service, "in service")
        rig.held_back.add(1)
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-env-1")
        await rig.until(lambda: not rig.in_service(cell=1), "down")
        rig.checkpoint("waits")
        await rig.until(lambda: "message" in (rig.status(CHECKPOINTS, "waits").get("cells") or [{}])[-1], "waits")
        assert 15 <= await looks_at_cell_0(rig, 20) <= 30


async def test_many_servers_are_asked_less_often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "MOST_ASKED", 2)  # a second, of ten
    async with operated(tmp_path, rows(), rate=1.0, cells=2) as rig:
        await rig.until(rig.all_in_service, "in service")
        assert 3 <= await looks_at_cell_0(rig, 20) <= 8
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        began = now()
        await rig.until(lambda: rig.in_service(1, cell=0), "recovered")
        assert now() - began < 2, "a death is not waited for"


@pytest.mark.parametrize("order", ["OneByOne", "Together"])
async def test_a_deleted_checkpoint_is_given_up_in_every_cell(tmp_path: Path, order: str) -> None:
    checkpoints = {"storage": {"directory": str(tmp_path / "checkpoints")}, "cellOrder": order}
    async with operated(tmp_path, rows(), cells=2, checkpoints=checkpoints) as rig:
        await under_way(rig)
        rig.checkpoint("unwanted")
        await rig.reaches("unwanted", "Preparing")
        parts = rig.status(CHECKPOINTS, "unwanted")["cells"]
        rig.kube.remove(CHECKPOINTS, IDENTITY.namespace, "unwanted")
        await rig.until(lambda: not any("open" in rig.record(cell) for cell in range(2)), "settled")
        assert not any(published(part.get("uri")) for part in parts)
        assert (await taken(rig, "next"))["phase"] == "Succeeded"
        assert rig.phases() == {"idle"}
        await to_the_end(rig, ROWS)


async def test_checkpoints_of_several_cells_are_taken_one_after_the_other(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), cells=2) as rig:
        await under_way(rig)
        for name in ("c", "a", "b"):  # of one second: their names decide
            rig.checkpoint(name)
        await rig.until(lambda: all(rig.final(name) for name in "abc"), "all final")
        for cell in range(2):
            uris = [rig.status(CHECKPOINTS, name)["cells"][cell]["uri"] for name in "abc"]
            assert [uri.rsplit("/", 1)[1][7:13] for uri in uris] == ["000001", "000002", "000003"]


async def test_a_second_operator_over_several_cells_does_no_harm(tmp_path: Path) -> None:
    """Each record is fenced: whoever comes second leaves the cell alone for a while, and no attempt is used twice."""
    async with operated(tmp_path, rows(), cells=2) as rig:
        await under_way(rig)
        first = rig.start_another_operator()
        assert (await taken(rig, "one"))["phase"] in ("Succeeded", "Failed")
        for cell in range(2):
            rig.kube.remove(PODS, IDENTITY.namespace, f"rig-agent-{cell}")
        await rig.until(lambda: rig.in_service(1, cell=0) and rig.in_service(1, cell=1), "recovered")
        first.kill()
        await to_the_end(rig, ROWS)
        for cell in range(2):
            attempts = [recovery["attempt"] for recovery in rig.part(cell)["recoveries"]]
            assert attempts == sorted(set(attempts))


@at_any_write(23)
async def test_an_operator_killed_at_any_write_of_a_checkpoint_of_two_cells(
    tmp_path: Path, write: int, after: bool
) -> None:
    """The checkpoint becomes final and says of each part what storage says; nobody stays parked, and the next one
    works."""
    async with operated(tmp_path, rows(), cells=2) as rig:
        await under_way(rig)
        await rig.replace_operator(
            write,
            lambda: rig.checkpoint("torn"),
            after=after,
            ended=lambda: rig.complete() or rig.final("torn"),
        )
        await rig.until(lambda: rig.final("torn"), "final")
        torn = rig.status(CHECKPOINTS, "torn")
        for part in torn["cells"]:
            assert (part["phase"] == "Succeeded") == published(part.get("uri")), torn
        assert (torn["phase"] == "Succeeded") == all(part["phase"] == "Succeeded" for part in torn["cells"])
        assert (await taken(rig, "next"))["phase"] == "Succeeded"
        for cell in range(2):
            assert "open" not in rig.record(cell)
            assert rig.record(cell).get("attempt", 0) == 0, "nobody died"
        await to_the_end(rig, ROWS)
        assert rig.phases() == {"idle"}


@at_any_write(19)
async def test_an_operator_killed_at_any_write_of_two_recoveries(tmp_path: Path, write: int, after: bool) -> None:
    async with operated(tmp_path, rows(), cells=2) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"

        def both_die() -> None:
            rig.kube.remove(PODS, IDENTITY.namespace, "rig-counter-0")
            rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-1")

        await rig.replace_operator(write, both_die, after=after, ended=rig.complete)
        await rig.until(lambda: rig.in_service(1, cell=0) and rig.in_service(1, cell=1), "recovered")
        await to_the_end(rig, ROWS)
        for cell in range(2):
            attempts = [recovery["attempt"] for recovery in rig.part(cell)["recoveries"]]
            assert attempts == sorted(set(attempts))


async def test_a_death_in_one_cell_during_a_checkpoint_of_both(tmp_path: Path) -> None:
    checkpoints = {"storage": {"directory": str(tmp_path / "checkpoints")}, "cellOrder": "Together"}
    async with operated(tmp_path, rows(), cells=2, checkpoints=checkpoints) as rig:
        await under_way(rig)
        rig.checkpoint("torn")
        await rig.reaches("torn", "Preparing")
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-1")
        await rig.until(lambda: rig.final("torn"), "final")
        status = rig.status(CHECKPOINTS, "torn")
        assert status["cells"][0]["phase"] == "Succeeded", status
        assert (status["cells"][1]["phase"] == "Succeeded") == published(status["cells"][1].get("uri"))
        await rig.until(lambda: rig.in_service(1, cell=1), "recovered")
        assert rig.record(0).get("attempt", 0) == 0
        await to_the_end(rig, ROWS)


async def test_a_stopped_operator_leaves_a_final_checkpoint_and_open_cells(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), cells=2) as rig:
        await under_way(rig)
        rig.checkpoint("stopped")
        await rig.reaches("stopped", "Preparing")
        await rig.stop_operator()
        status = rig.status(CHECKPOINTS, "stopped")
        assert (status["phase"], status["reason"]) == ("Failed", "OperatorStopped")
        assert rig.phases() == {"idle"}


# ---- more cells, less cells -------------------------------------------------------------------------------

AT_ONCE = {"drainTimeout": "0s"}
"""Without a drain, which `tests/operated/test_drain.py` is about."""


def scaled(folder: Path, cells: int) -> dict[str, Any]:
    """A collection that is in no hurry, so that work is left for cells that come later."""
    collection = {"tasks": str(folder / "tasks.jsonl"), "output": str(folder / "output"), "concurrency": 1}
    return {"cells": cells, "collection": collection}


async def test_cells_that_are_added_take_part(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(9), **scaled(tmp_path, 2)) as rig:
        await under_way(rig)
        before = {cell: identities(rig, cell) for cell in (0, 1)}
        rig.change(cells=3)
        await rig.until(lambda: rig.in_service(cell=2), "added")
        assert {cell: identities(rig, cell) for cell in (0, 1)} == before
        status = await taken(rig, "one")
        assert [part["index"] for part in status["cells"]] == [0, 1, 2]
        await to_the_end(rig, 9)
        assert rig.part(2)["collection"]["rows"] > 0


async def test_a_cell_that_is_taken_away_leaves_a_checkpoint_and_its_rollouts_start_over(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), cells=3, scaleDown=AT_ONCE) as rig:
        await under_way(rig)
        before = {cell: identities(rig, cell) for cell in (0, 1)}
        rig.change(cells=2)
        await rig.until(lambda: not rig.pods(2), "gone")
        last = rig.part(2)["lastCheckpoint"]
        assert last["name"] == "scale-down"
        assert published(last["uri"]) and "/cell-2/" in last["uri"]
        await rig.until(lambda: rig.part(2)["phase"] == "Stopped", "told")
        assert rig.record(2)["stage"] == "stopped", "it would continue, and nobody worked behind its cut"
        assert {cell: identities(rig, cell) for cell in (0, 1)} == before
        services = {name for resource, _, name in rig.kube.objects if resource == CHILDREN["Service"]}
        await rig.until(lambda: rig.status()["phase"] == "Running", "in service")
        assert not any(name.endswith("-2") for name in services)
        await to_the_end(rig, ROWS)
        assert owners(rig, {f"{n}-0" for n in range(ROWS)}) == {0, 1}


async def test_a_cell_that_comes_back_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), cells=2, scaleDown=AT_ONCE) as rig:
        await under_way(rig)
        rig.change(cells=1)
        await rig.until(lambda: not rig.pods(1) and rig.part(1)["phase"] == "Stopped", "gone")
        last = rig.part(1)["lastCheckpoint"]
        rig.change(cells=2)
        await rig.until(lambda: rig.in_service(1, cell=1), "back")
        assert rig.part(1)["recoveries"][-1]["checkpoint"] == last["id"]
        assert from_document(rig.record(1)).recoveries[-1].planned  # type: ignore[union-attr]
        assert rig.record(0).get("attempt", 0) == 0
        await to_the_end(rig, ROWS)


@pytest.mark.parametrize("when", ["open", "stopped", "gone"])
async def test_a_cell_that_is_to_stay_after_all_goes_on_at_once(tmp_path: Path, when: str) -> None:
    """However far it has come: its last checkpoint may be under way, or taken, and its pods gone or not."""
    async with operated(tmp_path, rows(), cells=2, rate=20.0, scaleDown=AT_ONCE) as rig:
        await under_way(rig)
        told, back = rig.kube.watch, asyncio.Event()

        def watch(resource: Resource, deleted: bool, body: Body) -> None:
            told(resource, deleted, body)
            record = rig.record(1)
            reached = {"open": "open" in record, "stopped": record.get("stage") == "stopped", "gone": not rig.pods(1)}
            if reached[when] and not back.is_set():
                back.set()
                rig.change(cells=2)

        rig.kube.watch = watch
        rig.change(cells=1)
        await asyncio.wait_for(back.wait(), LONGEST_SECONDS)
        began = now()
        await rig.until(lambda: rig.in_service(cell=1) and "open" not in rig.record(1), "goes on")
        assert now() - began < TORN_SECONDS - 1
        await to_the_end(rig, ROWS)
        assert rig.phases() == {"idle"}


@pytest.mark.parametrize("write", range(1, 14, 2))
async def test_an_operator_killed_while_a_cell_is_taken_away(tmp_path: Path, write: int) -> None:
    async with operated(tmp_path, rows(), cells=2, scaleDown=AT_ONCE) as rig:
        await under_way(rig)
        assert rig.operator is not None
        rig.operator.session.cut_at(write, after=write % 4 == 1)
        rig.change(cells=1)
        await rig.until(lambda: rig.operator is None or rig.complete(), "killed")
        rig.kill_operator()
        rig.start_operator()
        await rig.until(lambda: not rig.pods(1), "gone")
        await to_the_end(rig, ROWS)
        assert rig.record(0).get("attempt", 0) == 0


async def test_a_cell_that_is_to_go_while_no_operator_runs_has_its_last_checkpoint_all_the_same(
    tmp_path: Path,
) -> None:
    async with operated(tmp_path, rows(), cells=3, scaleDown=AT_ONCE) as rig:
        await under_way(rig)
        rig.kill_operator()
        rig.change(cells=1)
        rig.start_operator()
        await rig.until(lambda: not rig.pods(1) and not rig.pods(2), "gone")
        await rig.until(lambda: rig.part(1).get("phase") == rig.part(2).get("phase") == "Stopped", "told")
        assert [rig.part(cell)["lastCheckpoint"]["name"] for cell in (1, 2)] == ["scale-down"] * 2
        await to_the_end(rig, ROWS)


async def test_a_cell_that_is_down_is_taken_away_at_once(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), cells=2, recovery={"backoffLimit": 0}) as rig:
        await under_way(rig)
        rig.cells[1].kill("agent")
        await rig.until(lambda: rig.status()["phase"] == "Failed", "given up")
        assert rig.conditions()["Stalled"]["message"].startswith("cell 1: ")
        rig.change(cells=1)
        await rig.until(lambda: not rig.pods(1), "gone")
        await rig.until(lambda: rig.conditions()["Ready"]["status"] == "True", "ready")
        await to_the_end(rig, ROWS)


async def test_all_cells_of_a_suspended_stack_continue(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), cells=2) as rig:
        await under_way(rig)
        kept = await taken(rig, "kept")
        rig.change(suspend=True)
        await rig.until(lambda: rig.status()["phase"] == "Suspended" and not rig.pods(), "suspended")
        rig.change(suspend=False)
        await rig.until(lambda: rig.in_service(1, cell=0) and rig.in_service(1, cell=1), "in service again")
        for cell in range(2):
            assert rig.part(cell)["recoveries"][-1]["checkpoint"] == kept["checkpointID"]
        await to_the_end(rig, ROWS)
