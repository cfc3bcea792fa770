"""`status.lastCheckpoint` of a stack and of its cells is what would be continued from, whatever was restored, damaged
or deleted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects.kube import CHECKPOINTS, EVENTS, PODS, RESTORES
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_servers.engine.rows import counter_rows
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import StorageError

SLOWLY = 2.0


def rows() -> Any:
    return counter_rows(6, 1)


async def taken(rig: OperatedRig, name: str, policy: str = "Retain") -> dict[str, Any]:
    await rig.until(rig.all_in_service, "in service")
    rig.checkpoint(name, deletionPolicy=policy)
    await rig.until(lambda: rig.final(name), f"{name} is final")
    status = rig.status(CHECKPOINTS, name)
    assert status["phase"] == "Succeeded", status
    await says(rig, name)
    return status


def said(rig: OperatedRig) -> set[str | None]:
    """What the stack and each of its cells say."""
    of = [rig.status(), *rig.status()["cells"]]
    return {(each.get("lastCheckpoint") or {}).get("name") for each in of}


async def says(rig: OperatedRig, name: str | None) -> None:
    await rig.until(lambda: said(rig) == {name}, f"{name} is said to be the last")


async def stays(rig: OperatedRig, name: str | None) -> None:
    """Also for whoever comes after this operator, and at no moment anything else."""
    told: set[str | None] = set()
    rig.kill_operator()
    rig.start_operator()
    for _ in range(100):
        told |= said(rig)
        await asyncio.sleep(0.2)
    assert told == {name}


def delete(rig: OperatedRig, name: str) -> None:
    rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, name)


def truncate_a_pack(uri: str) -> None:
    pack = next(path for path in Path(uri).rglob("pack*"))
    pack.write_bytes(pack.read_bytes()[:-1])


async def died(rig: OperatedRig, attempt: int) -> str | None:
    """The checkpoint that the recovery from a death continues from."""
    rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
    await rig.until(lambda: rig.in_service(attempt), "recovered")
    recovery: dict[str, Any] = rig.part()["recoveries"][-1]
    return recovery.get("checkpoint")


@pytest.mark.parametrize("cells", [1, 2])
async def test_after_a_restore_of_an_older_one_it_is_that(tmp_path: Path, cells: int) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=cells) as rig:
        first = await taken(rig, "first")
        await taken(rig, "second")
        spec = {"stackRef": {"name": IDENTITY.name}, "checkpointRef": {"name": "first"}}
        rig.kube.put(RESTORES, IDENTITY.namespace, {"metadata": {"name": "back"}, "spec": spec})
        await rig.until(lambda: rig.status(RESTORES, "back").get("phase") == "Succeeded", "restored")
        await says(rig, "first")
        for part, its in zip(rig.status()["cells"], first["cells"], strict=True):
            assert (part["lastCheckpoint"]["uri"], part["lastCheckpoint"]["digest"]) == (its["uri"], its["digest"])
        await stays(rig, "first")
        assert await died(rig, 2) == first["checkpointID"]
        await says(rig, "first")
        await taken(rig, "third")


async def test_k12_restore_of_a_corrupted_newest_checkpoint_falls_back_to_the_one_before_and_says_so(
    tmp_path: Path,
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        older = await taken(rig, "older")
        newest = await taken(rig, "newest")
        truncate_a_pack(newest["uri"])
        assert await died(rig, 1) == older["checkpointID"]
        await says(rig, "older")
        await stays(rig, "older")
        condition = rig.conditions()["Recovering"]
        assert (condition["status"], condition["reason"]) == ("False", "Recovered")
        told = condition["message"]
        assert told.startswith(
            "attempt 1 continues from checkpoint older; checkpoint newest is passed over: pack "
        ), told
        await died(rig, 2)
        await rig.until(lambda: rig.conditions()["Recovering"]["message"] != told, "said of the next one too")
        assert (
            "attempt 2 continues from checkpoint older; checkpoint newest"
            in rig.conditions()["Recovering"]["message"]
        )
        assert "passedOver" not in rig.record()["recoveries"][0], "once in a record is enough"
        events = [body for (kind, _, _), body in rig.kube.objects.items() if kind == EVENTS]
        unusable = [event for event in events if event["reason"] == "CheckpointUnusable"]
        assert len(unusable) == 2
        assert "checkpoint newest is passed over" in unusable[0]["message"]
        assert "pack" in unusable[0]["message"], "and what is wrong with it"


@pytest.mark.parametrize("cells", [1, 2])
async def test_where_its_data_went_with_its_object_it_is_the_one_before(tmp_path: Path, cells: int) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=cells) as rig:
        first = await taken(rig, "first", "Delete")
        await taken(rig, "second", "Delete")
        delete(rig, "second")
        await says(rig, "first")
        await stays(rig, "first")
        assert await died(rig, 1) == first["checkpointID"]
        delete(rig, "first")
        await says(rig, None)
        await stays(rig, None)
        assert await died(rig, 2) is None
        await taken(rig, "third")


async def test_data_that_stays_is_still_what_is_continued_from(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await taken(rig, "first")
        second = await taken(rig, "second")
        delete(rig, "second")
        await asyncio.sleep(20)
        assert said(rig) == {"second"}
        await stays(rig, "second")
        assert await died(rig, 1) == second["checkpointID"]
        await says(rig, "second")


async def test_what_was_restored_and_is_deleted_then_leads_to_the_one_before_it(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await taken(rig, "first")
        await taken(rig, "second", "Delete")
        await died(rig, 1)
        await says(rig, "second")
        delete(rig, "second")
        await says(rig, "first")
        await stays(rig, "first")


async def test_while_storage_does_not_answer_it_stays_as_it_was_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await taken(rig, "first", "Delete")
        await taken(rig, "second", "Delete")
        listed, away = DirectoryStore.list, True

        def fails(self: DirectoryStore, prefix: str) -> dict[str, int]:
            if away and self.uri.endswith("cell-0") and prefix == "checkpoints":
                raise StorageError("the bucket does not answer")
            return listed(self, prefix)

        monkeypatch.setattr(DirectoryStore, "list", fails)
        delete(rig, "second")
        await rig.until(lambda: (CHECKPOINTS, IDENTITY.namespace, "second") not in rig.kube.objects, "gone")
        await asyncio.sleep(30)
        assert said(rig) == {"second"}, "nobody knows better"
        away = False
        await says(rig, "first")


async def test_a_recovery_from_the_input_leaves_nothing_to_continue_from(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, recovery={"policy": "Restart"}) as rig:
        await taken(rig, "first")
        assert await died(rig, 1) is None
        await says(rig, None)
        await taken(rig, "second")
