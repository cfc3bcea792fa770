"""The edges of the operator, one by one, against a fake API server."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_operator.api import names
from gym_operator.api.checkpoint import CheckpointStatus
from gym_operator.api.conditions import ConditionReason
from gym_operator.api.restore import RestoreStatus
from gym_operator.api.schedule import ScheduleStatus
from gym_operator.api.stack import StackStatus
from gym_operator.effects import checkpoint_part as parts
from gym_operator.effects import storage as storage_module
from gym_operator.effects.accesses import Accesses
from gym_operator.effects.cache import Cache, Key
from gym_operator.effects.children import ChildProblem, ForeignChild, ensure_children, ensure_secret
from gym_operator.effects.cluster import cluster_id
from gym_operator.effects.events import Events, Subject
from gym_operator.effects.fleet import STUCK_SECONDS, Fleet
from gym_operator.effects.kube import (
    CHECKPOINTS,
    CHILDREN,
    EVENTS,
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
    STACKS,
    Conflict,
    KubeError,
    Listing,
    Resource,
)
from gym_operator.effects.kube_host import KubeCellHost
from gym_operator.effects.services import Services
from gym_operator.effects.stack_pods import StackPods
from gym_operator.effects.status_writers import (
    CheckpointWriter,
    Gone,
    RestoreWriter,
    ScheduleWriter,
    StackWriter,
    Superseded,
)
from gym_operator.effects.storage import StackStorage
from gym_operator.effects.transport import PodTransport
from gym_operator.effects.worker import StackWorker
from gym_operator.rules import checkpoint_phases as phases
from gym_operator.rules.workloads import StackContext
from gym_rig.fake_kube import FakeKube
from gym_servers.coordination.checkpoint import Request, tombstone
from gym_servers.coordination.record import CellRecord, OpenCheckpoint, Pin, Stage
from gym_servers.stack.spec import StorageSpec
from gym_servers.storage.cells import settle
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.s3_access import S3Access, S3Credentials
from gym_servers.storage.store import StorageError, StorageProblem

NS = "team"
STACK_UID = "stack-uid"


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube(lambda: 1_800_000_000.0)


def stack(kube: FakeKube) -> StackWriter:
    kube.put(STACKS, NS, {"metadata": {"name": "demo", "uid": STACK_UID}, "spec": {}})
    return StackWriter(kube, NS, "demo", STACK_UID)


# ---- status -----------------------------------------------------------------------------------------------


async def test_a_status_write_keeps_the_record(kube: FakeKube) -> None:
    writer = stack(kube)
    await writer.load()
    await writer.save_record(0, CellRecord(stage=Stage.RUNNING, attempt=2))
    assert await writer.write(lambda _: StackStatus(phase="Running"))
    status = kube.objects[STACKS, NS, "demo"]["status"]
    assert status["cells"][0]["record"] == {"stage": "running", "attempt": 2}
    assert (status["attempt"], status["phase"]) == (2, "Running")
    writes = len(kube.writes)
    assert not await writer.write(lambda _: StackStatus(phase="Running"))
    assert not await writer.write(lambda _: None)
    assert len(kube.writes) == writes, "what is there already is not written"


async def test_changes_of_others_only_cost_another_try(kube: FakeKube) -> None:
    writer = stack(kube)
    await writer.load()
    kube.set(STACKS, NS, "demo", spec={"changed": True})
    await writer.save_record(0, CellRecord(attempt=1))
    assert kube.objects[STACKS, NS, "demo"]["spec"] == {"changed": True}


async def test_k13_another_operators_record_stops_the_writer(kube: FakeKube) -> None:
    writer, other = stack(kube), StackWriter(kube, NS, "demo", STACK_UID)
    await writer.load()
    await other.load()
    await other.save_record(0, CellRecord(attempt=7))
    with pytest.raises(Superseded):
        await writer.save_record(0, CellRecord(attempt=1))
    with pytest.raises(Superseded):  # until it is read afresh, whatever is tried
        await writer.save_record(0, CellRecord(attempt=8))
    await writer.reload(0)
    assert writer.record(0) == CellRecord(attempt=7)
    await writer.save_record(0, CellRecord(attempt=8))


async def test_a_record_that_has_not_changed_is_written_all_the_same(kube: FakeKube) -> None:
    """Whoever is about to act on what he knows learns in this way that it is out of date."""
    writer, other = stack(kube), StackWriter(kube, NS, "demo", STACK_UID)
    await writer.load()
    record = CellRecord(stage=Stage.RUNNING)
    await writer.save_record(0, record)
    writes = len(kube.writes)
    await writer.save_record(0, record)
    assert len(kube.writes) == writes + 1
    await other.load()
    opened = OpenCheckpoint(checkpoint_id="cp", name="cp", uri="u", sequence=1)
    await other.save_record(0, record.model_copy(update={"open": opened}))
    with pytest.raises(Superseded):
        await writer.save_record(0, record)


async def test_k13_each_cells_record_is_fenced_on_its_own(kube: FakeKube) -> None:
    """Another operator has written the record of one cell: it stands, and the other cells go on."""
    writer, other = stack(kube), StackWriter(kube, NS, "demo", STACK_UID)
    await writer.load()
    await writer.save_record(0, CellRecord(attempt=1))
    await writer.save_record(2, CellRecord(attempt=2))
    await other.load()
    await other.save_record(2, CellRecord(attempt=7))
    await writer.save_record(0, CellRecord(attempt=3))
    assert await writer.write(lambda status: status.model_copy(update={"phase": "Running"}))
    status = kube.objects[STACKS, NS, "demo"]["status"]
    assert [(cell["index"], cell["record"]) for cell in status["cells"]] == [(0, {"attempt": 3}), (2, {"attempt": 7})]
    assert status["attempt"] == 7
    assert [writer.superseded(cell) for cell in (0, 1, 2)] == [False, False, True]
    with pytest.raises(Superseded, match="cell 2"):
        await writer.save_record(2, CellRecord(attempt=4))
    await other.save_record(2, CellRecord(attempt=8))
    await writer.reload(2)
    assert writer.record(2) == CellRecord(attempt=8)
    await writer.save_record(2, CellRecord(attempt=9))
    with pytest.raises(Superseded, match="cell 2"):
        await other.save_record(2, CellRecord(attempt=10))


async def test_an_own_write_whose_answer_was_lost_is_known_again(kube: FakeKube) -> None:
    writer = stack(kube)
    await writer.load()
    answered = kube.replace_status

    async def lost(*arguments: Any) -> Any:
        await answered(*arguments)
        raise KubeError(0, "the API server does not answer")

    kube.replace_status = lost  # type: ignore[method-assign]
    with pytest.raises(KubeError):
        await writer.save_record(0, CellRecord(attempt=1))
    kube.replace_status = answered  # type: ignore[method-assign]
    await writer.save_record(0, CellRecord(attempt=1, stage=Stage.RUNNING))
    assert writer.record(0) == CellRecord(attempt=1, stage=Stage.RUNNING)


async def test_a_stack_made_again_is_not_ours(kube: FakeKube) -> None:
    writer = stack(kube)
    await writer.load()
    kube.remove(STACKS, NS, "demo")
    with pytest.raises(Gone):
        await writer.save_record(0, CellRecord())
    kube.put(STACKS, NS, {"metadata": {"name": "demo", "uid": "another"}, "spec": {}})
    with pytest.raises(Gone):
        await writer.save_record(0, CellRecord())
    with pytest.raises(Gone):
        await writer.load()


@pytest.mark.parametrize(
    ("writer", "first", "second"),
    [
        (CheckpointWriter, CheckpointStatus(phase="Preparing"), CheckpointStatus(phase="Failed")),
        (ScheduleWriter, ScheduleStatus(last_checkpoint="one-1"), ScheduleStatus(phase="Suspended")),
        (RestoreWriter, RestoreStatus(phase="Restoring"), RestoreStatus(phase="Failed")),
    ],
)
async def test_k13_a_status_is_written_by_one_only(kube: FakeKube, writer: Any, first: Any, second: Any) -> None:
    """What somebody else has written stands; what people write of the object meanwhile is no conflict."""
    body = kube.put(writer.resource, NS, {"metadata": {"name": "one"}, "spec": {}})
    ours, theirs = (writer(kube, body) for _ in range(2))
    metadata = {**kube.objects[writer.resource, NS, "one"]["metadata"], "labels": {"by": "hand"}}
    kube.set(writer.resource, NS, "one", spec={"suspend": True}, metadata=metadata)
    await theirs.write(lambda _: first)
    for _ in range(2):
        with pytest.raises(Superseded):
            await ours.write(lambda _: second)
    found = kube.objects[writer.resource, NS, "one"]
    assert found["status"] == first.document()
    assert (found["spec"], found["metadata"]["labels"]) == ({"suspend": True}, {"by": "hand"})
    await ours.write(lambda status: status)  # nothing to write
    kube.remove(writer.resource, NS, "one")
    with pytest.raises(Gone):
        await theirs.write(lambda _: second)


async def test_k13_two_cells_write_their_parts_at_the_same_time_and_none_is_lost(kube: FakeKube) -> None:
    body = kube.put(CHECKPOINTS, NS, {"metadata": {"name": "one"}, "spec": {}})
    writer = CheckpointWriter(kube, body)
    answered = kube.replace_status

    async def slow(*arguments: Any) -> Any:
        await asyncio.sleep(0)
        return await answered(*arguments)

    kube.replace_status = slow  # type: ignore[method-assign]

    def part(index: int) -> Callable[[CheckpointStatus], CheckpointStatus]:
        which, at = phases.Which(index, (0, 1)), phases.At(1, 1.8e9)
        return lambda status: phases.under_way(status, which, "Preparing", "id", f"s3://b/{index}", 0, (), {}, at)

    await asyncio.gather(writer.write(part(0)), writer.write(part(1)))
    cells = kube.objects[CHECKPOINTS, NS, "one"]["status"]["cells"]
    assert [cell["uri"] for cell in cells] == ["s3://b/0", "s3://b/1"]


async def test_k2_what_was_published_is_known_also_once_the_bucket_is_full(
    kube: FakeKube, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = kube.put(CHECKPOINTS, NS, {"metadata": {"name": "one"}, "spec": {}})
    writer, which, at = CheckpointWriter(kube, body), phases.Which(0), phases.At(1, 1.8e9)
    await writer.put(phases.under_way(writer.status, which, "Preparing", "id", str(tmp_path), 0, (), {}, at))
    request = Request("id", "one", str(tmp_path), STACK_UID, 0, 0, 1, {})
    wanted = tombstone(request, "", 1.8e9).model_copy(update={"state": "published"})
    settle(DirectoryStore(tmp_path), wanted)

    def full(store: DirectoryStore, key: str, data: bytes) -> None:
        raise StorageError("the bucket is full", StorageProblem.FULL)

    monkeypatch.setattr(DirectoryStore, "create", full)
    part = parts.Part(writer, 0, (0,), "id", lambda: 1.8e9)
    end = await parts.resolve(part, lambda uri: DirectoryStore(Path(uri)), None)
    assert isinstance(end, parts.Published)
    assert end.publication == wanted


# ---- children ---------------------------------------------------------------------------------------------


async def test_children_are_made_once_and_written_again_on_drift(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any]
) -> None:
    stack_context = context(spec_document)
    tokens = await ensure_secret(kube, stack_context)
    assert tokens.current and not tokens.previous
    assert await ensure_secret(kube, stack_context) == tokens
    await ensure_children(kube, stack_context, running=True)
    made = len(kube.writes)
    await ensure_children(kube, stack_context, running=True)
    assert len(kube.writes) == made, "nothing differs"
    await ensure_children(kube, stack_context, running=False)
    changed = {(verb, resource.plural) for verb, resource, _ in kube.writes[made:]}
    assert changed == {("replace", "statefulsets")}
    del spec_document["collection"]
    await ensure_children(kube, context(spec_document), running=True)
    left = {name for resource, _, name in kube.objects if resource == CHILDREN["StatefulSet"]}
    assert left == {"demo-env", "demo-policy", "demo-agent", "demo-counter"}
    assert (CHILDREN["Service"], "team", "demo-collection-0") not in kube.objects


async def test_a_rotated_control_token_is_read_with_the_one_before(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any]
) -> None:
    stack_context = context(spec_document)
    old = (await ensure_secret(kube, stack_context)).current
    data = kube.objects[SECRETS, NS, "demo-control"]["data"]
    rotated = {"control-token": base64.b64encode(b"new").decode(), "control-token-previous": data["control-token"]}
    kube.set(SECRETS, NS, "demo-control", data={**data, **rotated})
    assert await ensure_secret(kube, stack_context) == ("new", old)


@pytest.mark.parametrize("data", [{}, {"control-token": ""}, {"control-token": "/w=="}, None])
async def test_a_control_secret_without_a_token_is_named(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any], data: Any
) -> None:
    stack_context = context(spec_document)
    await ensure_secret(kube, stack_context)
    kube.set(SECRETS, NS, "demo-control", data=data)
    with pytest.raises(ChildProblem, match="Secret demo-control has no control-token that is a text") as refused:
        await ensure_secret(kube, stack_context)
    assert refused.value.problem.reason is ConditionReason.CONTROL_SECRET_INVALID


async def test_what_belongs_to_somebody_else_is_not_touched(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any]
) -> None:
    kube.put(CHILDREN["StatefulSet"], NS, {"metadata": {"name": "demo-env"}, "spec": {}})
    with pytest.raises(ForeignChild, match="StatefulSet demo-env exists and belongs to something else"):
        await ensure_children(kube, context(spec_document), running=True)
    assert kube.objects[CHILDREN["StatefulSet"], NS, "demo-env"]["spec"] == {}


# ---- pods -------------------------------------------------------------------------------------------------


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


# ---- requests to pods -------------------------------------------------------------------------------------


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


# ---- storage ----------------------------------------------------------------------------------------------

SPEC = StorageSpec.model_validate({"s3": {"bucket": "bucket", "credentialsSecret": "keys"}})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (None, "there is no Secret keys in this namespace; create it with the keys AWS_ACCESS_KEY_ID and"),
        ({}, "Secret keys needs the keys AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, each with a value"),
        ({"AWS_ACCESS_KEY_ID": "a2V5", "AWS_SECRET_ACCESS_KEY": ""}, "each with a value"),
        ({"AWS_ACCESS_KEY_ID": "a2V5", "AWS_SECRET_ACCESS_KEY": "/w=="}, "each with a value"),
    ],
)
async def test_missing_credentials_are_named(kube: FakeKube, data: Any, words: str) -> None:
    if data is not None:
        kube.put(SECRETS, NS, {"metadata": {"name": "keys"}, "data": data})
    storage = StackStorage(kube, NS)
    await storage.tend(SPEC, "s3://bucket/stack")
    assert (storage.state.ok, storage.state.reason) == (False, StorageProblem.CREDENTIALS_MISSING)
    assert words in storage.state.message
    with pytest.raises(StorageError, match="Secret keys"):
        storage.open("s3://bucket/stack/cell-0")


KEYS = {"AWS_ACCESS_KEY_ID": "a2V5", "AWS_SECRET_ACCESS_KEY": "c2VjcmV0"}


async def test_who_only_takes_away_gets_in_as_secrets_said_last_once_they_are_gone(kube: FakeKube) -> None:
    accesses = Accesses()
    kube.put(SECRETS, NS, {"metadata": {"name": "keys"}, "data": KEYS})
    stack = StackStorage(kube, NS, accesses=accesses)
    await stack.tend(SPEC, "s3://bucket/stack")
    stack.close()
    kube.remove(SECRETS, NS, "keys")

    async def read(known: Accesses) -> StackStorage:
        storage = StackStorage(kube, NS, accesses=known)
        await storage.read(SPEC)
        return storage

    storage = await read(accesses)
    assert storage.remembered
    assert storage._access.current() == S3Access(S3Credentials("key", "secret"))
    storage.open("s3://bucket/stack/cell-0")
    with pytest.raises(StorageError, match="no Secret keys"):
        (await read(Accesses())).open("s3://bucket/stack/cell-0")
    # What somebody has emptied or taken the right to is not to be used, and whoever writes does not live on memories.
    kube.put(SECRETS, NS, {"metadata": {"name": "keys"}, "data": {}})
    with pytest.raises(StorageError, match="each with a value"):
        (await read(accesses)).open("s3://bucket/stack/cell-0")
    kube.remove(SECRETS, NS, "keys")
    stack = StackStorage(kube, NS, accesses=accesses)
    await stack.tend(SPEC, "s3://bucket/stack")
    assert stack.state.reason == StorageProblem.CREDENTIALS_MISSING
    accesses.keep({"another"})
    with pytest.raises(StorageError, match="no Secret keys"):
        (await read(accesses)).open("s3://bucket/stack/cell-0")


async def test_no_secret_is_ever_shown(kube: FakeKube) -> None:
    secret = base64.b64encode(b"very-secret").decode()
    data = {"AWS_ACCESS_KEY_ID": secret, "AWS_SECRET_ACCESS_KEY": secret}
    kube.put(SECRETS, NS, {"metadata": {"name": "keys"}, "data": data})
    storage = StackStorage(kube, NS)
    await storage.tend(SPEC, "s3://bucket/stack")
    storage.close()
    assert "very-secret" not in repr(vars(storage))


def test_what_is_wrong_with_a_storage_is_listed_once() -> None:
    assert {problem.value for problem in StorageProblem}.isdisjoint(reason.value for reason in ConditionReason)


@pytest.mark.parametrize(
    ("error", "found"), [(None, "cluster-uid"), (403, None), (404, None), (500, "raises"), (0, "raises")]
)
async def test_s6_the_cluster_is_known_by_its_first_namespace(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch, error: int | None, found: str | None
) -> None:
    kube.put(NAMESPACES, None, {"metadata": {"name": "kube-system", "uid": "cluster-uid"}})  # type: ignore[arg-type]

    async def refuse(*_: Any) -> Any:
        raise KubeError(error or 0, "no")

    if error is not None:
        monkeypatch.setattr(kube, "get", refuse)
    if found == "raises":
        with pytest.raises(KubeError):
            await cluster_id(kube)
    else:
        assert await cluster_id(kube) == found


async def test_a_pass_that_waits_for_a_slow_bucket_is_not_stuck_while_that_answers(
    kube: FakeKube, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Such as one that verifies a large checkpoint before it is restored: a restart would not help."""
    clock = [0.0]
    keys = {"AWS_ACCESS_KEY_ID": "a2V5", "AWS_SECRET_ACCESS_KEY": "a2V5"}
    kube.put(SECRETS, NS, {"metadata": {"name": "keys"}, "data": keys})
    monkeypatch.setattr(storage_module, "open_store", lambda *_: DirectoryStore(tmp_path))
    async with httpx.AsyncClient() as http:
        cache = Cache(PodTransport(httpx.MockTransport(lambda _: httpx.Response(200))))
        services = Services(kube, cache, Events(kube), http, "gym-system", lambda: clock[0], lambda: clock[0])
        worker = StackWorker(services, Key(NS, "demo"), STACK_UID, asyncio.Semaphore())
        fleet = Fleet(services)
        fleet._workers[worker.key] = (worker, asyncio.create_task(asyncio.sleep(0)))
        await worker._storage.tend(SPEC, "s3://bucket/stack/cell-0")
        probing = worker._storage._probe
        assert probing is not None
        await probing  # it uses the bucket too
        store = worker._storage.open("s3://bucket/stack/cell-0")
        uses: list[Callable[[], object]] = [
            lambda: store.create("key", b"1"),
            lambda: store.replace("hint", b"1"),
            lambda: store.get("key"),
            lambda: store.fingerprint("key"),
            lambda: store.list(""),
        ]
        worker.pass_began = clock[0]
        for use in uses:
            clock[0] += STUCK_SECONDS + 1
            assert fleet.health()["stuck"] == ["team/demo"]
            await asyncio.to_thread(use)
            assert fleet.health()["stuck"] == []
        clock[0] += STUCK_SECONDS + 1
        with pytest.raises(StorageError):
            store.get("none")  # no answer, no progress
        assert fleet.health()["stuck"] == ["team/demo"]
        worker.pass_began = None
        store.get("key")
        assert worker.pass_began is None
        worker._storage.close()


