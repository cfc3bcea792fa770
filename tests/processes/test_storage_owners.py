"""A real S3 server that others write to as well: one owner wins, and only what it has published is restored."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_kit.bucket import SeaweedFS
from gym_kit.faulty_s3 import FaultyS3
from gym_rig.stack_storage import UID, Stack, owner, written
from gym_servers.coordination.record import OpenCheckpoint
from gym_servers.coordination.settle import choose, settle_left_open
from gym_servers.storage.cells import settle
from gym_servers.storage.ownership import check_deletable, claim, owner_of
from gym_servers.storage.store import StorageError, StorageProblem

pytestmark = pytest.mark.usefixtures("hasty")


async def test_s6_of_two_clusters_with_one_prefix_the_second_writes_and_deletes_nothing(
    stack: Stack, faulty: FaultyS3, s3: SeaweedFS, prefix: str
) -> None:
    assert (await stack.found()).ok
    claimed = await asyncio.to_thread(owner_of, stack.store())
    assert claimed == owner("cluster-a")
    copy = Stack(prefix, faulty.endpoint, s3.credentials)
    copy.storage._owner = owner("cluster-b")
    faulty.asked.clear()
    found = await copy.found()
    assert (found.ok, found.reason) == (False, StorageProblem.OWNED_BY_ANOTHER)
    assert "cluster-a" in found.message and "give the stack another prefix" in found.message
    assert [asked for asked in faulty.asked if asked.method not in ("GET", "HEAD")] == []
    with pytest.raises(StorageError) as refused:
        await asyncio.to_thread(check_deletable, stack.store(), owner("cluster-b"))
    assert refused.value.problem is StorageProblem.OWNED_BY_ANOTHER
    await asyncio.to_thread(check_deletable, stack.store(), owner("cluster-a"))


async def test_s6_of_two_that_claim_at_once_one_wins(stack: Stack) -> None:
    await stack.found()
    store = stack.store("race")

    def try_it(cluster: str) -> bool:
        try:
            claim(store, owner(cluster))
        except StorageError:
            return False
        return True

    for round_ in range(5):
        store = stack.store(f"race-{round_}")
        clusters = [f"cluster-{number}" for number in range(8)]
        won = await asyncio.gather(*(asyncio.to_thread(try_it, cluster) for cluster in clusters))
        stands = await asyncio.to_thread(owner_of, store)
        assert stands is not None
        assert [cluster for cluster, mine in zip(clusters, won, strict=True) if mine] == [stands.cluster]


@pytest.mark.parametrize("until", ["packs", "manifest", "proposal"])
async def test_s7_what_is_not_published_is_never_restored(stack: Stack, until: str) -> None:
    await stack.found()
    cell, store = stack.store("cell-0"), stack.store("cell-0", "checkpoints", "000000-000001-one")
    full = await asyncio.to_thread(lambda: written(store, until=until))

    def chosen() -> Any:
        return choose(cell, stack.storage.open, UID, (), lambda _: None)

    assert await asyncio.to_thread(chosen) is None
    left = OpenCheckpoint(checkpoint_id="one", name="one", uri=store.uri, sequence=1, given_up=True)
    tombstone = full.model_copy(update={"state": "abandoned", "members": [], "reason": "given up"})
    await asyncio.to_thread(settle_left_open, store, left, tombstone)
    assert await asyncio.to_thread(chosen) is None
    assert (await asyncio.to_thread(settle, store, full)).state == "abandoned", "nor can it be published any more"
