"""A stack at rest costs nothing, neither the API server nor its storage, and it is back when it is needed."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gym_operator.api import names
from gym_operator.effects import worker
from gym_operator.effects.fleet import RESYNC_SECONDS
from gym_operator.effects.kube import CHILDREN, RESTORES, STACKS, Resource
from gym_operator.effects.resync import WATCHED
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_servers.engine.rows import counter_rows
from gym_servers.storage.directory import DirectoryStore

QUIET_SECONDS = 240.0
USES = ("create", "replace", "get", "fingerprint", "list", "delete")


class Counted:
    """Every request to the API server, by verb and kind, and every use of the storage."""

    def __init__(self, rig: OperatedRig, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.uses: Counter[str] = Counter()
        rig.kube.permitted = self._permitted
        for use in USES:
            monkeypatch.setattr(DirectoryStore, use, self._counting(use, getattr(DirectoryStore, use)))

    def _permitted(self, verb: str, resource: Resource, name: str) -> bool:
        self.calls[verb, resource.plural] += 1
        return True

    def _counting(self, use: str, original: Any) -> Any:
        def counting(store: DirectoryStore, *arguments: Any) -> Any:
            self.uses[use] += 1
            return original(store, *arguments)

        return counting

    def clear(self) -> None:
        self.calls.clear()
        self.uses.clear()


async def suspended(rig: OperatedRig) -> None:
    await rig.until(rig.in_service, "in service")
    await rig.until(lambda: rig.conditions().get("StorageReady", {}).get("status") == "True", "proved")
    rig.change(suspend=True)
    await rig.until(lambda: rig.status()["phase"] == "Suspended" and not rig.pods(), "suspended")
    await asyncio.sleep(2 * RESYNC_SECONDS)


def beside_looks(calls: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Without the question, asked once for all stacks, what has happened."""
    return Counter({call: n for call, n in calls.items() if call[0] != "watch"})


async def test_a_suspended_stack_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with operated(tmp_path, counter_rows(4, 1)) as rig:
        counted = Counted(rig, monkeypatch)
        await suspended(rig)
        counted.clear()
        await asyncio.sleep(QUIET_SECONDS)
        assert beside_looks(counted.calls) == Counter()
        assert counted.calls.total() <= len(WATCHED) * (QUIET_SECONDS / RESYNC_SECONDS + 1)
        assert counted.uses == Counter()
        rig.change(suspend=False)
        await rig.until(lambda: rig.in_service(1), "in service again")


async def test_an_operator_that_starts_leaves_suspended_stacks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be hundreds: their children and their storage are as the operator before has left them."""
    async with operated(tmp_path, counter_rows(4, 1)) as rig:
        counted = Counted(rig, monkeypatch)
        await suspended(rig)
        before = rig.status()
        rig.kill_operator()
        counted.clear()
        monkeypatch.setattr(worker.random, "random", lambda: 0.5)
        rig.start_operator()
        await asyncio.sleep(10 * RESYNC_SECONDS)
        own = {call: n for call, n in beside_looks(counted.calls).items() if call[0] != "list" or call[1] == "pods"}
        assert own == {("get", "gymstacks"): 1, ("list", "pods"): 2}, "its status, its pods, and one list of all"
        assert counted.uses == Counter()
        assert rig.status() == before
        rig.change(suspend=False)
        await rig.until(lambda: rig.in_service(1), "in service again")


async def test_children_of_a_stack_at_rest_are_looked_at_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "REST_SECONDS", 20.0)
    monkeypatch.setattr(worker, "ENSURE_AT_REST_SECONDS", 100.0)
    async with operated(tmp_path, counter_rows(4, 1)) as rig:
        await suspended(rig)
        service = (CHILDREN["Service"], IDENTITY.namespace, "rig-agent")
        rig.kube.remove(*service)
        await asyncio.sleep(130)
        assert service in rig.kube.objects


async def test_pods_that_come_up_at_a_suspended_stack_go_again(tmp_path: Path) -> None:
    """Such as by somebody who scales a StatefulSet."""
    async with operated(tmp_path, counter_rows(4, 1)) as rig:
        await suspended(rig)
        name = (CHILDREN["StatefulSet"], IDENTITY.namespace, "rig-agent")
        body = rig.kube.objects[name]
        metadata = {**body["metadata"], "annotations": {names.APPLIED_DIGEST: "by hand"}}
        rig.kube.set(*name, spec={**body["spec"], "replicas": 1}, metadata=metadata)
        await rig.until(lambda: rig.pods(), "it came up")
        await rig.until(lambda: not rig.pods(), "it is gone")
        assert rig.status()["phase"] == "Suspended"


async def test_a_restore_of_a_stopped_stack_at_rest_begins_at_once(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(4, 3)) as rig:
        await rig.until(rig.in_service, "in service")
        rig.checkpoint("last", stopAfter=True)
        await rig.until(lambda: rig.status()["phase"] == "Stopped" and not rig.pods(), "stopped")
        await asyncio.sleep(QUIET_SECONDS)
        body = {
            "metadata": {"name": "back"},
            "spec": {"stackRef": {"name": "rig"}, "checkpointRef": {"name": "last"}},
        }
        rig.kube.put(RESTORES, IDENTITY.namespace, body)
        began = asyncio.get_running_loop().time()
        await rig.until(lambda: rig.in_service(1), "in service again")
        assert asyncio.get_running_loop().time() - began < 60


async def test_hundreds_of_stacks_are_not_all_asked_for_at_once(tmp_path: Path) -> None:
    """When an operator starts, and they are all there."""
    async with operated(tmp_path, counter_rows(4, 1)) as rig:
        await suspended(rig)
        rig.kill_operator()
        spec = rig.kube.objects[STACKS, IDENTITY.namespace, "rig"]["spec"]
        for number in range(40):
            rig.kube.put(STACKS, IDENTITY.namespace, {"metadata": {"name": f"rig-{number}"}, "spec": spec})
        under_way, most = 0, 0
        original = type(rig.kube).get

        async def slow(*arguments: Any) -> Any:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            await asyncio.sleep(0.1)
            under_way -= 1
            return await original(*arguments)

        type(rig.kube).get = slow  # type: ignore[method-assign]
        try:
            rig.start_operator()
            await asyncio.sleep(60)
        finally:
            type(rig.kube).get = original  # type: ignore[method-assign]
        assert rig.operator is not None
        assert rig.operator.fleet.health()["looked"] == 41
        assert 1 < most <= 10
