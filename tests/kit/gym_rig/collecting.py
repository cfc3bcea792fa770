"""What tests of a whole stack that collects counter rows wait for, and what must be true at its end."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from gym_operator.effects.kube import CHECKPOINTS
from gym_operator.rules.cell_record import from_document
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig
from gym_servers.collection.shares import SHARES
from gym_servers.engine.rows import counter_rows
from gym_servers.proof.account import account
from gym_servers.proof.history import Cut, read_cut, sort_journal
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.store import ObjectMissing

ROWS = 6
SLOWLY = 5.0  # tokens a second: the collection outlasts what a test does to it


def rows(count: int = ROWS) -> Any:
    return counter_rows(count, 1)


async def under_way(rig: OperatedRig) -> None:
    """All cells are in service, and each has called a tool."""
    await rig.until(rig.all_in_service, "in service")
    await rig.until(lambda: len(owners(rig, called(rig))) == rig.spec.get("cells", 1), "tools were called")


def called(rig: OperatedRig) -> set[str]:
    """Rollouts that have called a tool."""
    return {str(entry["rollout"]) for entry in rig.cell.journal() if entry["kind"] == "effect"}


def owner(rig: OperatedRig, rollout: str) -> int:
    """The cell whose a rollout is, as the output says."""
    folder = rig.folder / "output" / "cells" / IDENTITY.uid / str(int(rollout.split("-")[0]) % SHARES)
    newest = max((path for path in folder.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    cell: int = json.loads(newest.read_text())["cell"]
    return cell


def owners(rig: OperatedRig, rollouts: set[str]) -> set[int]:
    return {owner(rig, rollout) for rollout in rollouts}


async def taken(rig: OperatedRig, name: str, **spec: Any) -> dict[str, Any]:
    """The status of a checkpoint when it is final, whatever came of it."""
    rig.checkpoint(name, **spec)
    await rig.until(lambda: rig.final(name), f"{name} is final")
    return rig.status(CHECKPOINTS, name)


def published(uri: str | None) -> bool:
    try:
        return uri is not None and read_publication(open_store(uri).get(CHECKPOINT)).state == "published"
    except ObjectMissing:
        return False


async def to_the_end(rig: OperatedRig, count: int) -> None:
    """Every rollout has one row, and in each cell no tool effect of the surviving history happened twice or not at
    all."""
    await rig.until(rig.complete, "complete")
    done = [json.loads(line) for line in (rig.folder / "output" / "rollouts.jsonl").read_text().splitlines()]
    assert Counter(row["_ng_rollout_id"] for row in done) == {f"{n}-0": 1 for n in range(count)}
    total = rig.status()["collection"]
    assert total == {"expected": count, "rows": count, "failed": 0, "complete": True}
    journals = sort_journal(rig.cell.journal())
    for cell in {owner(rig, row["_ng_rollout_id"]) for row in done}:
        own = [row for row in done if owner(rig, row["_ng_rollout_id"]) == cell]
        counted = account(len(own), own, journals, restored(rig, cell))
        assert counted.ok, (cell, counted.problems)


def restored(rig: OperatedRig, cell: int) -> dict[int, Cut]:
    """What a cell continued from, by its attempt."""
    record, cuts = from_document(rig.record(cell)), dict[int, Cut]()
    assert record is not None
    for recovery in record.recoveries:
        if recovery.checkpoint is not None:
            store = open_store(recovery.checkpoint.uri)
            cuts[recovery.attempt] = read_cut(store, read_publication(store.get(CHECKPOINT)))
    return cuts
