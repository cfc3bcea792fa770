"""A cell that is to go finishes what it has begun, in the time it is given; nothing runs in two cells meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gym_operator.api.objects import parse_time
from gym_operator.effects.kube import CHILDREN, PODS
from gym_rig.cell import IDENTITY
from gym_rig.collecting import owner, published, to_the_end, under_way
from gym_rig.operated import OperatedRig, operated
from gym_rig.virtual import now
from gym_rig.writes import at_any_write
from gym_servers.client import Answer, NotInService, RolloutClient
from gym_servers.engine.rows import counter_rows
from gym_servers.protocol.routing import cell_of
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import StorageError

TASKS = 6
REPEATS = 2
RATE = 100.0  # tokens a second: a rollout takes some eight seconds
SLOW = 40.0  # or twenty
SHORT = {"drainTimeout": "3s"}


def collecting(folder: Path, *, rate: float = RATE, **spec: Any) -> Any:
    """Three cells, of which each works on one rollout at a time: of what it has claimed, some has not begun."""
    collection = {"tasks": str(folder / "tasks.jsonl"), "output": str(folder / "output")}
    spec = {"cells": 3, "collection": {**collection, "concurrency": 1, "repeats": REPEATS}, **spec}
    return operated(folder, counter_rows(TASKS, 1), rate=rate, **spec)


def begun(rig: OperatedRig) -> Counter[str]:
    """How often each rollout has begun from its input."""
    return Counter(str(entry["rollout"]) for entry in rig.cell.journal() if entry["kind"] == "seed")


def cells_told(rig: OperatedRig) -> str:
    """What the processes read of how many cells there are."""
    return str(rig.kube.objects[CHILDREN["ConfigMap"], IDENTITY.namespace, "rig-config"]["data"]["cells"])


def identities(rig: OperatedRig, cell: int) -> Mapping[str, Any]:
    part = rig.part(cell)
    sessions = {each["name"]: (each["podUID"], each["session"]) for each in part["participants"]}
    return {"attempt": part["attempt"], "pods": rig.pods(cell), "sessions": sessions}


async def gone(rig: OperatedRig, cell: int) -> None:
    await rig.until(lambda: not rig.pods(cell), "gone")
    await rig.until(lambda: rig.part(cell)["phase"] == "Stopped", "told")


async def all_rows(rig: OperatedRig) -> None:
    """The collection is complete, and each rollout has one row."""
    await rig.until(rig.complete, "complete")
    done = [json.loads(line) for line in (rig.folder / "output" / "rollouts.jsonl").read_text().splitlines()]
    count = TASKS * REPEATS
    assert Counter(row["_ng_rollout_id"] for row in done) == dict.fromkeys(begun(rig), 1)
    assert (len(done), {row["reward"] for row in done}) == (count, {1.0})
    assert rig.status()["collection"] == {"expected": count, "rows": count, "failed": 0, "complete": True}


# ---- the stack's own driver -------------------------------------------------------------------------------


async def test_a_cell_that_is_to_go_finishes_what_it_has_begun_and_nothing_starts_over(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        before = {cell: identities(rig, cell) for cell in (0, 1)}
        rig.change(cells=2)
        began = now()
        await rig.until(lambda: rig.part(2)["phase"] == "Draining", "told")
        part = rig.part(2)
        assert part["drain"]["running"] == 1
        assert parse_time(part["drain"]["until"]) - parse_time(part["drain"]["startedAt"]) == 300
        assert (rig.status()["phase"], rig.conditions()["Ready"]["status"]) == ("Running", "True")
        assert cells_told(rig) == "2 3\n"
        (event,) = rig.events("CellDraining")
        assert event.startswith("cell 2: it finishes what it has begun, until ")
        count = len(begun(rig))
        await gone(rig, 2)
        assert now() - began < 40, "not longer than its rollout"
        assert "drain" not in rig.part(2)
        assert rig.part(2)["lastCheckpoint"]["name"] == "scale-down"
        assert rig.events("CellStopped")[0].endswith("; all that it had begun had ended")
        await rig.until(lambda: cells_told(rig) == "2\n", "told")
        assert {cell: identities(rig, cell) for cell in (0, 1)} == before
        await all_rows(rig)
        assert len(begun(rig)) > count
        assert set(begun(rig).values()) == {1}, "nothing has started over"
        assert {owner(rig, rollout) for rollout in begun(rig)} == {0, 1}


@pytest.mark.parametrize("stuck", [False, True])
async def test_what_has_not_ended_in_time_starts_over_elsewhere_once_the_cell_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    """Also where there is no last checkpoint, so that its processes work on until they are ended."""
    create = DirectoryStore.create

    def full(self: DirectoryStore, key: str, data: bytes) -> None:
        if stuck and "/cell-2/" in self.uri and "manifest" in key:
            raise StorageError("the bucket is full")
        create(self, key, data)

    monkeypatch.setattr(DirectoryStore, "create", full)
    async with collecting(tmp_path, scaleDown=SHORT) as rig:
        await under_way(rig)
        rig.lasting.add(2)
        mine = {rollout for rollout in begun(rig) if owner(rig, rollout) == 2}
        rig.change(cells=2)
        began = now()
        await rig.until(lambda: rig.part(2)["phase"] == "Draining", "told")
        await rig.until(lambda: rig.part(2)["phase"] != "Draining", "the time is over")
        assert 3 <= now() - began < 6
        await rig.until(lambda: rig.part(2)["phase"] == "Stopped", "stopped")
        assert "1 of its rollouts had not ended within spec.scaleDown.drainTimeout" in rig.events("CellStopped")[0]
        assert published(rig.part(2).get("lastCheckpoint", {}).get("uri")) is not stuck
        await asyncio.sleep(30)  # less than the lease of what is stopped
        assert len(rig.pods(2)) == 5, "somebody is slow to end them"
        assert cells_told(rig) == "2 3\n"
        assert {owner(rig, rollout) for rollout in mine} == {2}, "nobody takes what may still run"
        rig.lasting.clear()
        await rig.until(lambda: not rig.pods(2), "gone")
        began = now()
        await rig.until(lambda: cells_told(rig) == "2\n", "told")
        assert now() - began < 5
        await all_rows(rig)
        assert {owner(rig, rollout) for rollout in mine} <= {0, 1}
        twice = {rollout for rollout, times in begun(rig).items() if times > 1}
        assert twice <= mine and (stuck or twice == mine)


@pytest.mark.parametrize("less", ["1s", "0s"])
async def test_less_time_given_meanwhile_counts_from_the_beginning(tmp_path: Path, less: str) -> None:
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        rig.change(cells=2)
        await rig.until(lambda: rig.part(2)["phase"] == "Draining", "told")
        await asyncio.sleep(2)
        rig.change(scaleDown={"drainTimeout": less})
        began = now()
        await gone(rig, 2)
        assert now() - began < 3
        assert "had not ended" in rig.events("CellStopped")[0]
        await all_rows(rig)


@pytest.mark.parametrize("watched", [True, False])
async def test_a_cell_that_is_to_stay_after_all_goes_on_as_if_nothing_had_been(tmp_path: Path, watched: bool) -> None:
    """Also where no operator runs when that is changed back."""
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        before = {cell: identities(rig, cell) for cell in range(3)}
        rig.change(cells=2)
        await rig.until(lambda: rig.part(2)["phase"] == "Draining", "told")
        await asyncio.sleep(2)
        if not watched:
            rig.kill_operator()
        rig.change(cells=3)
        if not watched:
            rig.start_operator()
        await rig.until(lambda: rig.part(2)["phase"] == "Running", "goes on")
        assert "drain" not in rig.part(2)
        assert cells_told(rig) == "3\n"
        await all_rows(rig)
        assert {cell: identities(rig, cell) for cell in range(3)} == before
        assert set(begun(rig).values()) == {1}
        assert {owner(rig, rollout) for rollout in begun(rig)} == {0, 1, 2}
        rig.change(cells=2)
        await gone(rig, 2)
        assert len(rig.events("CellDraining")) == 2, "the time it had before does not count"


@pytest.mark.parametrize("how", ["pod", "container"])
async def test_a_cell_that_dies_while_it_drains_is_not_recovered_for_that(tmp_path: Path, how: str) -> None:
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        before = {cell: identities(rig, cell) for cell in (0, 1)}
        rig.change(cells=2)
        await rig.until(lambda: rig.part(2)["phase"] == "Draining", "told")
        if how == "pod":
            rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-2")
        else:
            rig.cells[2].kill("agent")
        began = now()
        await gone(rig, 2)
        assert now() - began < 15
        assert (rig.part(2)["attempt"], rig.part(2)["recoveries"]) == (0, [])
        assert {cell: identities(rig, cell) for cell in (0, 1)} == before
        await all_rows(rig)


@pytest.mark.parametrize("how", ["deleted", "cordoned"])
async def test_somebody_who_asks_for_its_pods_is_not_made_to_wait(tmp_path: Path, how: str) -> None:
    async with collecting(tmp_path, nodes=True) as rig:
        rig.node = "node-0"
        await under_way(rig)
        rig.change(cells=2)
        await rig.until(lambda: rig.part(2)["phase"] == "Draining", "told")
        if how == "deleted":
            rig.leave("rig-agent-2")
        else:
            for cell in (0, 1):
                for name in rig.pods(cell):
                    spec = rig.kube.objects[PODS, IDENTITY.namespace, name]["spec"]
                    rig.kube.set(PODS, IDENTITY.namespace, name, spec={**spec, "nodeName": "node-1"})
            rig.cordon("node-0")
        began = now()
        await gone(rig, 2)
        assert now() - began < 5
        assert rig.part(2)["lastCheckpoint"]["name"] == "scale-down", "it would continue"
        assert how in rig.events("CellStopped")[0]
        await all_rows(rig)


@at_any_write(24)
async def test_an_operator_killed_at_any_write_of_a_scale_down(tmp_path: Path, write: int, after: bool) -> None:
    """Nobody else is disturbed, and what has begun ends where it began."""
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        before = {cell: identities(rig, cell) for cell in (0, 1)}

        def is_over() -> bool:
            return not rig.pods(2) and cells_told(rig) == "2\n"

        await rig.replace_operator(write, lambda: rig.change(cells=2), after=after, ended=is_over)
        await gone(rig, 2)
        await rig.until(is_over, "told")
        await all_rows(rig)
        assert {cell: identities(rig, cell) for cell in (0, 1)} == before
        assert set(begun(rig).values()) == {1}


async def test_an_operator_that_comes_after_gives_no_more_time(tmp_path: Path) -> None:
    async with collecting(tmp_path, rate=SLOW, scaleDown={"drainTimeout": "8s"}) as rig:
        await under_way(rig)
        rig.change(cells=2)
        began = now()
        await rig.until(lambda: rig.part(2)["phase"] == "Draining", "told")
        drain = rig.part(2)["drain"]
        await asyncio.sleep(4)
        rig.kill_operator()
        await asyncio.sleep(1)
        rig.start_operator()
        await asyncio.sleep(1)
        assert {**rig.part(2)["drain"], "running": 1} == drain
        await rig.until(lambda: rig.part(2)["phase"] != "Draining", "the time is over")
        assert 7 <= now() - began < 11
        await gone(rig, 2)
        await all_rows(rig)


async def test_cells_without_checkpoints_go_at_once_and_their_rollouts_once_they_are_gone(tmp_path: Path) -> None:
    checkpoints = {"enabled": False, "storage": {"directory": str(tmp_path / "checkpoints")}}
    async with collecting(tmp_path, checkpoints=checkpoints) as rig:
        await rig.until(lambda: rig.status().get("phase") == "Running", "up")
        rig.lasting.add(2)
        rig.change(cells=2)
        await rig.until(lambda: rig.part(2)["phase"] == "Stopped", "told")
        assert cells_told(rig) == "2 3\n"
        rig.lasting.clear()
        await rig.until(lambda: not rig.pods(2), "gone")
        await rig.until(lambda: cells_told(rig) == "2\n", "told")


# ---- a driver outside -------------------------------------------------------------------------------------


def task() -> Mapping[str, Any]:
    row = counter_rows(1, 1)[0]
    data = {name: value for name, value in row.items() if name != "responses_create_params"}
    return {"task_input": {"responses_create_params": row["responses_create_params"], "task_data": data}}


def of_cell(cell: int, count: int) -> list[str]:
    """Rollouts whose own cell, of two, it is."""
    return [name for name in (f"r{n}" for n in range(100)) if cell_of(name, 2) == cell][:count]


async def send(rig: OperatedRig, client: RolloutClient, *rollouts: str) -> list[asyncio.Task[Answer]]:
    tasks = [asyncio.create_task(client.run(rollout, task())) for rollout in rollouts]
    await rig.until(lambda: begun(rig).keys() >= set(rollouts), "begun")
    return tasks


@pytest.mark.parametrize("in_time", [True, False])
async def test_a_driver_outside_is_told_that_a_cell_leaves_and_new_rollouts_go_elsewhere(
    tmp_path: Path, in_time: bool
) -> None:
    spec = {} if in_time else {"scaleDown": SHORT}
    async with operated(tmp_path, counter_rows(1, 1), rate=SLOW, collection=None, cells=2, **spec) as rig:
        await rig.until(rig.all_in_service, "in service")
        async with rig.cell.network.client(timeout=None) as http:
            client = RolloutClient(["http://env", "http://env-1"], http, patience_seconds=20)
            old, new = of_cell(1, 2), of_cell(1, 4)[2:]
            running = await send(rig, client, *old)
            assert not (await client.state(old[0])).leaving
            rig.change(cells=1)
            await rig.until(lambda: rig.part(1).get("drain", {}).get("running") == 2, "told")
            state = await client.state(old[0])
            assert (state.leaving, state.rollout.state) == (True, "running")
            assert [await client.place(rollout) for rollout in (*old, *new)] == [1, 1, 0, 0]
            running += await send(rig, client, *new)
            joined = asyncio.create_task(client.run(old[0], task()))
            if in_time:
                answers = await asyncio.gather(joined, *running)
                assert [answer.cell for answer in answers] == [1, 1, 1, 0, 0]
                assert {(answer.result or {})["reward"] for answer in answers} == {1.0}
                assert set(begun(rig).values()) == {1}
            await gone(rig, 1)
            why = "all that it had begun had ended" if in_time else "2 of its rollouts had not ended within"
            assert why in rig.events("CellStopped")[0]
            assert published(rig.part(1)["lastCheckpoint"]["uri"])
            if not in_time:
                ended = await asyncio.gather(joined, *running, return_exceptions=True)
                assert [type(each) for each in ended] == [NotInService] * 3 + [Answer] * 2
                assert (await client.run(old[0], task())).cell == 0, "it starts over in a cell that is there"


async def test_a_cell_that_nobody_has_sent_anything_goes_at_once(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(1, 1), collection=None, cells=2) as rig:
        await rig.until(rig.all_in_service, "in service")
        rig.change(cells=1)
        began = now()
        await gone(rig, 1)
        assert now() - began < 5


async def test_rollouts_of_a_small_stack_are_all_accounted_for(tmp_path: Path) -> None:
    """From the journal of the tools: of what survives nothing was lost and nothing done twice, in each cell."""
    async with operated(tmp_path, counter_rows(TASKS, 1), rate=SLOW, cells=3) as rig:
        await under_way(rig)
        rig.change(cells=1)
        await gone(rig, 1)
        await gone(rig, 2)
        assert [event.split(":")[0] for event in sorted(rig.events("CellDraining"))] == ["cell 1", "cell 2"]
        await to_the_end(rig, TASKS)
