"""Retention under a whole operator: what is not kept goes, what a stack would continue from stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects.kube import CHECKPOINTS, PODS, SCHEDULES
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_servers.engine.rows import counter_rows
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CHECKPOINT, read_publication

SLOWLY = 1.0


def rows() -> Any:
    return counter_rows(6, 1)


def checkpoints(rig: OperatedRig) -> list[str]:
    return sorted(name for kind, _, name in rig.kube.objects if kind == CHECKPOINTS)


async def taken(rig: OperatedRig, name: str, **spec: Any) -> dict[str, Any]:
    rig.checkpoint(name, **spec)
    await rig.until(lambda: rig.final(name), f"{name} is final")
    status = rig.status(CHECKPOINTS, name)
    assert status["phase"] == "Succeeded", status
    return status


def schedule(rig: OperatedRig, **spec: Any) -> None:
    template = {"spec": {"stackRef": {"name": IDENTITY.name}}}
    whole = {"every": "20s", "template": template, **spec}
    rig.kube.put(SCHEDULES, IDENTITY.namespace, {"metadata": {"name": "often"}, "spec": whole})


async def test_k4_a_ttl_ends_all_but_the_newest_good_one(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await rig.until(rig.in_service, "in service")
        first = await taken(rig, "first", ttl="10s")
        await asyncio.sleep(100)
        assert checkpoints(rig) == ["first"], "it is all there is to continue from"
        await taken(rig, "kept")
        await taken(rig, "second", ttl="30s")
        await rig.until(lambda: checkpoints(rig) == ["kept", "second"], "the first is gone")
        await asyncio.sleep(100)
        assert checkpoints(rig) == ["kept", "second"], "the second is the newest"
        await taken(rig, "third")
        await rig.until(lambda: checkpoints(rig) == ["kept", "third"], "the second is gone")
        published = read_publication(open_store(first["uri"]).get(CHECKPOINT))
        assert published.state == "published", "data is retained unless it was to be deleted"


async def test_a_ttl_can_be_changed_afterwards(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await rig.until(rig.in_service, "in service")
        for name in ("a", "b", "c"):
            await taken(rig, name)
        found = rig.kube.objects[CHECKPOINTS, IDENTITY.namespace, "a"]
        rig.kube.set(CHECKPOINTS, IDENTITY.namespace, "a", spec={**found["spec"], "ttl": "1s"})
        await rig.until(lambda: checkpoints(rig) == ["b", "c"], "it is gone")


@pytest.mark.parametrize("write", [None, 1, 2, 4, 7])
async def test_a_schedule_keeps_the_newest_whenever_its_operator_dies(tmp_path: Path, write: int | None) -> None:
    async with operated(tmp_path, rows(), rate=0.3) as rig:
        await rig.until(rig.in_service, "in service")
        await taken(rig, "by-hand")
        schedule(rig, keep={"last": 2})
        await rig.until(lambda: len(checkpoints(rig)) == 3, "two of the schedule")
        if write is not None:
            await rig.replace_operator(write)
        await asyncio.sleep(150)
        assert 3 <= len(checkpoints(rig)) <= 4, "two finished ones, and perhaps one that is being taken"
        assert "by-hand" in checkpoints(rig), "not its own"
        newest = rig.status()["lastCheckpoint"]["name"]
        assert newest in checkpoints(rig)
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert rig.status()["cells"][0]["recoveries"][-1].get("checkpoint")


async def test_k7_a_deleted_schedule_takes_nothing_along(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=0.3) as rig:
        await rig.until(rig.in_service, "in service")
        schedule(rig, keep={"last": 1, "maxAge": "50s"})
        await rig.until(lambda: len(checkpoints(rig)) == 1 and rig.final(checkpoints(rig)[0]), "one")
        rig.kube.remove(SCHEDULES, IDENTITY.namespace, "often")
        await taken(rig, "newer")
        await asyncio.sleep(300)
        assert len(checkpoints(rig)) == 2
