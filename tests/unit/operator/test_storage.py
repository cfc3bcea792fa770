"""A stack's storage as its operator uses it: with the credentials of a Secret, and without waiting for a bucket."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_operator.api.conditions import ConditionReason
from gym_operator.effects import storage as storage_module
from gym_operator.effects.accesses import Accesses
from gym_operator.effects.cache import Cache, Key
from gym_operator.effects.cluster import cluster_id
from gym_operator.effects.events import Events
from gym_operator.effects.fleet import STUCK_SECONDS, Fleet
from gym_operator.effects.kube import NAMESPACES, SECRETS, KubeError
from gym_operator.effects.services import Services
from gym_operator.effects.storage import StackStorage
from gym_operator.effects.transport import PodTransport
from gym_operator.effects.worker import StackWorker
from gym_rig.edges import NS, STACK_UID, until
from gym_rig.fake_kube import FakeKube
from gym_servers.stack.spec import StorageSpec
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.s3_access import S3Access, S3Credentials
from gym_servers.storage.store import StorageError, StorageProblem

SPEC = StorageSpec.model_validate({"s3": {"bucket": "bucket", "credentialsSecret": "keys"}})


KEYS = {"AWS_ACCESS_KEY_ID": "a2V5", "AWS_SECRET_ACCESS_KEY": "c2VjcmV0"}


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
