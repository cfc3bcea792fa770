"""A real S3 server that fails in every way we know of: each is found out, named, and says what to do about it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gym_kit import faulty_s3 as faults
from gym_kit.bucket import Credentials, SeaweedFS
from gym_kit.cluster.local import pki
from gym_kit.faulty_s3 import FaultyS3, reading, refusing, writing
from gym_operator.api.conditions import ConditionReason as Reason
from gym_operator.effects import storage as storage_effects
from gym_operator.effects.kube import SECRETS
from gym_operator.effects.storage import StackStorage
from gym_operator.rules.observed import Storage
from gym_rig.fake_kube import FakeKube
from gym_servers.coordination.record import OpenCheckpoint
from gym_servers.coordination.settle import choose, settle_left_open
from gym_servers.protocol.errors import ProtocolError
from gym_servers.stack.settings import S3Settings
from gym_servers.stack.spec import StorageSpec
from gym_servers.storage import s3 as s3_module
from gym_servers.storage import s3_access
from gym_servers.storage.cells import PROPOSAL, published, settle, verify
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CodeIdentity, Manifest, Member, PackEntry, Publication, RecordEntry
from gym_servers.storage.ownership import Owner, check_deletable, claim, owner_of
from gym_servers.storage.packs import pack_records, write_records
from gym_servers.storage.s3_access import CA_FILE, CREDENTIALS_FOLDER
from gym_servers.storage.store import ObjectConflict, ObjectStore, StorageError, StorageProblem

NS = "team"
UID = "7d9c8f5e-0000-4000-8000-000000000001"
CODE = CodeIdentity(image="", server="scripted", config_digest="", record_format=1)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults that last are seen in a moment."""
    monkeypatch.setattr(s3_module, "READ_SECONDS", 1)
    monkeypatch.setattr(s3_module, "REQUEST_TRIES", 2)


