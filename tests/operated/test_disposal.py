"""deletionPolicy under a whole operator: data goes with its object, only its own, and nothing is held for ever."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from gym_operator.api.names import DATA_FINALIZER
from gym_operator.effects.kube import CHECKPOINTS, EVENTS, PODS, SCHEDULES, SECRETS, STACKS
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_rig.virtual import now
from gym_servers.engine.rows import counter_rows
from gym_servers.storage.cells import PROPOSAL
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.ownership import OWNER, claim, owner_of
from gym_servers.storage.removal import HOLDER
from gym_servers.storage.store import StorageError, StorageProblem

SLOWLY = 1.0


def rows() -> Any:
    return counter_rows(6, 1)


def there(rig: OperatedRig, name: str) -> bool:
    return (CHECKPOINTS, IDENTITY.namespace, name) in rig.kube.objects


def delete(rig: OperatedRig, name: str) -> None:
    """As somebody with kubectl does."""
    rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, name)


def finalizers(rig: OperatedRig, name: str) -> list[str]:
    body = rig.kube.objects[CHECKPOINTS, IDENTITY.namespace, name]
    found: list[str] = body["metadata"].get("finalizers") or []
    return found


def data(status: dict[str, Any]) -> set[str]:
    return {path.name for path in Path(status["uri"]).rglob("*") if path.is_file()}


def said(rig: OperatedRig, reason: str) -> list[str]:
    events = [body for (kind, _, _), body in rig.kube.objects.items() if kind == EVENTS]
    return [event["message"] for event in events if event["reason"] == reason]


def change(rig: OperatedRig, name: str, **spec: Any) -> None:
    found = rig.kube.objects[CHECKPOINTS, IDENTITY.namespace, name]
    metadata = {**found["metadata"], "generation": found["metadata"]["generation"] + 1}
    rig.kube.set(CHECKPOINTS, IDENTITY.namespace, name, spec={**found["spec"], **spec}, metadata=metadata)


async def taken(rig: OperatedRig, name: str, policy: str = "Delete") -> dict[str, Any]:
    await rig.until(rig.in_service, "in service")
    rig.checkpoint(name, deletionPolicy=policy)
    await rig.until(lambda: rig.final(name), f"{name} is final")
    status = rig.status(CHECKPOINTS, name)
    assert status["phase"] == "Succeeded", status
    return status


async def test_data_goes_with_its_object_and_the_others_stay(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        kept = await taken(rig, "kept")
        status = await taken(rig, "one")
        assert status["stackUID"] == IDENTITY.uid
        assert status["storage"] == {"directory": str(tmp_path / "checkpoints")}
        assert HOLDER in data(status)
        before = data(kept)
        delete(rig, "one")
        assert there(rig, "one")
        await rig.until(lambda: not there(rig, "one"), "gone")
        assert data(status) == set()
        assert data(kept) == before
        await rig.until(lambda: said(rig, "DataRemoved"), "said so")
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert rig.status()["cells"][0]["recoveries"][-1]["checkpoint"] == kept["checkpointID"]


async def test_k15_without_the_wish_there_is_no_finalizer_and_the_data_stays(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one", "Retain")
        assert finalizers(rig, "one") == []
        before = data(status)
        delete(rig, "one")
        assert not there(rig, "one")
        await asyncio.sleep(30)
        assert data(status) == before


async def test_the_policy_can_be_changed_at_any_time(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one", "Retain")
        change(rig, "one", deletionPolicy="Delete")
        await rig.until(lambda: finalizers(rig, "one") == [DATA_FINALIZER], "tied")
        await rig.until(lambda: rig.status(CHECKPOINTS, "one")["observedGeneration"] == 2, "seen")
        change(rig, "one", deletionPolicy="Retain")
        await rig.until(lambda: finalizers(rig, "one") == [], "loose")
        await rig.until(lambda: rig.status(CHECKPOINTS, "one")["observedGeneration"] == 3, "seen")
        assert data(status)
        assert rig.status(CHECKPOINTS, "one")["phase"] == "Succeeded"


@pytest.mark.parametrize("write", [1, 2, 3])
@pytest.mark.parametrize("after", [False, True])
async def test_an_operator_killed_at_any_write_of_a_removal_is_followed_by_one_that_ends_it(
    tmp_path: Path, write: int, after: bool
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        await asyncio.sleep(5)
        await rig.replace_operator(
            write, lambda: delete(rig, "one"), after=after, ended=lambda: not there(rig, "one")
        )
        await rig.until(lambda: not there(rig, "one"), "gone")
        assert data(status) == set()
        rig.checkpoint("next")
        await rig.until(lambda: rig.final("next"), "the next one")
        assert rig.status(CHECKPOINTS, "next")["phase"] == "Succeeded"


async def test_k1_an_object_that_is_deleted_before_anybody_looked_ends(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await rig.until(rig.in_service, "in service")
        rig.kill_operator()
        body = {
            "metadata": {"name": "unseen", "finalizers": [DATA_FINALIZER]},
            "spec": {"stackRef": {"name": IDENTITY.name}, "deletionPolicy": "Delete"},
        }
        rig.kube.put(CHECKPOINTS, IDENTITY.namespace, body)
        rig.checkpoint("untied", deletionPolicy="Delete")
        astray = {**body, "metadata": {"name": "astray", "finalizers": [DATA_FINALIZER]}}
        astray["spec"] = {"stackRef": {"name": "nobody"}, "deletionPolicy": "Delete"}
        rig.kube.put(CHECKPOINTS, IDENTITY.namespace, astray)
        for name in ("unseen", "untied", "astray"):
            delete(rig, name)
        assert not there(rig, "untied")
        rig.start_operator()
        began = now()
        await rig.until(lambda: not there(rig, "unseen") and not there(rig, "astray"), "gone")
        assert now() - began < 15


@pytest.mark.parametrize("phase", ["Preparing", "Committing", "Publishing"])
async def test_one_that_is_deleted_while_it_is_taken_is_given_up_and_leaves_nothing(
    tmp_path: Path, phase: str
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await rig.until(rig.in_service, "in service")
        rig.checkpoint("unwanted", deletionPolicy="Delete")
        await rig.reaches("unwanted", phase)
        uri = rig.status(CHECKPOINTS, "unwanted")["uri"]
        delete(rig, "unwanted")
        await rig.until(lambda: not there(rig, "unwanted"), "gone")
        assert data({"uri": uri}) <= {CHECKPOINT}, "a tombstone, so that nobody publishes it later"
        await rig.until(lambda: "open" not in rig.record(), "settled")
        assert rig.phases() == {"idle"}
        assert (await taken(rig, "next"))["phase"] == "Succeeded"


class Away:
    """A bucket that takes nothing away, for as long as it is `away`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away = True
        original = DirectoryStore.delete

        def delete(store: DirectoryStore, key: str) -> None:
            if self.away:
                raise StorageError("the bucket is full")
            original(store, key)

        monkeypatch.setattr(DirectoryStore, "delete", delete)


