"""One cell of a stack is in the hands of another operator for a while; the rest of the stack's work goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from gym_operator.effects.cache import Key
from gym_operator.effects.cell_worker import STAND_BY_SECONDS
from gym_operator.effects.kube import CHECKPOINTS, STACKS
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_servers.engine.rows import counter_rows

SOON_SECONDS = STAND_BY_SECONDS / 3


def generation(rig: OperatedRig) -> int:
    return int(rig.kube.objects[STACKS, IDENTITY.namespace, IDENTITY.name]["metadata"]["generation"])


def prepare_within(rig: OperatedRig, seconds: int) -> None:
    rig.change(checkpoints={**rig.spec["checkpoints"], "prepareTimeout": f"{seconds}s"})


def parts(rig: OperatedRig, checkpoint: str) -> dict[int, str]:
    return {part["index"]: part["phase"] for part in rig.status(CHECKPOINTS, checkpoint).get("cells", ())}


async def written_by_another(rig: OperatedRig, cell: int) -> None:
    """The record of a cell, as by another operator that has begun something there; and it is noticed."""
    status = rig.status()
    cells: list[Any] = [
        {**each, "record": {**each["record"], "sequence": 7}} if each["index"] == cell else each
        for each in status["cells"]
    ]
    rig.kube.set(STACKS, IDENTITY.namespace, IDENTITY.name, status={**status, "cells": cells})
    prepare_within(rig, 61)  # whatever makes the status be written
    assert rig.operator is not None
    worker = rig.operator.fleet._workers[Key(IDENTITY.namespace, IDENTITY.name)][0]
    await rig.until(lambda: worker._cells[cell][0].stands_by, "it stands by")


async def test_the_stacks_own_work_goes_on_while_a_cell_stands_by(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(12, 1), cells=2) as rig:
        await rig.until(rig.all_in_service, "in service")
        await rig.until(lambda: rig.conditions().get("StorageReady", {}).get("status") == "True", "proved")
        await written_by_another(rig, 1)
        began = asyncio.get_running_loop().time()
        prepare_within(rig, 62)
        await rig.until(lambda: rig.status()["observedGeneration"] == generation(rig), "the change is seen")
        rig.checkpoint("both")
        await rig.until(lambda: parts(rig, "both").get(0) == "Succeeded", "the other cell's part is taken")
        assert asyncio.get_running_loop().time() - began < SOON_SECONDS
        assert parts(rig, "both")[1] == "Pending", "and nobody meddles with the one that is elsewhere"
        await rig.until(lambda: rig.final("both"), "final")
        assert rig.status(CHECKPOINTS, "both")["phase"] == "Succeeded"
        assert {cell["attempt"] for cell in rig.status()["cells"]} == {0}