@pytest.fixture
def faulty(s3: SeaweedFS) -> Iterator[FaultyS3]:
    with FaultyS3(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return tmp_path.name.lower().replace("_", "-")


class Stack:
    """The storage of one stack as its operator sees it."""

    def __init__(self, prefix: str, endpoint: str, credentials: Credentials | None, **s3: Any) -> None:
        self.kube = FakeKube(lambda: 0.0)
        self.now = 0.0
        document = {"bucket": "gym", "prefix": prefix, "endpoint": endpoint, "addressingStyle": "path", **s3}
        if credentials is not None:
            self.secret("keys", **keys(credentials))
            document["credentialsSecret"] = "keys"
        self.spec = StorageSpec.model_validate({"s3": document})
        self.root = f"s3://{document['bucket']}/{prefix}/{UID}"
        owner = Owner(cluster="cluster-a", stack_uid=UID, namespace=NS, name="demo")
        self.storage = StackStorage(self.kube, NS, lambda: self.now, owner)

    def secret(self, name: str, **values: str) -> None:
        data = {key.replace("__", "."): base64.b64encode(value.encode()).decode() for key, value in values.items()}
        if (SECRETS, NS, name) in self.kube.objects:
            self.kube.set(SECRETS, NS, name, data=data)
        else:
            self.kube.put(SECRETS, NS, {"metadata": {"name": name}, "data": data})

    async def found(self) -> Storage:
        """What the next look finds."""
        self.now += 10_000
        await self.storage.tend(self.spec, self.root)
        async with asyncio.timeout(30):
            if self.storage._probe is not None:
                await self.storage._probe
        return self.storage.state

    def store(self, *below: str) -> ObjectStore:
        return self.storage.open("/".join([self.root, *below]))


def keys(credentials: Credentials) -> dict[str, str]:
    return {"AWS_ACCESS_KEY_ID": credentials.access_key, "AWS_SECRET_ACCESS_KEY": credentials.secret_key}


@pytest.fixture
def stack(faulty: FaultyS3, s3: SeaweedFS, prefix: str) -> Stack:
    return Stack(prefix, faulty.endpoint, s3.credentials)


# ---- what a look at the storage finds -----------------------------------------------------------------------


async def test_a_good_storage_is_proved_again_and_again(stack: Stack, faulty: FaultyS3) -> None:
    for _ in range(3):
        found = await stack.found()
        assert (found.ok, found.reason) == (True, Reason.STORAGE_REACHABLE), found
    writes = [asked for asked in faulty.asked if asked.method == "PUT"]
    assert all(f"/{UID}/" in asked.path for asked in writes), "nothing outside of the stack's own folder"


@pytest.mark.parametrize(
    ("fault", "reason", "words"),
    [
        (refusing(503, "SlowDown"), StorageProblem.BUSY, "asks for fewer requests; wait, or give it more capacity"),
        (faults.late(3), StorageProblem.SLOW, "did not answer in time"),
        (faults.cutting(reading()), StorageProblem.UNREACHABLE, "the connection was cut"),
        (refusing(507, "InsufficientStorage", writing()), StorageProblem.FULL, "free space or raise the quota"),
        (refusing(403, "QuotaExceeded", writing()), StorageProblem.FULL, "free space or raise the quota"),
        (refusing(500, "InternalError", writing()), StorageProblem.FAILED, "check its health and free space"),
        (refusing(403, "AccessDenied", writing()), StorageProblem.ACCESS_DENIED, "check the bucket policy"),
        (
            refusing(403, "AccessDenied", lambda a: "list-type" in a.path),
            StorageProblem.ACCESS_DENIED,
            "bucket policy",
        ),
        (
            refusing(400, "AuthorizationHeaderMalformed", more="<Region>eu-west-1</Region>"),
            StorageProblem.REGION_WRONG,
            "the bucket is in another region; set `region` to eu-west-1",
        ),
        (refusing(403, "RequestTimeTooSkewed"), StorageProblem.CLOCK_SKEWED, "set them right"),
        (refusing(403, "ExpiredToken"), StorageProblem.CREDENTIALS_REFUSED, "the session token has ended"),
        (
            refusing(501, "NotImplemented", lambda a: "if-none-match" in a.headers),
            StorageProblem.CREATE_ONLY_UNSUPPORTED,
            "does not implement create-only writes (If-None-Match)",
        ),
    ],
)
async def test_each_failure_has_a_reason_of_its_own_and_says_what_to_do(
    stack: Stack, faulty: FaultyS3, fault: faults.Fault, reason: Reason, words: str
) -> None:
    faulty.fault = fault
    found = await stack.found()
    assert (found.ok, found.reason) == (False, reason), found
    assert words in found.message
    faulty.heal()
    assert (await stack.found()).ok, "found good once it is"


async def test_wrong_keys_are_told_apart_and_never_shown(s3: SeaweedFS, prefix: str) -> None:
    unknown = await Stack(prefix, s3.endpoint, Credentials("NOBODY", "very-secret-key")).found()
    assert (unknown.reason, unknown.ok) == (StorageProblem.CREDENTIALS_REFUSED, False)
    assert "the access key is unknown; check the credentials secret" in unknown.message
    wrong = await Stack(prefix, s3.endpoint, Credentials(s3.credentials.access_key, "very-secret-key")).found()
    assert (wrong.reason, wrong.ok) == (StorageProblem.CREDENTIALS_REFUSED, False)
    assert "the secret key is wrong; check the credentials secret" in wrong.message
    assert "very-secret-key" not in unknown.message + wrong.message


async def test_a_missing_bucket_is_named(s3: SeaweedFS, prefix: str) -> None:
    found = await Stack(prefix, s3.endpoint, s3.credentials, bucket="no-such-bucket").found()
    assert found.reason is StorageProblem.BUCKET_MISSING
    assert "no-such-bucket" in found.message and "create it or correct its name" in found.message


async def test_nobody_at_the_endpoint_is_named(s3: SeaweedFS, prefix: str) -> None:
    found = await Stack(prefix, "http://127.0.0.1:9", s3.credentials).found()
    assert found.reason is StorageProblem.UNREACHABLE
    assert "the endpoint cannot be reached; check `endpoint`" in found.message


async def test_an_endpoint_that_is_no_address_is_named(s3: SeaweedFS, prefix: str) -> None:
    found = await Stack(prefix, "http://not an address", s3.credentials).found()
    assert found.reason is StorageProblem.UNREACHABLE
    assert "`endpoint` is not an address such as https://s3.example:9000" in found.message


async def test_an_endpoint_without_tls_is_named(faulty: FaultyS3, s3: SeaweedFS, prefix: str) -> None:
    found = await Stack(prefix, faulty.endpoint.replace("http:", "https:"), s3.credentials).found()
    assert found.reason is StorageProblem.CERTIFICATE_REFUSED
    assert "or it speaks no TLS" in found.message


async def test_a_fault_of_ours_is_said_and_the_storage_tried_again(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: Any) -> None:
        raise RuntimeError("very secret")

    with monkeypatch.context() as patched:
        patched.setattr(storage_effects, "probe", fault)
        found = await stack.found()
    assert found.reason is StorageProblem.FAILED
    assert "the operator's log says why" in found.message and "secret" not in found.message
    assert (await stack.found()).ok


async def test_a_server_that_ignores_create_only_writes_is_refused(
    stack: Stack, faulty: FaultyS3, s3: SeaweedFS
) -> None:
    client = s3.client()
    faulty.fault = faults.overwriting(lambda key: client.delete_object(Bucket="gym", Key=key.removeprefix("gym/")))
    found = await stack.found()
    assert (found.ok, found.reason) == (False, StorageProblem.CREATE_ONLY_UNSUPPORTED)
    assert "set spec.checkpoints.enabled to false" in found.message
    faulty.heal()
    client.close()
    assert (await stack.found()).ok, "what the fault left behind is mended"


# ---- faults in passing --------------------------------------------------------------------------------------


async def test_a_few_refusals_and_cuts_cost_nothing(stack: Stack, faulty: FaultyS3) -> None:
    faulty.fault = faults.all_of(refusing(503, "SlowDown", times=1), faults.cutting(reading(), times=1))
    assert (await stack.found()).ok


async def test_a_write_that_lands_and_is_not_answered_is_no_conflict(stack: Stack, faulty: FaultyS3) -> None:
    """The client repeats the creation and meets its own object."""

    lost = [True]

    def fault(asked: faults.Asked, onward: faults.Pass) -> faults.Answer:
        answer = onward(asked)
        return refusing(500, "InternalError")(asked, onward) if asked.method == "PUT" and lost.pop() else answer

    await stack.found()
    lost[:] = [False, False, True]
    faulty.fault = fault
    await asyncio.to_thread(stack.store().create, "once", b"mine")
    assert await asyncio.to_thread(stack.store().get, "once") == b"mine"
    faulty.heal()
    with pytest.raises(ObjectConflict):
        await asyncio.to_thread(stack.store().create, "once", b"other")


# ---- S1 -----------------------------------------------------------------------------------------------------


async def test_s1_a_server_that_stores_checksum_trailers_inside_the_body_is_found_out(
    stack: Stack, faulty: FaultyS3
) -> None:
    faulty.fault = faults.changing(faults.with_trailer, reading())
    found = await stack.found()
    assert (found.ok, found.reason) == (False, StorageProblem.BYTES_CHANGED)
    assert "came back with other bytes" in found.message and "update the storage server" in found.message


@pytest.mark.parametrize(
    "change", [faults.with_trailer, lambda body: body[:-3], lambda body: bytes([body[0] ^ 1]) + body[1:]]
)
async def test_s1_a_pack_with_other_bytes_is_not_published(
    stack: Stack, faulty: FaultyS3, change: Callable[[bytes], bytes]
) -> None:
    await stack.found()
    faulty.fault = faults.changing(change, reading("/pack"))
    store = stack.store("cell-0", "checkpoints", "000000-000001-one")
    full = await asyncio.to_thread(written, store)
    with pytest.raises(ProtocolError, match="does not match its digest"):
        await asyncio.to_thread(verify, store, full.members, full.checkpoint_id)


async def test_s1_a_publication_with_other_bytes_is_none(stack: Stack, faulty: FaultyS3) -> None:
    await stack.found()
    cell = stack.store("cell-0")
    store = stack.store("cell-0", "checkpoints", "000000-000001-one")
    full = await asyncio.to_thread(written, store)
    faulty.fault = faults.changing(faults.with_trailer, reading("checkpoint.json"))
    with pytest.raises(ProtocolError):
        await asyncio.to_thread(settle, store, full)
    assert await asyncio.to_thread(published, cell) == []


# ---- S2, S3 -------------------------------------------------------------------------------------------------


async def test_s2_a_server_that_knows_no_new_checksums_is_written_to(
    stack: Stack, faulty: FaultyS3, s3: SeaweedFS
) -> None:
    faulty.fault = faults.without_new_checksums
    assert (await stack.found()).ok
    newer = await asyncio.to_thread(default_client, faulty.endpoint, s3)
    with pytest.raises(Exception, match="InvalidArgument"):  # the fault is one: a client as it comes meets it
        await asyncio.to_thread(newer.put_object, Bucket="gym", Key="any", Body=b"any")
    newer.close()


async def test_s3_region_and_addressing_reach_the_server_as_set(faulty: FaultyS3, s3: SeaweedFS, prefix: str) -> None:
    there = Stack(prefix, faulty.endpoint, s3.credentials, region="eu-north-7")
    assert (await there.found()).ok
    assert all("/eu-north-7/s3/" in asked.headers["authorization"] for asked in faulty.asked)
    assert all(asked.path.startswith("/gym/") or asked.path.startswith("/gym?") for asked in faulty.asked)


async def test_s3_without_a_style_an_own_endpoint_gets_paths(faulty: FaultyS3, s3: SeaweedFS, prefix: str) -> None:
    assert (await Stack(prefix, faulty.endpoint, s3.credentials, addressingStyle="auto").found()).ok


async def test_s3_a_virtual_host_names_the_bucket(faulty: FaultyS3, s3: SeaweedFS, prefix: str) -> None:
    port = faulty.endpoint.rpartition(":")[2]
    faulty.fault = refusing(404, "NoSuchBucket")  # what is asked is what counts
    there = Stack(prefix, f"http://localhost:{port}", s3.credentials, addressingStyle="virtual")
    found = await there.found()
    if faulty.asked:  # where *.localhost resolves
        assert {asked.headers["host"] for asked in faulty.asked} == {f"gym.localhost:{port}"}
        assert not any(asked.path.startswith("/gym") for asked in faulty.asked)
    else:
        assert found.reason is StorageProblem.UNREACHABLE


# ---- S4 -----------------------------------------------------------------------------------------------------


def authority(folder: Path) -> tuple[str, tuple[Path, Path]]:
    """An authority's certificate, and one by it for this machine."""
    pki.make(folder, [pki.Certificate("server", "server", "gym", ("DNS:localhost", "IP:127.0.0.1"))])
    return (folder / "ca.crt").read_text(), (folder / "server.crt", folder / "server.key")


async def test_s4_an_own_authority_is_trusted_by_its_secret_and_rotated_without_a_restart(
    s3: SeaweedFS, prefix: str, tmp_path: Path
) -> None:
    old, certificate = authority(tmp_path / "old")
    young, next_certificate = authority(tmp_path / "young")
    with FaultyS3(s3.endpoint, certificate) as faulty:
        stranger = await Stack(prefix, faulty.endpoint, s3.credentials).found()
        assert stranger.reason is StorageProblem.CERTIFICATE_REFUSED
        assert "give its authority in `caSecret`" in stranger.message

        stack = Stack(prefix, faulty.endpoint, s3.credentials, caSecret="authority")
        missing = await stack.found()
        assert missing.reason is StorageProblem.CERTIFICATE_REFUSED
        assert "there is no Secret authority in this namespace; create it with the keys ca.crt" in missing.message
        stack.secret("authority", ca__crt="not a certificate")
        assert "in PEM form" in (await stack.found()).message
        stack.secret("authority", ca__crt=old)
        assert (await stack.found()).ok

        faulty.trust(next_certificate)
        faulty.hang_up()
        assert (await stack.found()).reason is StorageProblem.CERTIFICATE_REFUSED
        stack.secret("authority", ca__crt=young)
        assert (await stack.found()).ok
        stack.secret("authority", ca__crt=old)
        assert (await stack.found()).reason is StorageProblem.CERTIFICATE_REFUSED, (
            "what was taken out is not trusted any more"
        )


async def test_s4_a_server_trusts_the_mounted_authority_and_a_store_that_is_open_follows_its_rotation(
    s3: SeaweedFS, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the servers of a stack do it, whose own settings say nothing of it: the pod mounts the Secret's file."""
    old, certificate = authority(tmp_path / "old")
    young, next_certificate = authority(tmp_path / "young")
    for name, value in keys(s3.credentials).items():
        (tmp_path / name).write_text(value)
    mounted = tmp_path / "ca.crt"
    monkeypatch.setenv(CREDENTIALS_FOLDER, str(tmp_path))
    monkeypatch.setattr(s3_access, "LOOK_SECONDS", 0.0)
    with FaultyS3(s3.endpoint, certificate) as faulty:
        reach = S3Settings(bucket="gym", endpoint=faulty.endpoint, addressing_style="path")

        async def refused(store: ObjectStore) -> bool:
            with pytest.raises(StorageError) as found:
                await asyncio.to_thread(store.create, "no", b"no")
            return found.value.problem is StorageProblem.CERTIFICATE_REFUSED

        assert await refused(await asyncio.to_thread(open_store, f"s3://gym/{prefix}", reach))
        mounted.write_text(old)
        monkeypatch.setenv(CA_FILE, str(mounted))
        store = await asyncio.to_thread(open_store, f"s3://gym/{prefix}", reach)
        await asyncio.to_thread(store.create, "one", b"1")
        faulty.trust(next_certificate)
        faulty.hang_up()
        assert await refused(store)
        mounted.write_text(young)
        await asyncio.to_thread(store.create, "two", b"2")


# ---- S6, S7 -------------------------------------------------------------------------------------------------


def owner(cluster: str) -> Owner:
    return Owner(cluster=cluster, stack_uid=UID, namespace=NS, name="demo")


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


def written(store: ObjectStore, *, until: str = "proposal") -> Publication:
    """A whole checkpoint of one participant, but for its publication; `until` names the last thing written."""

    def manifest(packs: list[PackEntry], records: list[RecordEntry]) -> Manifest:
        named = {"checkpoint_id": "one", "kind": "model", "instance": "m", "session": "s"}
        return Manifest(**named, code=CODE, episodes=["r"], packs=packs, records=records)

    packs = pack_records("model/m", {"r": b"records" * 100})
    if until == "packs":
        for pack in packs:
            store.create(pack.key, pack.data)
        digest = "0" * 64
    else:
        digest = write_records(store, "model/m", packs, manifest)
    member = Member(kind="model", instance="m", session="s", manifest_digest=digest, records=1, bytes=700, code=CODE)
    named = {"checkpoint_id": "one", "name": "one", "stack_uid": UID}
    full = Publication(state="published", **named, cell=0, cell_attempt=0, sequence=1, created=1.0, members=[member])
    if until == "proposal":
        store.create(PROPOSAL, full.to_bytes())
    return full


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


# ---- encryption, credentials --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("encryption", "sent"),
    [
        ({"type": "SSE-S3"}, {"x-amz-server-side-encryption": "AES256"}),
        ({"type": "SSE-KMS"}, {"x-amz-server-side-encryption": "aws:kms"}),
        (
            {"type": "SSE-KMS", "kmsKeyID": "alias/gym"},
            {"x-amz-server-side-encryption": "aws:kms", "x-amz-server-side-encryption-aws-kms-key-id": "alias/gym"},
        ),
        (None, {}),
    ],
)
async def test_encryption_is_asked_for_with_every_write(
    faulty: FaultyS3, s3: SeaweedFS, prefix: str, encryption: dict[str, str] | None, sent: dict[str, str]
) -> None:
    more = {"encryption": encryption} if encryption else {}
    # This server has no keys set up, so it is told nothing of them: what was asked for is what counts.
    faulty.fault = faults.without("encryption", s3.credentials.access_key, s3.credentials.secret_key)
    stack = Stack(prefix, faulty.endpoint, s3.credentials, **more)
    found = await stack.found()
    assert found.ok, found
    writes = [asked for asked in faulty.asked if asked.method == "PUT"]
    assert len(writes) >= 4
    for asked in writes:
        assert {name: value for name, value in asked.headers.items() if "encryption" in name} == sent


async def test_encryption_that_the_server_refuses_is_named(faulty: FaultyS3, s3: SeaweedFS, prefix: str) -> None:
    faulty.fault = refusing(501, "NotImplemented", lambda asked: "x-amz-server-side-encryption" in asked.headers)
    found = await Stack(prefix, faulty.endpoint, s3.credentials, encryption={"type": "SSE-S3"}).found()
    assert found.reason is StorageProblem.ENCRYPTION_REFUSED
    assert "change `encryption`" in found.message


async def test_new_keys_in_the_secret_are_used_at_once(faulty: FaultyS3, s3: SeaweedFS, prefix: str) -> None:
    stack = Stack(prefix, faulty.endpoint, Credentials("REVOKED", "gone"))
    assert (await stack.found()).reason is StorageProblem.CREDENTIALS_REFUSED
    store = stack.store()
    stack.secret("keys", **keys(s3.credentials))
    assert (await stack.found()).ok
    await asyncio.to_thread(store.create, "any", b"any")  # by the store that was open before


async def test_new_keys_in_mounted_files_are_used_by_stores_that_are_open(
    faulty: FaultyS3, s3: SeaweedFS, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old ones are revoked before the process looks at its files again: it looks when it is refused."""

    def put(credentials: Credentials) -> None:
        for name, value in keys(credentials).items():
            (tmp_path / name).write_text(value)

    put(s3.credentials)
    monkeypatch.setenv(CREDENTIALS_FOLDER, str(tmp_path))
    monkeypatch.setattr(s3_access, "LOOK_SECONDS", 1e9)
    reach = S3Settings(bucket="gym", endpoint=faulty.endpoint, addressing_style="path")
    store = await asyncio.to_thread(open_store, f"s3://gym/{prefix}", reach)
    await asyncio.to_thread(store.create, "one", b"1")
    revoked = f"Credential={s3.credentials.access_key}/"
    faulty.fault = refusing(403, "InvalidAccessKeyId", lambda asked: revoked in asked.headers["authorization"])
    with pytest.raises(StorageError, match="the access key is unknown") as refused:
        await asyncio.to_thread(store.create, "two", b"2")
    assert refused.value.problem is StorageProblem.CREDENTIALS_REFUSED
    put(s3.spare)
    await asyncio.to_thread(store.create, "two", b"2")


def default_client(endpoint: str, s3: SeaweedFS) -> Any:
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name="us-east-1",
        aws_access_key_id=s3.credentials.access_key,
        aws_secret_access_key=s3.credentials.secret_key,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )


# ---- rights -------------------------------------------------------------------------------------------------


def documented_policy(prefix: str) -> dict[str, dict[str, Any]]:
    """The statements of the operations page, by their names, for this bucket and prefix."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    policy = text.partition("```json\n")[2].partition("```")[0]
    statements = json.loads(policy.replace("BUCKET", "gym").replace("PREFIX", prefix))["Statement"]
    return {statement["Sid"]: statement for statement in statements}


def only_what_it_allows(policy: dict[str, dict[str, Any]]) -> faults.Fault:
    """An account that may do what the policy says, and nothing else."""
    objects, listing = policy["Objects"], policy["Listing"]
    below = objects["Resource"].removeprefix("arn:aws:s3:::")

    def allowed(asked: faults.Asked) -> bool:
        if "list-type=2" in asked.path:
            (prefix,) = parse_qs(urlsplit(asked.path).query)["prefix"]
            return listing["Action"] == "s3:ListBucket" and fnmatch(
                prefix, listing["Condition"]["StringLike"]["s3:prefix"]
            )
        action = {"PUT": "s3:PutObject", "GET": "s3:GetObject", "DELETE": "s3:DeleteObject"}.get(asked.method, "")
        return action in objects["Action"] and fnmatch(asked.key, below)

    return refusing(403, "AccessDenied", lambda asked: not allowed(asked))


async def test_the_documented_rights_are_enough(stack: Stack, faulty: FaultyS3, prefix: str) -> None:
    faulty.fault = only_what_it_allows(documented_policy(prefix))
    found = await stack.found()
    assert found.ok, found
    cell, store = stack.store("cell-0"), stack.store("cell-0", "checkpoints", "000000-000001-one")
    full = await asyncio.to_thread(written, store)
    assert await asyncio.to_thread(settle, store, full) == full
    choice = await asyncio.to_thread(lambda: choose(cell, stack.storage.open, UID, (), lambda _: None))
    assert choice is not None and choice.name == "one"


@pytest.mark.parametrize("taken", ["s3:GetObject", "s3:PutObject", "s3:ListBucket"])
async def test_each_documented_right_is_needed(stack: Stack, faulty: FaultyS3, prefix: str, taken: str) -> None:
    policy = documented_policy(prefix)
    policy["Objects"]["Action"] = [action for action in policy["Objects"]["Action"] if action != taken]
    policy["Listing"]["Action"] = "" if policy["Listing"]["Action"] == taken else policy["Listing"]["Action"]
    faulty.fault = only_what_it_allows(policy)
    assert (await stack.found()).reason is StorageProblem.ACCESS_DENIED