async def test_k2_a_bucket_that_fails_for_a_while_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = Away(monkeypatch)
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        delete(rig, "one")
        await rig.until(lambda: rig.status(CHECKPOINTS, "one").get("reason") == "StorageFailed", "said so")
        assert rig.status(CHECKPOINTS, "one")["phase"] == "Deleting"
        assert rig.status(CHECKPOINTS, "one")["message"] == "the bucket is full"
        bucket.away = False
        await rig.until(lambda: not there(rig, "one"), "gone")
        assert data(status) == set()


async def test_k2_a_bucket_that_fails_for_ever_holds_nothing_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Away(monkeypatch)
    async with operated(tmp_path, rows(), rate=0.1) as rig:
        status = await taken(rig, "one")
        delete(rig, "one")
        await asyncio.sleep(590)
        assert there(rig, "one")
        await rig.until(lambda: not there(rig, "one"), "let go of")
        await rig.until(lambda: said(rig, "DataLeft"), "said so")
        assert status["uri"] in said(rig, "DataLeft")[0]
        assert "the bucket is full" in said(rig, "DataLeft")[0]


def fill(monkeypatch: pytest.MonkeyPatch, at: str = "") -> None:
    """From the first write of an object with this name on the bucket takes nothing more, and gives and removes what
    it has."""
    original, full = DirectoryStore.create, False

    def create(store: DirectoryStore, key: str, data: bytes) -> None:
        nonlocal full
        full = full or key.endswith(at)
        if full:
            raise StorageError("the bucket is full", StorageProblem.FULL)
        original(store, key, data)

    monkeypatch.setattr(DirectoryStore, "create", create)
    monkeypatch.setattr(DirectoryStore, "replace", create)


