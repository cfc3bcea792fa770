"""The operator's workers over a whole stack in one event loop: real servers, a fake API server, virtual time."""

from __future__ import annotations

from pathlib import Path

from gym_operator.effects.kube import CHECKPOINTS, CHILDREN, PODS, STACKS
from gym_rig.cell import IDENTITY
from gym_rig.operated import operated
from gym_servers.engine.rows import counter_rows


async def test_a_collection_runs_to_its_end(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(4, 1)) as rig:
        await rig.until(rig.in_service, "in service")
        await rig.until(rig.complete, "complete")
        status = rig.status()
        assert status["cells"][0]["collection"] == {"expected": 4, "rows": 4, "failed": 0, "complete": True}
        assert rig.conditions()["Ready"]["reason"] == "CollectionComplete"
        assert rig.conditions()["StorageReady"]["status"] == "True"
        assert {each["phase"] for each in status["cells"][0]["participants"]} == {"idle"}
