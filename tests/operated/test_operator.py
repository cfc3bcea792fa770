"""The operator's workers over a whole stack in one event loop: real servers, a fake API server, virtual time."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects.kube import CHECKPOINTS, EVENTS, PODS, SECRETS, STACKS
from gym_operator.effects.storage import StackStorage
from gym_operator.rules.cell_record import from_document
from gym_rig.cell import COOKIES, IDENTITY, LONGEST_SECONDS, TOKEN
from gym_rig.fake_kube import FakeKube
from gym_rig.operated import OperatedRig, operated
from gym_rig.virtual import now
from gym_rig.writes import at_any_write
from gym_servers.coordination import checkpoint as taking
from gym_servers.engine.rows import counter_rows
from gym_servers.local.demo import account_of
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.ownership import Owner, claim
from gym_servers.storage.store import ObjectMissing, StorageError

ROWS = 6


def rows(count: int = ROWS) -> Any:
    return counter_rows(count, 1)


async def under_way(rig: OperatedRig) -> None:
    await rig.until(rig.in_service, "in service")
    await rig.until(lambda: rig.cell.effects() >= 2, "tools were called")


async def taken(rig: OperatedRig, name: str) -> dict[str, Any]:
    rig.checkpoint(name)
    await rig.until(lambda: rig.final(name), f"{name} is final")
    return rig.status(CHECKPOINTS, name)


async def to_the_end(rig: OperatedRig) -> None:
    """Every rollout has one row, and no tool effect of the surviving history happened twice or not at all."""
    await rig.until(rig.complete, "complete")
    record = from_document(rig.record())
    assert record is not None
    counted = account_of(rig.cell.folder, record, ROWS)
    assert counted.ok, counted.problems


async def test_a_collection_runs_to_its_end(tmp_path: Path) -> None:
    async with operated(tmp_path, rows()) as rig:
        await to_the_end(rig)
        status = rig.status()
        assert status["cells"][0]["collection"] == {"expected": ROWS, "rows": ROWS, "failed": 0, "complete": True}
        assert rig.conditions()["Ready"]["reason"] == "CollectionComplete"
        assert rig.conditions()["StorageReady"]["status"] == "True"
        assert {each["phase"] for each in status["cells"][0]["participants"]} == {"idle"}


async def test_a_deleted_pod_is_recovered_from_the_checkpoint(tmp_path: Path) -> None:
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        status = await taken(rig, "one")
        assert status["phase"] == "Succeeded", status
        assert rig.status()["lastCheckpoint"]["name"] == "one" or await rig.until(
            lambda: rig.status()["lastCheckpoint"]["name"] == "one"
        )
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        recovery = rig.status()["cells"][0]["recoveries"][-1]
        assert recovery["checkpoint"] == status["checkpointID"]
        assert recovery["reason"] == "agent is gone"
        await to_the_end(rig)


async def test_a_container_that_dies_in_place_is_recovered(tmp_path: Path) -> None:
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        pods = {name: body["metadata"]["uid"] for (kind, _, name), body in rig.kube.objects.items() if kind == PODS}
        rig.cell.kill("env")
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert "OOMKilled, exit code 137" in rig.status()["cells"][0]["recoveries"][-1]["reason"]
        fresh = {name: body["metadata"]["uid"] for (kind, _, name), body in rig.kube.objects.items() if kind == PODS}
        assert all(fresh[name] != uid for name, uid in pods.items() if name != "rig-env-0")
        await to_the_end(rig)


@at_any_write(12)
async def test_an_operator_killed_at_any_write_of_a_checkpoint(tmp_path: Path, write: int, after: bool) -> None:
    """SIGKILL at any point ends in a final checkpoint that says what storage says, participants in service, and a
    next checkpoint that works."""
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        await rig.replace_operator(
            write,
            lambda: rig.checkpoint("torn"),
            after=after,
            ended=lambda: rig.complete() or rig.final("torn"),
        )
        await rig.until(lambda: rig.final("torn"), "final")
        torn = rig.status(CHECKPOINTS, "torn")
        assert torn["phase"] in ("Succeeded", "Failed")
        assert (torn["phase"] == "Succeeded") == published(torn), torn
        assert (await taken(rig, "next"))["phase"] == "Succeeded"
        assert "open" not in rig.record()
        assert rig.record().get("attempt", 0) == 0, "nobody died"
        await to_the_end(rig)
        assert rig.phases() == {"idle"}


def published(status: dict[str, Any]) -> bool:
    if "uri" not in status:
        return False
    try:
        return read_publication(open_store(status["uri"]).get(CHECKPOINT)).state == "published"
    except ObjectMissing:
        return False


@pytest.mark.parametrize("lands", ["at once", "late"])
@pytest.mark.parametrize("phase", ["Preparing", "Committing", "Publishing"])
async def test_a_death_during_a_slow_write_of_a_checkpoints_status_delays_nothing_and_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, lands: str
) -> None:
    """The API server takes a second to answer, and has done what was asked at its beginning or at its end."""
    original, died = FakeKube.replace_status, asyncio.Event()
    async with operated(tmp_path, rows()) as rig:

        async def slow(self: FakeKube, resource: Any, namespace: str, body: Any) -> Any:
            if resource != CHECKPOINTS or body["status"].get("phase") != phase or died.is_set():
                return await original(self, resource, namespace, body)
            died.set()
            written = await original(self, resource, namespace, body) if lands == "at once" else None
            rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
            await asyncio.sleep(1)
            return written or await original(self, resource, namespace, body)

        monkeypatch.setattr(FakeKube, "replace_status", slow)
        await under_way(rig)
        rig.checkpoint("one")
        await rig.until(died.is_set, "the agent died")
        began = now()
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert now() - began < 10
        await rig.until(lambda: rig.final("one"), "final")
        status = rig.status(CHECKPOINTS, "one")
        assert (status["phase"] == "Succeeded") == published(status) == (phase == "Publishing"), status
        restored = rig.status()["cells"][0]["recoveries"][-1].get("checkpoint")
        assert restored == (status["checkpointID"] if phase == "Publishing" else None)


@pytest.mark.parametrize("document", [b"", b"not JSON", b"{}", b'{"format":2}', b"\xff\xfe\x00"])
async def test_k10_a_publication_that_cannot_be_read_ends_its_checkpoint_and_not_the_queue(
    tmp_path: Path, document: bytes
) -> None:
    """Such as one that a newer operator wrote before it was taken back."""
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        rig.checkpoint("torn")
        await rig.reaches("torn", "Publishing")
        rig.kill_operator()
        folder = Path(rig.status(CHECKPOINTS, "torn")["uri"])
        (folder / CHECKPOINT).unlink(missing_ok=True)
        (folder / CHECKPOINT).write_bytes(document)
        rig.start_operator()
        assert (await taken(rig, "next"))["phase"] == "Succeeded"
        status = rig.status(CHECKPOINTS, "torn")
        assert (status["phase"], status["reason"]) == ("Failed", "OperatorRestarted")
        assert "not of a format this version reads" in status["message"]
        await to_the_end(rig)


async def test_a_publication_whose_answer_was_lost_succeeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, lost = DirectoryStore.create, False

    def create(self: DirectoryStore, key: str, data: bytes) -> None:
        nonlocal lost
        original(self, key, data)
        if key.endswith(CHECKPOINT) and not lost:
            lost = True
            raise StorageError("the bucket does not answer")

    monkeypatch.setattr(DirectoryStore, "create", create)
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        status = await taken(rig, "one")
        assert (lost, status["phase"], published(status)) == (True, "Succeeded", True)


@at_any_write(14)
async def test_an_operator_killed_at_any_write_of_a_recovery(tmp_path: Path, write: int, after: bool) -> None:
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        await rig.replace_operator(
            write,
            lambda: rig.kube.remove(PODS, IDENTITY.namespace, "rig-counter-0"),
            after=after,
            ended=rig.complete,
        )
        await rig.until(lambda: rig.in_service(1), "recovered")
        await to_the_end(rig)
        attempts = [recovery["attempt"] for recovery in rig.status()["cells"][0]["recoveries"]]
        assert attempts == sorted(set(attempts))


async def test_a_stack_deleted_in_a_checkpoint_lets_go(tmp_path: Path) -> None:
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        rig.checkpoint("lost")
        await rig.reaches("lost", "Preparing")
        rig.kube.remove(STACKS, IDENTITY.namespace, IDENTITY.name)
        await rig.until(lambda: rig.final("lost"), "final")
        assert rig.status(CHECKPOINTS, "lost")["phase"] == "Failed"


async def test_a_deleted_checkpoint_is_given_up(tmp_path: Path) -> None:
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        rig.checkpoint("unwanted")
        await rig.reaches("unwanted", "Preparing")
        uri = rig.status(CHECKPOINTS, "unwanted")["uri"]
        rig.kube.remove(CHECKPOINTS, IDENTITY.namespace, "unwanted")
        await rig.until(lambda: "open" not in rig.record(), "settled")
        assert not published({"uri": uri})
        assert (await taken(rig, "next"))["phase"] == "Succeeded"


async def test_checkpoints_are_taken_one_after_the_other(tmp_path: Path) -> None:
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        for name in ("c", "a", "b"):  # of one second: their names decide
            rig.checkpoint(name)
        await rig.until(lambda: all(rig.final(name) for name in "abc"), "all final")
        places = [rig.status(CHECKPOINTS, name)["uri"].rsplit("/", 1)[1][7:13] for name in "abc"]
        assert places == ["000001", "000002", "000003"]


@pytest.mark.parametrize("limit", [5, 0])
async def test_a_suspended_stack_continues(tmp_path: Path, limit: int) -> None:
    """To go on was asked for: that is no failed recovery."""
    async with operated(tmp_path, rows(), recovery={"backoffLimit": limit}) as rig:
        await under_way(rig)
        kept = await taken(rig, "kept")
        rig.change(suspend=True)
        await rig.until(lambda: rig.status()["phase"] == "Suspended", "suspended")
        await rig.until(lambda: not any(kind == PODS for kind, _, _ in rig.kube.objects), "no pods")
        rig.change(suspend=False)
        await rig.until(lambda: rig.in_service(1), "in service again")
        assert rig.status()["cells"][0]["recoveries"][-1]["checkpoint"] == kept["checkpointID"]
        await to_the_end(rig)


async def test_a_stack_that_has_given_up_is_tried_again_when_asked(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), recovery={"backoffLimit": 0}) as rig:
        await under_way(rig)
        rig.cell.kill("agent")
        await rig.until(lambda: rig.status()["phase"] == "Failed", "given up")
        assert rig.conditions()["Stalled"]["reason"] == "BackoffLimitExceeded"
        rig.change(recovery={"backoffLimit": 1})
        await rig.until(lambda: rig.in_service(1), "in service again")
        assert rig.conditions()["Stalled"]["status"] == "False"


async def test_without_checkpoints_readiness_is_the_pods_own(tmp_path: Path) -> None:
    checkpoints = {"enabled": False, "storage": {"directory": str(tmp_path / "checkpoints")}}
    async with operated(tmp_path, rows(), checkpoints=checkpoints) as rig:
        await rig.until(lambda: rig.conditions().get("Ready", {}).get("status") == "True", "ready")
        refused = await taken(rig, "any")
        assert refused["reason"] == "CheckpointsDisabled"
        assert "Checkpointing" not in rig.conditions()


async def test_a_checkpoint_without_its_stack_fails_in_time(tmp_path: Path) -> None:
    async with operated(tmp_path, rows()) as rig:
        rig.checkpoint("astray", stackRef={"name": "other"})
        await rig.until(lambda: rig.status(CHECKPOINTS, "astray").get("phase") == "Pending", "held")
        await rig.until(lambda: rig.final("astray"), "final")
        assert rig.status(CHECKPOINTS, "astray")["reason"] == "StackNotFound"


async def test_a_stopped_operator_gives_up_what_it_takes(tmp_path: Path) -> None:
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        rig.checkpoint("stopped")
        await rig.reaches("stopped", "Preparing")
        await rig.stop_operator()
        assert rig.status(CHECKPOINTS, "stopped")["reason"] == "OperatorStopped"
        assert rig.phases() == {"idle"}


async def test_a_second_operator_is_noticed(tmp_path: Path) -> None:
    """Two at once, which nothing but a mistake brings about, do no harm: each write rests on what it knows."""
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        first = rig.start_another_operator()
        assert (await taken(rig, "one"))["phase"] in ("Succeeded", "Failed")
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        first.kill()
        await to_the_end(rig)


async def test_an_operator_that_was_taken_over_from_lets_the_checkpoint_of_its_successor_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on looking, as one does that was cut off from the API server for a while: what it finds closed is
    closed by a checkpoint that it knows nothing of."""
    original, begun = FakeKube.replace_status, asyncio.Event()

    async def slow(self: FakeKube, resource: Any, namespace: str, body: Any) -> Any:
        written = await original(self, resource, namespace, body)
        if resource == CHECKPOINTS and body["status"].get("phase") == "Committing" and not begun.is_set():
            begun.set()
            await asyncio.sleep(5)  # longer than its looks are apart, shorter than a status may take
        return written

    monkeypatch.setattr(FakeKube, "replace_status", slow)
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        first = rig.operator
        assert first is not None
        rig.start_operator()  # its watches tell the second one alone from now on
        await asyncio.sleep(2)
        status = await taken(rig, "one")
        assert begun.is_set()
        assert status["phase"] == "Succeeded", status
        assert rig.phases() == {"idle"}
        first.kill()
        await to_the_end(rig)


