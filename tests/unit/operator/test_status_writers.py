"""What the operator writes of a status: nothing over what somebody else has written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_operator.api.checkpoint import CheckpointStatus
from gym_operator.api.restore import RestoreStatus
from gym_operator.api.schedule import ScheduleStatus
from gym_operator.api.stack import StackStatus
from gym_operator.effects import checkpoint_part as parts
from gym_operator.effects.kube import CHECKPOINTS, STACKS, KubeError
from gym_operator.effects.status_writers import (
    CheckpointWriter,
    Gone,
    RestoreWriter,
    ScheduleWriter,
    StackWriter,
    Superseded,
)
from gym_operator.rules import checkpoint_phases as phases
from gym_rig.edges import NS, STACK_UID
from gym_rig.fake_kube import FakeKube
from gym_servers.coordination.checkpoint import Request, tombstone
from gym_servers.coordination.record import CellRecord, OpenCheckpoint, Stage
from gym_servers.storage.cells import settle
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import StorageError, StorageProblem


def stack(kube: FakeKube) -> StackWriter:
    kube.put(STACKS, NS, {"metadata": {"name": "demo", "uid": STACK_UID}, "spec": {}})
    return StackWriter(kube, NS, "demo", STACK_UID)


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
