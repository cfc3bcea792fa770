"""Pods as the operator sees them: whose they are, which live, and requests to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gym_operator.api import names
from gym_operator.effects.cache import Cache, Key
from gym_operator.effects.events import Events, Subject
from gym_operator.effects.kube import CHECKPOINTS, NODES, PODS, Listing
from gym_operator.effects.kube_host import KubeCellHost
from gym_operator.effects.services import Services
from gym_operator.effects.stack_pods import StackPods
from gym_operator.effects.status_writers import StackWriter
from gym_operator.effects.transport import PodTransport
from gym_operator.rules.workloads import StackContext
from gym_rig.edges import NS, STACK_UID
from gym_rig.fake_kube import FakeKube
from gym_servers.coordination.record import Pin


def put_pod(kube: FakeKube, server: str, cell: int = 0, **metadata: Any) -> dict[str, Any]:
    labels = {names.STACK_LABEL: "demo", names.STACK_UID_LABEL: STACK_UID, names.SERVER_LABEL: server}
    return kube.put(
        PODS,
        NS,
        {
            "metadata": {"name": f"demo-{server}-{cell}", "uid": f"{server}-uid", "labels": labels, **metadata},
            "spec": {"nodeName": "node-1"},
            "status": {
                "phase": "Running",
                "podIP": "10.0.0.1",
                "containerStatuses": [{"name": "server", "containerID": "c", "state": {"running": {}}}],
            },
        },
    )


def host(
    kube: FakeKube,
    context: Callable[[dict[str, Any]], StackContext],
    document: dict[str, Any],
    cell: int = 0,
    monotonic: Callable[[], float] = time.monotonic,
) -> tuple[KubeCellHost, StackPods]:
    subject = Subject("GymStack", NS, "demo", STACK_UID)
    transport = PodTransport(httpx.MockTransport(lambda _: httpx.Response(200)))
    http = httpx.AsyncClient(transport=transport)
    services = Services(kube, Cache(transport), Events(kube), http, "gym-system", monotonic=monotonic)
    pods, writer = StackPods(services, subject), StackWriter(kube, NS, "demo", STACK_UID)
    return KubeCellHost(services, subject, cell, pods, writer, context(document).spec.participants()), pods


# ---- pods --------------------------------------------------------------------------------------------------


async def test_processes_are_the_pods_own_and_end_by_uid(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any]
) -> None:
    cell, pods = host(kube, context, spec_document)
    put_pod(kube, "env")
    put_pod(kube, "agent")
    await pods.refresh()
    found = {process.name: process for process in await cell.processes()}
    assert set(found) == {"env", "policy", "agent", "counter", "collection"}
    assert (found["env"].incarnation, found["env"].control_url) == ("env-uid/c", "http://10.0.0.1:8001")
    assert (found["policy"].incarnation, found["policy"].detail) == (None, "no pod")

    kube.remove(PODS, NS, "demo-agent-0")
    put_pod(kube, "agent", uid="younger")  # the cache does not know yet
    await cell.end({"env": "env-uid/c", "agent": "agent-uid/c", "policy": "unknown/c"})
    assert (PODS, NS, "demo-env-0") not in kube.objects
    assert kube.objects[PODS, NS, "demo-agent-0"]["metadata"]["uid"] == "younger"
    writes = len(kube.writes)
    await cell.end({"env": "env-uid/c"})
    assert len(kube.writes) == writes, "a deletion under way is not asked for again"


async def test_a_cell_has_its_own_pods_and_no_others(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any]
) -> None:
    cell, pods = host(kube, context, spec_document, cell=1)
    put_pod(kube, "env", cell=0)
    put_pod(kube, "env", cell=1, uid="mine")
    put_pod(kube, "agent", cell=11)
    await pods.refresh()
    assert {one.name: one.incarnation for one in await cell.processes() if one.incarnation} == {"env": "mine/c"}
    assert not cell.any_ended({"env": Pin(incarnation="mine/c", session="s")})
    assert cell.any_ended({"agent": Pin(incarnation="agent-uid/c", session="s")})
    await cell.end({"env": "env-uid/c", "agent": "agent-uid/c"})
    await cell.end({"env": "mine/c"})
    assert {name for resource, _, name in kube.objects if resource == PODS} == {"demo-env-0", "demo-agent-11"}


async def test_nothing_lives_on_a_lost_node(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any]
) -> None:
    cell, pods = host(kube, context, spec_document)
    put_pod(kube, "env")
    node = {"metadata": {"name": "node-1"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    kube.put(NODES, None, node)  # type: ignore[arg-type]
    pods.silent(0, ("env",))
    await pods.refresh()
    assert {process.name for process in await cell.processes() if process.alive} == {"env"}
    kube.set(NODES, None, "node-1", status={"conditions": [{"type": "Ready", "status": "Unknown"}]})  # type: ignore[arg-type]
    await pods.refresh()
    (env, *_) = await cell.processes()
    assert (env.alive, env.detail) == (False, "node node-1 is lost")
    graces = []
    delete = kube.delete

    async def noted(*arguments: Any) -> None:
        graces.append(arguments[-1])
        await delete(*arguments)

    kube.delete = noted  # type: ignore[method-assign]
    await cell.end({"env": "env-uid/c"})
    assert graces == [0], "nobody on a lost node confirms an end"

    put_pod(kube, "agent")
    pods.silent(0, ())
    assert pods.has_lost_nodes
    kube.set(NODES, None, "node-1", status={"conditions": [{"type": "Ready", "status": "True"}]})  # type: ignore[arg-type]
    await pods.refresh()
    assert not pods.has_lost_nodes
    assert {process.name for process in await cell.processes() if process.alive} == {"agent"}


async def test_a_cell_is_at_work_for_as_long_as_a_process_of_it_may_run(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any]
) -> None:
    clock = [0.0]
    _, pods = host(kube, context, spec_document, monotonic=lambda: clock[0])
    assert pods.cells_at_work() == 0
    put_pod(kube, "env", cell=0, uid="stays")
    put_pod(kube, "env", cell=2)
    await pods.refresh()
    assert pods.cells_at_work() == 3
    clock[0] = 1000.0
    ending = {"deletionTimestamp": "2027-01-15T08:00:00Z", "deletionGracePeriodSeconds": 200}
    found = kube.objects[PODS, NS, "demo-env-2"]
    kube.set(PODS, NS, "demo-env-2", metadata={**found["metadata"], **ending})
    await pods.refresh()
    assert pods.cells_at_work() == 3
    clock[0] += 219.0
    assert pods.cells_at_work() == 3, "its time is over, and its node may confirm that in a moment"
    clock[0] += 2.0
    assert pods.cells_at_work() == 1, "its node does not answer: nobody waits for ever"
    ended = {**found["status"], "phase": "Failed"}
    kube.set(PODS, NS, "demo-env-0", status=ended)
    await pods.refresh()
    assert pods.cells_at_work() == 0


async def test_a_cell_on_a_lost_node_is_not_at_work(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any]
) -> None:
    _, pods = host(kube, context, spec_document)
    put_pod(kube, "env", cell=2)
    pods.silent(2, ("env",))
    await pods.refresh()  # no such node
    assert pods.cells_at_work() == 0


def test_a_list_does_not_forget_what_is_younger_than_it(kube: FakeKube) -> None:
    cache = Cache(PodTransport(httpx.MockTransport(lambda _: httpx.Response(200))))
    old, young = put_pod(kube, "env"), put_pod(kube, "agent")
    cache.put_pod(young)
    cache.replace_pods(STACK_UID, Listing([old], int(old["metadata"]["resourceVersion"])))
    assert set(cache.pods_of(STACK_UID, 0)) == {"env", "agent"}
    cache.replace_pods(STACK_UID, Listing([], 10_000))
    assert cache.pods_of(STACK_UID, 0) == {}


def test_finished_checkpoints_are_forgotten_and_stay_so(kube: FakeKube) -> None:
    cache = Cache(PodTransport(httpx.MockTransport(lambda _: httpx.Response(200))))
    body = kube.put(CHECKPOINTS, NS, {"metadata": {"name": "one"}, "spec": {"stackRef": {"name": "demo"}}})
    cache.put_checkpoint(body)
    assert cache.checkpoints_of(Key(NS, "demo")) == [body]
    cache.finish_checkpoint(Key(NS, "one"), body["metadata"]["uid"])
    cache.put_checkpoint(body)  # an event that was on the way
    assert cache.checkpoints_of(Key(NS, "demo")) == []
    cache.put_checkpoint({**body, "metadata": {**body["metadata"], "uid": "again", "resourceVersion": "1000"}})
    assert len(cache.checkpoints_of(Key(NS, "demo"))) == 1


# ---- requests to pods --------------------------------------------------------------------------------------


async def test_a_request_to_a_pod_that_ends_breaks_off_at_once() -> None:
    started = asyncio.Event()

    async def swallow(request: httpx.Request) -> httpx.Response:
        started.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    transport = PodTransport(httpx.MockTransport(swallow))
    async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
        transport.alive("10.0.0.1", "first")
        request = asyncio.create_task(client.get("http://10.0.0.1:8001/"))
        await started.wait()
        transport.ended("10.0.0.1", "first")
        with pytest.raises(httpx.ConnectError):
            await request
        with pytest.raises(httpx.ConnectError):
            await client.get("http://10.0.0.1:8001/")


async def test_an_address_that_is_used_again_answers() -> None:
    transport = PodTransport(httpx.MockTransport(lambda _: httpx.Response(200)))
    async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
        transport.alive("10.0.0.1", "first")
        transport.ended("10.0.0.1", "first")
        transport.alive("10.0.0.1", "second")
        transport.ended("10.0.0.1", "first")  # told late
        transport.forget("10.0.0.1", "first")
        assert (await client.get("http://10.0.0.1:8001/")).status_code == 200


async def test_a_caller_that_leaves_is_not_told_of_a_dead_pod() -> None:
    async def swallow(request: httpx.Request) -> httpx.Response:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async with httpx.AsyncClient(transport=PodTransport(httpx.MockTransport(swallow)), trust_env=False) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await client.get("http://10.0.0.1:8001/")
