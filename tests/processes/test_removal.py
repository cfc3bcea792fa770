"""Removing a checkpoint's data from a real S3 server: all of it, nothing else, whatever is gone already."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gym_kit.bucket import REGION, SeaweedFS
from gym_servers.protocol.digests import sha256
from gym_servers.stack.settings import S3Settings
from gym_servers.storage.cells import PROPOSAL, settle
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CHECKPOINT, Publication
from gym_servers.storage.removal import Claim, NotOurs, Removed, hold, remove
from gym_servers.storage.store import ObjectMissing, ObjectStore, StorageError

PACKS = 1100  # more than a page of a listing holds
Open = Callable[[str], ObjectStore]


@pytest.fixture
def store(s3: SeaweedFS) -> Open:
    settings = S3Settings(bucket="gym", endpoint=s3.endpoint, region=REGION, addressing_style="path")
    return lambda uri: open_store(uri, settings)


def published(store: Open, uri: str, packs: int = 3) -> Claim:
    there = store(uri)
    publication = Publication(
        state="published",
        checkpoint_id="one-id",
        name="one",
        stack_uid="stack-uid",
        cell=0,
        cell_attempt=0,
        sequence=1,
        created=1.0,
    )
    for number in range(packs):
        there.create(f"model/m/pack{number:04d}", b"records")
    there.create(PROPOSAL, publication.to_bytes())
    hold(there, "gckpt-uid")
    settle(there, publication)
    return Claim("stack-uid", "one-id", sha256(publication.to_bytes()), "gckpt-uid")


def test_an_object_is_deleted_and_one_that_is_not_there_is_a_success(store: Open) -> None:
    there = store("s3://gym/removal/object")
    there.create("a/b", b"1")
    there.delete("a/b")
    with pytest.raises(ObjectMissing):
        there.get("a/b")
    there.delete("a/b")
    there.delete("never/was")


def test_k2_a_bucket_that_is_not_there_says_so(store: Open) -> None:
    with pytest.raises(StorageError, match="bucket does not exist"):
        store("s3://not-there/x").delete("a")


def test_all_of_a_large_checkpoint_goes_and_its_neighbour_stays(store: Open) -> None:
    claim = published(store, "s3://gym/removal/checkpoints/000000-000001-one-id", PACKS)
    published(store, "s3://gym/removal/checkpoints/000000-000001-one-id-2")
    above = store("s3://gym/removal/checkpoints")
    assert remove(above, "000000-000001-one-id", claim) == Removed(PACKS + 3)
    assert above.list("000000-000001-one-id") == {}
    assert len(above.list("000000-000001-one-id-2")) == 6
    assert remove(above, "000000-000001-one-id", claim) == Removed(0)


def test_k3_what_is_not_proved_stays(store: Open) -> None:
    claim = published(store, "s3://gym/removal/other/checkpoints/000000-000001-one-id")
    above = store("s3://gym/removal/other/checkpoints")
    with pytest.raises(NotOurs):
        remove(above, "000000-000001-one-id", Claim("another", claim.checkpoint_id, claim.digest, claim.holder))
    assert CHECKPOINT in {key.rsplit("/", 1)[1] for key in above.list("000000-000001-one-id")}
