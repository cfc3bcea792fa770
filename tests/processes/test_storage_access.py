"""How a stack gets at a real S3 server: region and address, trust, encryption, credentials, rights."""

from __future__ import annotations

import asyncio
import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from gym_kit import faulty_s3 as faults
from gym_kit.bucket import Credentials, SeaweedFS
from gym_kit.cluster.local import pki
from gym_kit.faulty_s3 import FaultyS3, refusing
from gym_rig.stack_storage import UID, Stack, keys, written
from gym_servers.coordination.settle import choose
from gym_servers.stack.settings import S3Settings
from gym_servers.storage import s3_access
from gym_servers.storage.cells import settle
from gym_servers.storage.locate import open_store
from gym_servers.storage.s3_access import CA_FILE, CREDENTIALS_FOLDER
from gym_servers.storage.store import ObjectStore, StorageError, StorageProblem

pytestmark = pytest.mark.usefixtures("hasty")


def authority(folder: Path) -> tuple[str, tuple[Path, Path]]:
    """An authority's certificate, and one by it for this machine."""
    pki.make(folder, [pki.Certificate("server", "server", "gym", ("DNS:localhost", "IP:127.0.0.1"))])
    return (folder / "ca.crt").read_text(), (folder / "server.crt", folder / "server.key")


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


# ---- S2, S3 ------------------------------------------------------------------------------------------------


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


# ---- S4 ----------------------------------------------------------------------------------------------------


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


# ---- encryption, credentials -------------------------------------------------------------------------------


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


# ---- rights ------------------------------------------------------------------------------------------------


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