async def test_k2_data_goes_out_of_a_full_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is how room is made: a removal writes nothing."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        fill(monkeypatch)
        began = now()
        delete(rig, "one")
        await rig.until(lambda: not there(rig, "one"), "gone")
        assert now() - began < 10
        assert data(status) == set()
        await rig.until(lambda: said(rig, "DataRemoved"), "said so")
        assert not said(rig, "DataLeft")


@pytest.mark.parametrize(("at", "operator_dies"), [(PROPOSAL, False), (CHECKPOINT, False), (CHECKPOINT, True)])
async def test_k2_one_that_could_not_be_finished_for_want_of_room_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, operator_dies: bool
) -> None:
    """Storage takes no tombstone either. The record gives it up, so that nobody publishes it once there is room; also
    what an operator that died has left to be published."""
    async with operated(tmp_path, rows(), rate=0.1) as rig:
        await rig.until(rig.in_service, "in service")
        with monkeypatch.context() as bucket:
            fill(bucket, at)
            rig.checkpoint("unwanted", deletionPolicy="Delete", timeouts={"commit": "5s"})
            if operator_dies:
                await rig.reaches("unwanted", "Publishing")
                rig.kill_operator()
                rig.start_operator()
                assert not rig.record()["open"].get("givenUp")
            else:
                await rig.until(lambda: rig.record().get("open", {}).get("givenUp"), "given up")
            uri = rig.status(CHECKPOINTS, "unwanted")["uri"]
            assert data({"uri": uri})
            delete(rig, "unwanted")
            await rig.until(lambda: not there(rig, "unwanted"), "gone")
            assert data({"uri": uri}) == set()
        await rig.until(lambda: "open" not in rig.record(), "settled")
        assert data({"uri": uri}) == {CHECKPOINT}
        assert read_publication((Path(uri) / CHECKPOINT).read_bytes()).state == "abandoned"
        assert (await taken(rig, "next"))["phase"] == "Succeeded"


def lose(monkeypatch: pytest.MonkeyPatch, folder: Path, *, whole: bool) -> None:
    """From the first publication on nothing can be written to this bucket any more, or nothing done in it at all."""
    lost = False

    def failing(name: str) -> None:
        original = getattr(DirectoryStore, name)

        def act(store: DirectoryStore, key: str, *arguments: Any) -> Any:
            nonlocal lost
            lost = lost or (name == "create" and key.endswith(CHECKPOINT))
            if lost and Path(store.uri).is_relative_to(folder):
                raise StorageError("the bucket is lost", StorageProblem.FULL)
            return original(store, key, *arguments)

        monkeypatch.setattr(DirectoryStore, name, act)

    for name in ("create", "replace", *(("get", "list", "delete") if whole else ())):
        failing(name)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dies", [False, True])
async def test_k2_who_takes_another_bucket_has_checkpoints_there_and_recovers_whatever_is_left_in_the_lost_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool, dies: bool
) -> None:
    async with operated(tmp_path, rows(), rate=0.1) as rig:
        await rig.until(rig.in_service, "in service")
        lose(monkeypatch, tmp_path / "checkpoints", whole=whole)
        rig.checkpoint("lost", timeouts={"commit": "5s"})
        await rig.until(lambda: rig.record().get("open", {}).get("givenUp"), "given up")
        rig.change(checkpoints={"storage": {"directory": str(tmp_path / "another")}})
        if dies:
            rig.cell.kill("agent")
            await rig.until(lambda: rig.in_service(1), "recovered")
        await rig.until(lambda: rig.final("lost"), "it is not waited for any longer")
        found = rig.status(CHECKPOINTS, "lost")
        assert (found["phase"], found["reason"]) == ("Failed", "StorageError")
        assert "create another GymCheckpoint" in found["message"]
        assert (await taken(rig, "next"))["uri"].startswith(str(tmp_path / "another"))
        assert any("lost" in message for message in rig.events("CheckpointUnusable"))