@pytest.mark.parametrize("landed", [True, False])
async def test_a_checkpoint_is_final_only_when_storage_has_been_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    """The publication gets no answer, and storage is away for the tombstone: nobody knows yet which stands."""
    original, answers = DirectoryStore.create, ["lost" if landed else "away", "away"]

    def create(self: DirectoryStore, key: str, data: bytes) -> None:
        answer = answers.pop(0) if answers and key.endswith(CHECKPOINT) else ""
        if answer != "away":
            original(self, key, data)
        if answer:
            raise StorageError("no answer")

    monkeypatch.setattr(DirectoryStore, "create", create)
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        status = await taken(rig, "one")
        stands = read_publication(open_store(status["uri"]).get(CHECKPOINT)).state
        assert (status["phase"], stands) == (("Succeeded", "published") if landed else ("Failed", "abandoned"))
        assert landed or status["reason"] == "StorageError"
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await to_the_end(rig)
        assert rig.status()["cells"][0]["recoveries"][-1].get("checkpoint") == (
            status["checkpointID"] if landed else None
        )


async def test_a_storage_that_lets_second_writes_through_takes_no_checkpoint_and_costs_no_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectoryStore, "create", DirectoryStore.replace)
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        await rig.until(lambda: rig.conditions()["StorageReady"]["status"] == "False", "found out")
        assert rig.conditions()["StorageReady"]["reason"] == "CreateOnlyUnsupported"
        status = await taken(rig, "unsafe")
        assert (status["phase"], status["reason"]) == ("Failed", "CreateOnlyUnsupported")
        assert "uri" not in status, "it was never begun"
        await to_the_end(rig)


