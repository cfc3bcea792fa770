"""Nodes of which nobody hears: what is on them is removed by force, and only where nothing else ends it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gym_operator.effects.kube import PODS, Resource
from gym_operator.rules.pod_state import OVERDUE_SECONDS
from gym_rig.cell import IDENTITY
from gym_rig.collecting import ROWS, rows, taken, to_the_end, under_way
from gym_rig.network import Fault
from gym_rig.operated import OperatedRig, operated
from gym_rig.rolling import sources
from gym_rig.virtual import now


async def at_work(rig: OperatedRig) -> None:
    """All of it on node-1, and what comes later on node-2."""
    for node in ("node-1", "node-2"):
        rig.node_is(node, "True")
    await under_way(rig)
    assert (await taken(rig, "one"))["phase"] == "Succeeded"
    rig.node = "node-2"


def forced(rig: OperatedRig) -> list[str]:
    """The pods that were said to be removed by force."""
    return sorted(said.partition("the end of ")[2].partition(";")[0] for said in rig.events("PodForced"))


def deletions(rig: OperatedRig) -> int:
    return sum((verb, resource) == ("delete", PODS) for verb, resource, _ in rig.kube.writes)


async def test_the_pods_of_a_node_that_is_lost_are_removed_by_force_and_their_cell_goes_on_elsewhere(
    tmp_path: Path,
) -> None:
    """Nobody would ever confirm their end."""
    async with operated(tmp_path, rows(), nodes=True, rate=20.0) as rig:
        await at_work(rig)
        pods, began = sorted(rig.pods()), now()
        rig.kube.silent_nodes.add("node-1")
        rig.cell.kill()
        await asyncio.sleep(30)
        assert (forced(rig), deletions(rig)) == ([], 0), "it may only be slow"
        rig.node_is("node-1", "Unknown")
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert now() - began < 30 + OVERDUE_SECONDS
        assert forced(rig) == pods
        assert (sources(rig), rig.record()["attempt"]) == (["one"], 1), "once"
        await to_the_end(rig, ROWS)


async def test_the_pods_of_a_node_that_says_itself_that_it_is_not_ready_are_left_to_it(tmp_path: Path) -> None:
    """It ends what it is told to end, and may be well again soon."""
    async with operated(tmp_path, rows(), nodes=True, rate=20.0) as rig:
        await at_work(rig)
        pods = rig.pods()
        rig.node_is("node-1", "False")
        silent = [Fault("unreachable", host=rig.cell.control_host(name), calls=10**6) for name in rig.cell.settings]
        rig.cell.network.faults += silent
        await asyncio.sleep(60)
        assert (rig.pods(), forced(rig), deletions(rig)) == (pods, [], 0)
        rig.cell.network.faults.clear()
        rig.node_is("node-1", "True")
        await to_the_end(rig, ROWS)
        assert sources(rig) == []


@pytest.mark.parametrize("may_look", [True, False])
async def test_a_pod_whose_end_nobody_confirms_is_removed_by_force_when_its_time_is_long_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_look: bool
) -> None:
    """Whether its node is said to be lost or not, and whether that may be asked."""
    async with operated(tmp_path, rows(3), nodes=True, rate=20.0) as rig:
        await at_work(rig)
        rig.kube.permitted = lambda verb, resource, _: may_look or (verb, resource.plural) != ("get", "nodes")
        rig.kube.silent_nodes.add("node-1")
        began, told = now(), list[tuple[int | None, float]]()
        original = rig.kube.delete

        async def delete(
            resource: Resource, namespace: str, name: str, uid: str | None = None, grace: int | None = None
        ) -> None:
            if resource == PODS:
                told.append((grace, now() - began))
            await original(resource, namespace, name, uid, grace)

        monkeypatch.setattr(rig.kube, "delete", delete)
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert forced(rig) == sorted(set(rig.pods()) - {"rig-agent-0"})
        by_force = [at for grace, at in told if grace == 0]
        assert len(by_force) == 4 and min(by_force) > OVERDUE_SECONDS, "each once, and not before"
        assert sources(rig) == ["one"]
