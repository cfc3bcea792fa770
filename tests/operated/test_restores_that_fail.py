"""GymRestores under a whole operator that cannot be done: each is refused or given up in time, says why, and blocks
nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects.kube import CHECKPOINTS, PODS, RESTORES, STACKS, Body, Resource
from gym_operator.effects.restores import Restores
from gym_rig.cell import IDENTITY
from gym_rig.collecting import SLOWLY, rows
from gym_rig.operated import OperatedRig, operated
from gym_rig.restoring import final, restore, sources, sources_of, taken, to_the_end
from gym_rig.virtual import now
from gym_servers.control.plane import ControlPlane
from gym_servers.coordination.controller import CellController
from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.manifest import CHECKPOINT, read_publication


def chosen_by(rig: OperatedRig, cell: int) -> str | None:
    by: str | None = (rig.record(cell).get("chosen") or {}).get("by")
    return by


# ---- what is waited for ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [{"checkpointRef": {"name": "coming"}}, {"labels": {"step": "1"}}])
async def test_k9_a_checkpoint_that_is_not_complete_is_waited_for(tmp_path: Path, source: dict[str, Any]) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        rig.pods_may_start = False
        rig.checkpoint("coming", labels={"step": "1"})
        restore(rig, **source)
        await rig.until(lambda: rig.status(RESTORES, "back").get("reason") == "CheckpointNotReady", "it waits")
        await asyncio.sleep(200)
        assert rig.status(RESTORES, "back")["phase"] == "Pending"
        rig.pods_may_start = True
        status = await final(rig, "back", "Succeeded")
        assert status["checkpoint"]["id"] == rig.status(CHECKPOINTS, "coming")["checkpointID"]


async def test_k9_k10_one_whose_checkpoint_never_comes_is_not_waited_for(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        rig.kill_operator()  # so that nothing of it begins
        rig.checkpoint("coming")
        restore(rig, "a", checkpointRef={"name": "coming"})
        restore(rig, "b", checkpointRef={"name": "first"})
        told = rig.kube.before_write

        def end_it(verb: str, resource: Any, name: str) -> None:
            if (verb, resource, name) == ("status", RESTORES, "a"):
                rig.kube.before_write = told
                rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, "coming")

        rig.kube.before_write = end_it
        rig.start_operator()
        assert (await final(rig, "a", "Failed"))["reason"] == "CheckpointNotFound"
        await final(rig, "b", "Succeeded")
        assert sources(rig) == [first["checkpointID"]]


async def test_k10_one_that_is_deleted_while_it_waits_blocks_nobody(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        began = now()
        restore(rig, "a", checkpointRef={"name": "nobody"})
        restore(rig, "b", checkpointRef={"name": "first"})
        await rig.until(lambda: rig.status(RESTORES, "a").get("reason") == "CheckpointNotFound", "it waits")
        assert not rig.status(RESTORES, "b").get("phase")
        rig.kube.let_go(RESTORES, IDENTITY.namespace, "a")
        await final(rig, "b", "Succeeded")
        assert now() - began < 60, "sooner than the first would have been given up"
        assert sources(rig) == [first["checkpointID"]]


# ---- what cannot be restored -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ({"checkpointRef": {"name": "nobody"}}, "CheckpointNotFound"),
        ({"labels": {"step": "1"}}, "CheckpointNotFound"),
        ({"checkpointRef": {"name": "failed"}}, "CheckpointFailed"),
    ],
)
async def test_k10_one_that_cannot_be_restored_fails_in_time_and_the_next_one_runs(
    tmp_path: Path, source: dict[str, Any], reason: str
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        rig.checkpoint("failed", timeouts={"prepare": "never"})
        await rig.until(lambda: rig.final("failed"), "failed")
        restore(rig, "a", **source)
        restore(rig, "b", checkpointRef={"name": "first"})
        assert (await final(rig, "a", "Failed"))["reason"] == reason
        await final(rig, "b", "Succeeded")
        assert sources(rig) == [first["checkpointID"]]
        stalled = next(each for each in rig.status(RESTORES, "a")["conditions"] if each["type"] == "Stalled")
        assert stalled["status"] == "True"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda place: (place / CHECKPOINT).unlink(), "checkpoint.json is not there"),
        (lambda place: (place / CHECKPOINT).write_text("{}"), "not the one with this digest"),
        (lambda place: next(place.rglob("manifest.json")).unlink(), "has no manifest"),
        (lambda place: next(place.rglob("pack*")).write_bytes(b"x"), "does not match its digest"),
    ],
)
async def test_k11_what_is_not_whole_is_refused_before_any_server_is_disturbed(
    tmp_path: Path, harm: Callable[[Path], object], says: str
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        await taken(rig, "second")
        pods = {body["metadata"]["uid"] for (kind, _, _), body in rig.kube.objects.items() if kind == PODS}
        harm(Path(first["uri"]))
        restore(rig, checkpointRef={"name": "first"})
        status = await final(rig, "back", "Failed")
        assert (status["reason"], says in status["message"]) == ("SourceInvalid", True), status
        assert pods == {body["metadata"]["uid"] for (kind, _, _), body in rig.kube.objects.items() if kind == PODS}
        assert rig.in_service()
        await to_the_end(rig)


async def test_k11_records_without_their_server_are_refused(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        place = Path(first["uri"])
        publication = read_publication((place / CHECKPOINT).read_bytes())
        fewer = [member for member in publication.members if member.kind != "resources"]
        document = publication.model_copy(update={"members": fewer}).to_bytes()
        (place / CHECKPOINT).write_bytes(document)
        restore(rig, uri=first["uri"], digest=sha256(document))
        status = await final(rig, "back", "Failed")
        assert status["reason"] == "Misfit"
        assert "no records of counter" in status["message"]
        assert rig.in_service()


async def test_records_that_the_servers_refuse_lead_back_to_the_stacks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole by its digests, and yet of a format that a server does not read: only the server can tell."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        second = await taken(rig, "second")
        place = Path(first["uri"])
        publication = read_publication((place / CHECKPOINT).read_bytes())
        manifest = place / "agent" / "agent" / "manifest.json"
        document = manifest.read_text().replace('"record_format":1', '"record_format":9')
        assert document != manifest.read_text()
        manifest.write_text(document)
        members = [
            member.model_copy(update={"manifest_digest": sha256(document.encode())})
            if member.kind == "agent"
            else member
            for member in publication.members
        ]
        published = publication.model_copy(update={"members": members}).to_bytes()
        (place / CHECKPOINT).write_bytes(published)
        restore(rig, uri=first["uri"], digest=sha256(published))
        status = await final(rig, "back", "Failed")
        assert status["reason"] == "RecordsRefused"
        await rig.until(lambda: rig.in_service(2), "back in service")
        assert sources(rig) == [first["checkpointID"], second["checkpointID"]]
        told = rig.conditions()["Recovering"]["message"]
        assert told.startswith("attempt 2 continues from checkpoint second; checkpoint first was refused: agent"), (
            told
        )
        assert "record_format" in told or "format" in told, told
        await to_the_end(rig)


@pytest.mark.parametrize("stacks_limit", [100, 1])
async def test_k10_bounded_retries_give_it_up_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stacks_limit: int
) -> None:
    original, broken = ControlPlane.restore, ""

    async def fails(self: ControlPlane, request: Any) -> Any:
        if self.author.instance == "agent" and request.checkpoint_dir == broken:
            raise ProtocolError("checkpoint_error", "its sandbox does not start")
        return await original(self, request)

    monkeypatch.setattr(ControlPlane, "restore", fails)
    async with operated(tmp_path, rows(), rate=SLOWLY, recovery={"backoffLimit": stacks_limit}) as rig:
        first = await taken(rig, "first")
        second = await taken(rig, "second")
        broken = first["uri"]
        restore(rig, "a", checkpointRef={"name": "first"}, backoffLimit=2)
        status = await final(rig, "a", "Failed")
        assert status["reason"] == "BackoffLimitExceeded"
        await rig.until(rig.in_service, "back in service")
        tries = min(3, stacks_limit + 1)
        assert sources(rig)[:tries] == [first["checkpointID"]] * tries
        assert sources(rig)[-1] == second["checkpointID"]
        assert "chosen" not in rig.record()
        broken = ""
        restore(rig, "b", checkpointRef={"name": "first"})
        await final(rig, "b", "Succeeded")
        await to_the_end(rig)


async def test_k10_a_deleted_restore_blocks_nobody(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        second = await taken(rig, "second")
        restore(rig, "a", checkpointRef={"name": "first"})
        await rig.until(lambda: rig.record().get("attempt") == 1, "it has begun")
        rig.pods_may_start = False
        await asyncio.sleep(5)
        restore(rig, "b", checkpointRef={"name": "second"})
        rig.kube.let_go(RESTORES, IDENTITY.namespace, "a")
        await asyncio.sleep(5)
        rig.pods_may_start = True
        await final(rig, "b", "Succeeded")
        assert sources(rig) == [first["checkpointID"], second["checkpointID"]]
        await to_the_end(rig)


# ---- several cells -----------------------------------------------------------------------------------------


async def test_k10_where_one_cell_cannot_be_restored_all_go_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, broken = ControlPlane.restore, ""

    async def fails(self: ControlPlane, request: Any) -> Any:
        if self.author.instance == "agent" and request.checkpoint_dir == broken:
            raise ProtocolError("checkpoint_error", "its sandbox does not start")
        return await original(self, request)

    monkeypatch.setattr(ControlPlane, "restore", fails)
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=2) as rig:
        await rig.until(rig.all_in_service, "in service")
        first = await taken(rig, "first")
        second = await taken(rig, "second")
        broken = first["cells"][1]["uri"]
        restore(rig, checkpointRef={"name": "first"}, backoffLimit=1)
        assert (await final(rig, "back", "Failed"))["reason"] == "BackoffLimitExceeded"
        await rig.until(lambda: not chosen_by(rig, 0) and not chosen_by(rig, 1), "given up")
        await rig.until(rig.all_in_service, "back in service")
        for cell in (0, 1):
            assert sources_of(rig, cell)[-1] == second["checkpointID"]
        assert sources_of(rig, 0) == [first["checkpointID"], second["checkpointID"]]
        await rig.until(rig.complete, "complete")


@pytest.mark.parametrize("told", ["at once", "late"])
async def test_k10_a_cell_that_has_not_begun_when_a_restore_fails_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str
) -> None:
    """It may be held up for long before it begins; then there is nothing any more that it should begin with."""
    fulfil, original, broken = Restores.fulfil, ControlPlane.restore, ""

    async def fails(self: ControlPlane, request: Any) -> Any:
        if self.author.instance == "agent" and request.checkpoint_dir == broken:
            raise ProtocolError("invalid_checkpoint_state", "its records are odd")
        return await original(self, request)

    monkeypatch.setattr(ControlPlane, "restore", fails)
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=2) as rig:
        await rig.until(rig.all_in_service, "in service")
        broken = (await taken(rig, "first"))["cells"][0]["uri"]
        write, failing = rig.kube.replace_status, asyncio.Event()

        async def later(self: Restores, index: int, controller: CellController) -> None:
            if index == 1:
                await failing.wait()
            await fulfil(self, index, controller)

        async def slowly(resource: Resource, namespace: str, body: Body) -> Body:
            if resource != RESTORES or body["status"].get("phase") != "Failed":
                return await write(resource, namespace, body)
            if told == "at once":
                body = await write(resource, namespace, body)
            failing.set()
            await asyncio.sleep(5)
            return body if told == "at once" else await write(resource, namespace, body)

        monkeypatch.setattr(Restores, "fulfil", later)
        rig.kube.replace_status = slowly  # type: ignore[method-assign]
        restore(rig, checkpointRef={"name": "first"})
        assert (await final(rig, "back", "Failed"))["reason"] == "RecordsRefused"
        await rig.until(rig.all_in_service, "back in service")
        await asyncio.sleep(10)
        assert sources_of(rig, 1) == []
        await rig.until(rig.complete, "complete")


async def test_k10_a_cell_that_is_taken_away_meanwhile_ends_the_restore(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=2) as rig:
        await rig.until(rig.all_in_service, "in service")
        await taken(rig, "first")
        second = await taken(rig, "second")
        rig.held_back.add(1)
        restore(rig, checkpointRef={"name": "first"})
        await rig.until(lambda: rig.in_service(1) and rig.record(1).get("attempt") == 1, "one is restored")
        rig.change(cells=1)
        assert (await final(rig, "back", "Failed"))["reason"] == "Misfit"
        await rig.until(lambda: not chosen_by(rig, 0) and rig.in_service(2), "back in service")
        assert sources_of(rig, 0)[-1] == second["checkpointID"]
        restore(rig, "next", checkpointRef={"name": "second"})
        assert (await final(rig, "next", "Failed"))["reason"] == "Misfit", "a part of a cell that is not there"
        await rig.until(rig.complete, "complete")


# ---- nothing to restore ------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed", [{"suspend": True}, {"checkpoints": {"enabled": False}}])
async def test_a_stack_that_cannot_be_restored_is_said_so(tmp_path: Path, changed: dict[str, Any]) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await taken(rig, "first")
        if "checkpoints" in changed:
            changed = {"checkpoints": {**rig.spec["checkpoints"], **changed["checkpoints"]}}
        rig.change(**changed)
        restore(rig, checkpointRef={"name": "first"})
        began = now()
        status = await final(rig, "back", "Failed")
        assert status["reason"] in ("StackNotReady", "CheckpointsDisabled")
        assert now() - began >= 60, "somebody may mend it meanwhile"


async def test_a_restore_of_no_stack_fails_in_time(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await taken(rig, "first")
        restore(rig, "astray", stackRef={"name": "nobody"}, checkpointRef={"name": "first"})
        restore(rig, "lost", checkpointRef={"name": "first"})
        rig.pods_may_start = False
        await rig.until(lambda: rig.status(RESTORES, "lost").get("phase") == "Restoring", "begun")
        rig.kube.remove(STACKS, IDENTITY.namespace, IDENTITY.name)
        for name in ("astray", "lost"):
            assert (await final(rig, name, "Failed"))["reason"] == "StackNotFound"


async def test_k4_a_checkpoint_that_is_being_deleted_is_not_restored(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await taken(rig, "first")
        found = rig.kube.objects[CHECKPOINTS, IDENTITY.namespace, "first"]
        metadata = {**found["metadata"], "finalizers": ["somebody/else"]}
        rig.kube.set(CHECKPOINTS, IDENTITY.namespace, "first", metadata=metadata)
        rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, "first")
        restore(rig, checkpointRef={"name": "first"})
        assert (await final(rig, "back", "Failed"))["reason"] == "CheckpointDeleted"