async def test_no_checkpoint_begins_before_the_storage_is_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved, look = asyncio.Event(), StackStorage._look

    async def slow(self: StackStorage) -> None:
        await proved.wait()
        await look(self)

    monkeypatch.setattr(StackStorage, "_look", slow)
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        rig.checkpoint("early")
        await rig.until(lambda: rig.status(CHECKPOINTS, "early").get("phase") == "Pending", "held")
        assert rig.status(CHECKPOINTS, "early")["reason"] == "StorageUnproved"
        proved.set()
        await rig.until(lambda: rig.final("early"), "final")
        assert rig.status(CHECKPOINTS, "early")["phase"] == "Succeeded"


async def test_s6_a_stack_of_another_cluster_s_copy_takes_no_checkpoint(tmp_path: Path) -> None:
    async with operated(tmp_path, rows()) as rig:
        marker = DirectoryStore(Path(rig.cell.root).parent)
        claim(marker, Owner(cluster="another", stack_uid=IDENTITY.uid, namespace="local", name="rig"))
        assert rig.operator is not None
        rig.kill_operator()
        rig.start_operator(cluster="ours")
        await under_way(rig)
        await rig.until(lambda: rig.conditions()["StorageReady"]["status"] == "False", "found out")
        assert rig.conditions()["StorageReady"]["reason"] == "OwnedByAnother"
        assert (await taken(rig, "astray"))["reason"] == "OwnedByAnother"


