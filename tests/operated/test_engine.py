"""The operator and the engine of a stack's inference block, which is no part of any cell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_operator.api import names
from gym_operator.effects.kube import CHILDREN, PODS
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_servers.engine.rows import counter_rows

NAME = names.engine(IDENTITY.name)
INFERENCE = {"vllm": {"image": "vllm:1", "model": "tiny"}}


def served_by_vllm(rig: OperatedRig) -> list[dict[str, Any]]:
    """The rig's servers; its own processes are what they are, whatever the spec calls them."""
    return [
        {**server, "server": "vllm", "config": {}} if server["kind"] == "model" else server
        for server in rig.spec["servers"]
    ]


def is_there(rig: OperatedRig, kind: str) -> bool:
    return (CHILDREN[kind], IDENTITY.namespace, NAME) in rig.kube.objects


def ready(rig: OperatedRig) -> str:
    found = rig.conditions().get("Ready", {})
    return f"{found.get('status')} {found.get('reason')}"


async def test_the_engine_outlives_every_server_and_goes_with_its_block(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(4, 1)) as rig:
        await rig.until(rig.in_service, "in service")
        assert "EngineReady" not in rig.conditions()
        scripted = rig.spec["servers"]
        rig.engines_ready = False
        rig.change(inference=INFERENCE, servers=served_by_vllm(rig))
        await rig.until(lambda: rig.engines(), "an engine's pod")
        (engine,) = rig.engines().values()
        await rig.until(lambda: ready(rig) == "False EngineNotReady", "not ready without it")
        rig.engines_ready = True
        await rig.until(lambda: rig.conditions()["EngineReady"]["status"] == "True", "the engine serves")
        assert ready(rig) != "False EngineNotReady"
        attempt = rig.record().get("attempt", 0)
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-policy-0")
        await rig.until(lambda: rig.in_service(attempt + 1), "recovered")
        assert list(rig.engines().values()) == [engine], "a recovery has replaced the engine"
        rig.change(suspend=True)
        await rig.until(lambda: not rig.engines(), "no engine while suspended")
        rig.change(suspend=False)
        await rig.until(lambda: rig.engines(), "an engine again")
        del rig.spec["inference"]
        rig.change(servers=scripted)
        await rig.until(
            lambda: not any(is_there(rig, k) for k in ("Deployment", "Service", "NetworkPolicy")), "pruned"
        )
        await rig.until(lambda: "EngineReady" not in rig.conditions(), "no condition without an engine")
        assert (
            CHILDREN["NetworkPolicy"],
            IDENTITY.namespace,
            names.network_policy(IDENTITY.name),
        ) in rig.kube.objects


async def test_an_engine_that_dies_costs_no_recovery(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(4, 1)) as rig:
        rig.change(inference=INFERENCE, servers=served_by_vllm(rig))
        await rig.until(lambda: rig.in_service() and rig.engines(), "in service")
        attempt, (name,) = rig.record().get("attempt", 0), rig.engines()
        rig.kube.remove(PODS, IDENTITY.namespace, name)
        await rig.until(rig.complete, "complete")
        assert rig.record().get("attempt", 0) == attempt