async def test_k2_credentials_that_are_gone_hold_an_object_for_a_minute(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        elsewhere = {"s3": {"bucket": "bucket", "credentialsSecret": "gone"}}
        found = {**rig.status(CHECKPOINTS, "one"), "storage": elsewhere}
        rig.kube.set(CHECKPOINTS, IDENTITY.namespace, "one", status=found)
        delete(rig, "one")
        await asyncio.sleep(50)
        assert there(rig, "one")
        await rig.until(lambda: not there(rig, "one"), "let go of")
        await rig.until(lambda: said(rig, "DataLeft"), "said so")
        assert "Secret gone" in said(rig, "DataLeft")[0]
        assert data(status)


async def test_k2_data_goes_also_where_the_credentials_went_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a deleted namespace may have it. A storage that fails then is not waited for any longer than credentials."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        elsewhere = {"s3": {"bucket": "bucket", "credentialsSecret": "keys"}}
        statuses = {name: await taken(rig, name) for name in ("one", "two", "three")}
        for name in statuses:
            found = {**rig.status(CHECKPOINTS, name), "storage": elsewhere}
            rig.kube.set(CHECKPOINTS, IDENTITY.namespace, name, status=found)
        keys = {"AWS_ACCESS_KEY_ID": "a2V5", "AWS_SECRET_ACCESS_KEY": "a2V5"}
        rig.kube.put(SECRETS, IDENTITY.namespace, {"metadata": {"name": "keys"}, "data": keys})
        delete(rig, "one")
        await rig.until(lambda: not there(rig, "one"), "the operator has used the keys")
        rig.kube.remove(SECRETS, IDENTITY.namespace, "keys")
        delete(rig, "two")
        await rig.until(lambda: not there(rig, "two"), "gone")
        assert data(statuses["two"]) == set()
        assert not said(rig, "DataLeft")

        Away(monkeypatch)
        began = now()
        delete(rig, "three")
        await rig.until(lambda: not there(rig, "three"), "let go of")
        assert 60 <= now() - began < 90
        await rig.until(lambda: said(rig, "DataLeft"), "said so")

        assert rig.operator is not None
        known = rig.operator.fleet._s.accesses
        assert known._known
        rig.kube.let_go(STACKS, IDENTITY.namespace, IDENTITY.name)
        await rig.until(lambda: not known._known, "nothing there needs the keys any more")


def contents(status: dict[str, Any]) -> dict[str, bytes]:
    """What a checkpoint consists of, byte for byte."""
    place = Path(status["uri"])
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def disown(status: dict[str, Any], differs: str) -> None:
    """From now on something else is under the names that a checkpoint was taken under."""
    place = Path(status["uri"])
    if differs == "the holder":
        (place / HOLDER).write_text('{"holder":"somebody-else"}')
    elif differs == "the digest":
        publication = read_publication((place / CHECKPOINT).read_bytes())
        for name in (CHECKPOINT, PROPOSAL):
            (place / name).write_bytes(publication.model_copy(update={"created": 1.0}).to_bytes())


@pytest.mark.parametrize("differs", ["nothing", "the holder", "the digest"])
async def test_k3_after_the_storage_was_pointed_elsewhere_only_its_own_data_goes(
    tmp_path: Path, differs: str
) -> None:
    """It goes from where it was taken; what the stack has taken since, elsewhere, is none of its."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        one = await taken(rig, "one")
        rig.change(checkpoints={"storage": {"directory": str(tmp_path / "another")}})
        two = await taken(rig, "two")
        assert [each["uri"].split("/checkpoints/")[0] for each in (one, two)] == [
            str(tmp_path),
            f"{tmp_path}/another/{IDENTITY.uid}/cell-0",
        ]
        disown(one, differs)
        before, theirs = contents(one), contents(two)
        delete(rig, "one")
        await rig.until(lambda: not there(rig, "one"), "gone")
        assert contents(one) == ({} if differs == "nothing" else before)
        assert contents(two) == theirs
        await rig.until(lambda: said(rig, "DataRemoved" if differs == "nothing" else "DataLeft"), "said so")


@pytest.mark.parametrize("marker", ["another", "none"])
async def test_s6_what_is_marked_as_another_clusters_stays(tmp_path: Path, marker: str) -> None:
    """As after one cluster was made from a copy of the other's state: both have the same objects, UIDs and all."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        root = DirectoryStore(tmp_path / "checkpoints" / IDENTITY.uid)
        owner = owner_of(root)
        assert owner is not None
        root.delete(OWNER)
        if marker == "another":
            claim(root, owner.model_copy(update={"cluster": "another"}))
        before = data(status)
        delete(rig, "one")
        await rig.until(lambda: not there(rig, "one"), "gone")
        assert data(status) == before
        await rig.until(lambda: said(rig, "DataLeft"), "said so")


async def test_k2_an_emptied_bucket_holds_nothing_up(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await taken(rig, "one")
        shutil.rmtree(tmp_path / "checkpoints")
        began = now()
        delete(rig, "one")
        await rig.until(lambda: not there(rig, "one"), "gone")
        assert now() - began < 10
        assert not said(rig, "DataLeft")


async def test_k18_a_checkpoint_outlives_its_stack_and_goes_with_its_data_when_it_is_deleted(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        before = contents(status)
        rig.kube.remove(STACKS, IDENTITY.namespace, IDENTITY.name)
        await asyncio.sleep(60)
        assert there(rig, "one") and rig.status(CHECKPOINTS, "one")["phase"] == "Succeeded"
        assert contents(status) == before != {}
        delete(rig, "one")
        await rig.until(lambda: not there(rig, "one"), "gone")
        assert data(status) == set()


async def test_k4_what_a_cell_is_being_restored_from_stays_until_it_is(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one")
        rig.pods_may_start = False
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.record().get("attempt") == 1 and not rig.in_service(), "recovering")
        delete(rig, "one")
        await rig.until(lambda: rig.status(CHECKPOINTS, "one").get("reason") == "Held", "held")
        await asyncio.sleep(60)
        assert CHECKPOINT in data(status)
        rig.pods_may_start = True
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert rig.status()["cells"][0]["recoveries"][-1]["checkpoint"] == status["checkpointID"]
        await rig.until(lambda: not there(rig, "one"), "gone")
        assert data(status) == set()


async def test_what_a_schedule_does_not_keep_goes_with_its_data(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=0.3) as rig:
        await rig.until(rig.in_service, "in service")
        template = {"spec": {"stackRef": {"name": IDENTITY.name}, "deletionPolicy": "Delete"}}
        spec = {"every": "20s", "keep": {"last": 1}, "template": template}
        rig.kube.put(SCHEDULES, IDENTITY.namespace, {"metadata": {"name": "often"}, "spec": spec})
        await asyncio.sleep(200)
        folder = tmp_path / "checkpoints" / IDENTITY.uid / "cell-0" / "checkpoints"
        assert len({path.parent for path in folder.rglob(CHECKPOINT)}) <= 3
        names = [name for kind, _, name in rig.kube.objects if kind == CHECKPOINTS]
        assert 1 <= len(names) <= 3
        assert all(finalizers(rig, name) == [DATA_FINALIZER] for name in names)


@pytest.mark.parametrize("halfway", [False, True])
async def test_the_parts_of_all_cells_go(tmp_path: Path, halfway: bool) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=2) as rig:
        await rig.until(rig.all_in_service, "in service")
        rig.cell.network.latency = 0.1  # so that it can be seen between its parts
        rig.checkpoint("one", deletionPolicy="Delete")

        def phases() -> list[str]:
            return sorted(part["phase"] for part in rig.status(CHECKPOINTS, "one").get("cells", ()))

        await rig.until(lambda: "Succeeded" in phases() if halfway else rig.final("one"), "far enough")
        assert rig.final("one") is not halfway
        uris = [part["uri"] for part in rig.status(CHECKPOINTS, "one")["cells"] if part.get("uri")]
        delete(rig, "one")
        await rig.until(lambda: not there(rig, "one"), "gone")
        left = [data({"uri": uri}) for uri in uris]
        assert set() in left and all(each <= {CHECKPOINT} for each in left)
        rig.checkpoint("next")
        await rig.until(lambda: rig.final("next"), "the next one")
        assert rig.status(CHECKPOINTS, "next")["phase"] == "Succeeded"
