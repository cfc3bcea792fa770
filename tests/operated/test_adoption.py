"""GymCheckpoints made of what is in storage already, under a whole operator."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_operator.api.names import DATA_FINALIZER
from gym_operator.api.restore import RESTORE_TERMINAL
from gym_operator.effects.kube import CHECKPOINTS, EVENTS, RESTORES
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_servers.engine.rows import counter_rows
from gym_servers.protocol.digests import sha256
from gym_servers.storage.cells import PROPOSAL
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.ownership import Owner, claim, owner_of
from gym_servers.storage.removal import HOLDER
from gym_servers.storage.store import StorageError

SLOWLY = 1.0


def rows() -> Any:
    return counter_rows(6, 1)


async def taken(rig: OperatedRig, name: str, **spec: Any) -> dict[str, Any]:
    await rig.until(rig.in_service, "in service")
    rig.checkpoint(name, **spec)
    return await final(rig, name, "Succeeded")


async def final(rig: OperatedRig, name: str, phase: str) -> dict[str, Any]:
    await rig.until(lambda: rig.final(name), f"{name} is final")
    status = rig.status(CHECKPOINTS, name)
    assert status["phase"] == phase, status
    return status


def adopt(rig: OperatedRig, name: str, uri: str, digest: str, **spec: Any) -> None:
    rig.checkpoint(name, source={"uri": uri, "digest": digest}, **spec)


def there(rig: OperatedRig, name: str) -> bool:
    return (CHECKPOINTS, IDENTITY.namespace, name) in rig.kube.objects


def tied(rig: OperatedRig, name: str) -> bool:
    body = rig.kube.objects[CHECKPOINTS, IDENTITY.namespace, name]
    return DATA_FINALIZER in (body["metadata"].get("finalizers") or ())


def data(uri: str) -> set[str]:
    return {path.name for path in Path(uri).rglob("*") if path.is_file()}


def said(rig: OperatedRig, reason: str) -> bool:
    return any(kind == EVENTS and body["reason"] == reason for (kind, _, _), body in rig.kube.objects.items())


def copied(uri: str, to: Path, stack_uid: str) -> tuple[str, str]:
    """A checkpoint as another stack would have taken it: its place and digest."""
    shutil.copytree(uri, to)
    for name in (HOLDER, "proposal.json"):
        (to / name).unlink()
    publication = read_publication((to / CHECKPOINT).read_bytes())
    document = publication.model_copy(update={"stack_uid": stack_uid}).to_bytes()
    (to / CHECKPOINT).write_bytes(document)
    return str(to), sha256(document)


async def test_a_checkpoint_whose_object_is_gone_gets_another(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, "one")
        adopt(rig, "again", status["uri"] + "/", status["digest"])
        again = await final(rig, "again", "Succeeded")
        same = ("stackUID", "checkpointID", "uri", "digest", "episodes", "bytes", "storage")
        assert {key: again[key] for key in same} == {key: status[key] for key in same}
        of_each = ("index", "phase", "attempt", "uri", "digest", "episodes", "bytes")
        for mine, first in zip(again["cells"], status["cells"], strict=True):
            assert {key: mine[key] for key in of_each} == {key: first[key] for key in of_each}
        assert "pauseSeconds" not in again
        assert rig.record()["sequence"] == 1, "none was taken"


async def test_k12_a_checkpoint_of_another_stack_is_adopted_by_its_digest(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        uri, digest = copied(status["uri"], tmp_path / "elsewhere" / "copied", "of-another")
        adopt(rig, "theirs", uri, digest)
        theirs = await final(rig, "theirs", "Succeeded")
        assert (theirs["stackUID"], theirs["uri"], theirs["digest"]) == ("of-another", uri, digest)
        assert rig.status()["lastCheckpoint"]["name"] == "one", "the stack continues from its own"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda place: (place / CHECKPOINT).unlink(), "checkpoint.json is not there"),
        (lambda place: (place / CHECKPOINT).write_text("{}"), "not the one with this digest"),
        (lambda place: next(place.rglob("manifest.json")).unlink(), "has no manifest"),
        (lambda place: next(place.rglob("manifest.json")).write_text("{}"), "is not the published one"),
        (lambda place: next(place.rglob("pack*")).write_bytes(b"x"), "does not match its digest"),
        (lambda place: next(place.rglob("pack*")).unlink(), "is missing"),
    ],
)
async def test_s7_what_is_not_whole_is_not_adopted(tmp_path: Path, harm: Callable[[Path], object], says: str) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        harm(Path(status["uri"]))
        adopt(rig, "harmed", status["uri"], status["digest"])
        refused = await final(rig, "harmed", "Failed")
        assert refused["reason"] == "SourceInvalid"
        assert says in refused["message"]
        stalled = next(each for each in refused["conditions"] if each["type"] == "Stalled")
        assert stalled["status"] == "True"


async def test_s7_a_tombstone_is_not_adopted(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        place = Path(status["uri"])
        abandoned = read_publication((place / CHECKPOINT).read_bytes()).model_copy(update={"state": "abandoned"})
        (place / CHECKPOINT).write_bytes(abandoned.to_bytes())
        adopt(rig, "dead", status["uri"], sha256(abandoned.to_bytes()))
        assert "given up" in (await final(rig, "dead", "Failed"))["message"]


@pytest.mark.parametrize("heals", [True, False])
async def test_storage_that_is_away_is_waited_for_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heals: bool
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        original, away = DirectoryStore.get, [True]

        def get(store: DirectoryStore, key: str) -> bytes:
            if away[0] and key == CHECKPOINT:
                raise StorageError("the bucket does not answer")
            return original(store, key)

        monkeypatch.setattr(DirectoryStore, "get", get)
        adopt(rig, "again", status["uri"], status["digest"])
        await rig.until(lambda: rig.status(CHECKPOINTS, "again").get("reason") == "StorageFailed", "said so")
        assert rig.status(CHECKPOINTS, "again")["phase"] == "Pending"
        away[0] = not heals
        await final(rig, "again", "Succeeded" if heals else "Failed")


@pytest.mark.parametrize("write", [1, 2])
@pytest.mark.parametrize("after", [False, True])
async def test_an_operator_killed_at_any_write_of_an_adoption_is_followed_by_one_that_ends_it(
    tmp_path: Path, write: int, after: bool
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        await asyncio.sleep(5)
        await rig.replace_operator(write, lambda: adopt(rig, "again", status["uri"], status["digest"]), after=after)
        await final(rig, "again", "Succeeded")
        await taken(rig, "next")


async def test_one_that_is_deleted_before_it_is_read_goes(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        rig.kill_operator()
        adopt(rig, "unwanted", status["uri"], status["digest"], deletionPolicy="Delete")
        found = rig.kube.objects[CHECKPOINTS, IDENTITY.namespace, "unwanted"]
        metadata = {**found["metadata"], "finalizers": [DATA_FINALIZER]}
        rig.kube.set(CHECKPOINTS, IDENTITY.namespace, "unwanted", metadata=metadata)
        rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, "unwanted")
        before = data(status["uri"])
        rig.start_operator()
        await rig.until(lambda: not there(rig, "unwanted"), "gone")
        assert data(status["uri"]) == before


async def test_s6_who_adopts_what_another_object_has_does_not_remove_it(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one", deletionPolicy="Delete")
        adopt(rig, "second", status["uri"], status["digest"], deletionPolicy="Delete")
        await final(rig, "second", "Succeeded")
        await rig.until(lambda: said(rig, "HeldByAnother"), "said so")
        await rig.until(lambda: tied(rig, "second"), "tied")
        before = data(status["uri"])
        rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, "second")
        await rig.until(lambda: not there(rig, "second"), "gone")
        assert data(status["uri"]) == before
        await rig.until(lambda: said(rig, "DataLeft"), "said so")
        rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, "one")
        await rig.until(lambda: not there(rig, "one"), "gone")
        assert data(status["uri"]) == set()


@pytest.mark.parametrize("later", [False, True])
async def test_s6_what_nobody_has_claimed_goes_with_who_adopts_it(tmp_path: Path, later: bool) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        uri, digest = copied(status["uri"], tmp_path / "elsewhere" / "copied", "of-another")
        adopt(rig, "theirs", uri, digest, deletionPolicy="Retain" if later else "Delete")
        await final(rig, "theirs", "Succeeded")
        if later:
            found = rig.kube.objects[CHECKPOINTS, IDENTITY.namespace, "theirs"]
            changed = {**found["spec"], "deletionPolicy": "Delete"}
            rig.kube.set(CHECKPOINTS, IDENTITY.namespace, "theirs", spec=changed)
        await rig.until(lambda: HOLDER in data(uri) and tied(rig, "theirs"), "claimed")
        rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, "theirs")
        await rig.until(lambda: not there(rig, "theirs"), "gone")
        assert data(uri) == set()
        assert CHECKPOINT in data(status["uri"])


def of_another_cluster(uri: str, root: Path, *, held: bool) -> tuple[str, str]:
    """A checkpoint as a stack of another cluster has it in a bucket that both use: its place and digest."""
    place = root / "their-uid" / "cell-0" / "checkpoints" / Path(uri).name
    shutil.copytree(uri, place)
    claim(
        DirectoryStore(root / "their-uid"),
        Owner(cluster="theirs", stack_uid="their-uid", namespace="their-ns", name="their-stack"),
    )
    if not held:  # as the last checkpoint before a roll-out
        (place / HOLDER).unlink()
    publication = read_publication((place / CHECKPOINT).read_bytes())
    document = publication.model_copy(update={"stack_uid": "their-uid", "cell_attempt": 6}).to_bytes()
    for name in (CHECKPOINT, PROPOSAL):
        (place / name).write_bytes(document)
    return str(place), sha256(document)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("held", [True, False])
async def test_s6_a_checkpoint_of_another_cluster_is_restored_from_the_bucket_alone_and_stays_that_cluster_s(
    tmp_path: Path, held: bool
) -> None:
    """Nothing of it is written or removed, whoever wants it gone here."""
    async with operated(tmp_path, rows(), rate=20.0) as rig:
        rig.kill_operator()
        rig.start_operator(cluster="ours")
        await rig.until(lambda: rig.cell.effects() >= 2, "tools were called")
        first = await taken(rig, "first")
        assert owner_of(DirectoryStore(Path(rig.cell.root).parent)).cluster == "ours"  # type: ignore[union-attr]
        uri, digest = of_another_cluster(first["uri"], tmp_path / "theirs", held=held)
        before = contents(tmp_path / "theirs")
        source = {"stackRef": {"name": IDENTITY.name}, "uri": uri, "digest": digest}
        rig.kube.put(RESTORES, IDENTITY.namespace, {"metadata": {"name": "back"}, "spec": source})
        await rig.until(lambda: rig.status(RESTORES, "back").get("phase") in RESTORE_TERMINAL, "restored")
        status = rig.status(RESTORES, "back")
        assert (status["phase"], status["checkpoint"]["stackUID"]) == ("Succeeded", "their-uid"), status
        assert (status["continuedCount"], status["cells"][0]["attempt"]) == (first["episodes"], 7)
        assert first["episodes"] > 0

        adopt(rig, "theirs", uri, digest, deletionPolicy="Delete")
        await final(rig, "theirs", "Succeeded")
        await rig.until(lambda: tied(rig, "theirs"), "tied")
        assert contents(tmp_path / "theirs") == before, "nor is it claimed"
        rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, "theirs")
        await rig.until(lambda: not there(rig, "theirs"), "gone")
        await rig.until(lambda: said(rig, "DataLeft"), "said so")
        assert contents(tmp_path / "theirs") == before
        await rig.until(rig.complete, "complete")
