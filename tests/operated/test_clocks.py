"""Clocks that are minutes apart: the operator's, the participants', the API server's. Durations are durations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from gym_operator.api.objects import format_time
from gym_operator.effects.kube import CHECKPOINTS, PODS, RESTORES
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_servers.engine.rows import counter_rows

MINUTES = 300.0


def set_participants_clocks(rig: OperatedRig, wall: Callable[[], float]) -> None:
    """Of all that start from now on. Their answers are dated, as a web server does it."""
    undated = rig.cell._control_app

    def dated(plane: Any) -> Any:
        app = undated(plane)

        async def with_date(scope: Any, receive: Any, send: Any) -> None:
            async def put(message: Mapping[str, Any]) -> None:
                if message["type"] == "http.response.start":
                    date = (b"date", formatdate(wall(), usegmt=True).encode())
                    message = {**message, "headers": [*message["headers"], date]}
                await send(message)

            await app(scope, receive, put)

        return with_date

    rig.cell.wall = wall  # type: ignore[assignment]
    rig.cell._control_app = dated  # type: ignore[method-assign]


@pytest.mark.parametrize("skew", [-MINUTES, MINUTES])
async def test_participants_whose_clocks_are_minutes_off_are_checkpointed_and_recovered(
    tmp_path: Path, skew: float
) -> None:
    async with operated(tmp_path, counter_rows(6, 1)) as rig:
        loop = asyncio.get_running_loop()
        set_participants_clocks(rig, lambda: loop.time() + MINUTES + skew)
        assert rig.operator is not None
        await rig.until(rig.in_service, "in service")
        await rig.until(lambda: rig.cell.effects() >= 2, "tools were called")
        rig.checkpoint("one")
        began = loop.time()
        await rig.until(lambda: rig.final("one"), "final")
        assert rig.status(CHECKPOINTS, "one")["phase"] == "Succeeded", rig.status(CHECKPOINTS, "one")
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert loop.time() - began < 60
        recovery = rig.status()["cells"][0]["recoveries"][0]
        assert recovery["checkpoint"] == rig.status(CHECKPOINTS, "one")["checkpointID"]
        await rig.until(rig.complete, "complete")


@pytest.mark.parametrize("kind", [CHECKPOINTS, RESTORES])
@pytest.mark.parametrize("skew", [-MINUTES, MINUTES])
async def test_what_waits_for_its_stack_waits_as_long_whatever_the_api_servers_clock_says(
    tmp_path: Path, kind: Any, skew: float
) -> None:
    """Applied together, the stack a moment later: by a clock that is minutes ahead it would be too late at once."""
    async with operated(tmp_path, counter_rows(6, 1)) as rig:
        loop = asyncio.get_running_loop()
        made = {"name": "early", "creationTimestamp": format_time(loop.time() + skew)}
        spec: dict[str, Any] = {"stackRef": {"name": "later"}}
        if kind == RESTORES:
            spec["checkpointRef"] = {"name": "any"}
        rig.kube.put(kind, IDENTITY.namespace, {"metadata": made, "spec": spec})
        await asyncio.sleep(30)
        assert rig.status(kind, "early")["phase"] == "Pending"
        await asyncio.sleep(60)
        assert rig.status(kind, "early")["phase"] == "Failed"