async def test_the_control_token_is_rotated_under_an_operator_at_work_and_nobody_tells_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The processes of the rig know the old one alone, as pods whose kubelet has not come by."""
    caplog.set_level(logging.DEBUG)
    async with operated(tmp_path, rows()) as rig:
        await under_way(rig)
        secret = rig.kube.objects[SECRETS, IDENTITY.namespace, "rig-control"]["data"]
        rotated = {
            "control-token": base64.b64encode(b"another-that-nobody-tells").decode(),
            "control-token-previous": secret["control-token"],
        }
        rig.kube.set(SECRETS, IDENTITY.namespace, "rig-control", data={**secret, **rotated})
        rig.kill_operator()
        rig.start_operator()  # it knows the new Secret from its first moment
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        assert rig.record().get("attempt", 0) == 0
        await to_the_end(rig)
        told = [body if kind == EVENTS else body.get("status") for (kind, _, _), body in rig.kube.objects.items()]
        everything = f"{caplog.text} {json.dumps(told)}"
        assert "rig" in everything and "another-that-nobody-tells" not in everything
        for known in (TOKEN, COOKIES, *secret.values(), *rotated.values()):
            assert known not in everything


@pytest.mark.parametrize("during", ["its publication", "its tombstone", "its resume"])
async def test_c2_an_operator_that_is_stopped_while_a_death_ends_a_checkpoint_says_what_storage_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    """The death breaks it off once, the stop a second time, wherever it is by then; the next operator finishes it."""
    async with operated(tmp_path, rows()) as rig:
        to_thread, resume, renew = asyncio.to_thread, taking.Checkpoint._resume, taking.Checkpoint._renew_once
        died, ending = False, asyncio.Event()

        async def dies() -> None:
            nonlocal died
            died = True
            rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
            await asyncio.sleep(30)

        async def stops() -> None:
            ending.set()
            await asyncio.sleep(30)

        async def slow(work: Any, *arguments: Any) -> Any:
            if work is taking.settle and during == "its publication" and not ending.is_set():
                await (stops() if died else dies())
            if work is taking.give_up and during == "its tombstone" and not ending.is_set():
                await stops()
            return await to_thread(work, *arguments)

        async def resume_slowly(self: Any, *arguments: Any) -> Any:
            if during == "its resume" and not ending.is_set():
                await stops()
            return await resume(self, *arguments)

        async def renew_slowly(self: Any) -> None:
            if during != "its publication" and not died:
                await dies()
            await renew(self)

        monkeypatch.setattr(asyncio, "to_thread", slow)
        monkeypatch.setattr(taking.Checkpoint, "_resume", resume_slowly)
        monkeypatch.setattr(taking.Checkpoint, "_renew_once", renew_slowly)
        await under_way(rig)
        rig.checkpoint("torn")
        await asyncio.wait_for(ending.wait(), LONGEST_SECONDS)
        await rig.stop_operator()
        assert not rig.final("torn"), "nobody knows yet what stands"
        rig.start_operator()
        await rig.until(lambda: rig.final("torn"), "final")
        status = rig.status(CHECKPOINTS, "torn")
        assert (status["phase"] == "Succeeded") == published(status) == (during == "its publication"), status
        await to_the_end(rig)
        assert "open" not in rig.record()
        assert published(status) == (during == "its publication")


async def test_k16_what_the_operator_writes_beside_settings_does_not_grow_with_a_spec(tmp_path: Path) -> None:
    """Annotations and status are bounded by far less than a spec is. The framework that watches for the operator is
    not here: tests/cluster/test_operator.py sees that it writes nothing."""
    servers = [
        {"name": "env", "kind": "environment", "server": "single-agent-turn"},
        {"name": "policy", "kind": "model", "server": "scripted"},
        {"name": "agent", "kind": "agent", "server": "simple-agent", "config": {"prompt": "long " * 100_000}},
        {"name": "counter", "kind": "resources", "server": "counter"},
    ]
    async with operated(tmp_path, rows(), servers=servers) as rig:
        await under_way(rig)
        assert (await taken(rig, "one"))["phase"] == "Succeeded"
        for body in rig.kube.objects.values():
            metadata, status = body["metadata"], body.get("status") or {}
            assert len(json.dumps([metadata.get("annotations"), status])) < 20_000, metadata["name"]
        await to_the_end(rig)