async def test_a_directory_is_probed_by_writing(kube: FakeKube, tmp_path: Any) -> None:
    storage = StackStorage(kube, NS)
    root = str(tmp_path / "stack")
    await storage.tend(StorageSpec(directory=str(tmp_path)), root)
    assert storage.state.ok is None
    await until(lambda: storage.state.ok is not None)
    assert storage.state.ok
    storage.failed(StorageError("the disk is full"))
    assert (storage.state.ok, storage.state.message) == (False, "the disk is full")


# ---- events -----------------------------------------------------------------------------------------------


async def test_an_event_is_said_once_in_a_while(kube: FakeKube) -> None:
    now = [0.0]
    events = Events(kube, lambda: now[0])
    posting = asyncio.create_task(events.run())
    subject = Subject("GymStack", NS, "demo", STACK_UID)
    for _ in range(3):
        events.say(subject, "Warning", "Recovering", "env is gone")
    events.say(subject, "Warning", "Recovering", "agent is gone")
    now[0] = 301.0
    events.say(subject, "Warning", "Recovering", "env is gone")
    await until(lambda: len(posted(kube)) == 3)
    posting.cancel()
    assert [each["message"] for each in posted(kube)] == ["env is gone", "agent is gone", "env is gone"]
    assert posted(kube)[0]["involvedObject"]["uid"] == STACK_UID


async def test_an_event_that_cannot_be_posted_costs_nothing(kube: FakeKube) -> None:
    tried = asyncio.Event()

    def refuse(verb: str, resource: Resource, name: str) -> None:
        tried.set()
        raise Conflict(409, "no")

    kube.before_write = refuse
    events = Events(kube)
    posting = asyncio.create_task(events.run())
    events.say(Subject("GymStack", NS, "demo", STACK_UID), "Normal", "Recovered", "it runs")
    await tried.wait()
    assert not posting.done()
    posting.cancel()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)


def posted(kube: FakeKube) -> list[dict[str, Any]]:
    return [body for (resource, _, _), body in kube.objects.items() if resource == EVENTS]
