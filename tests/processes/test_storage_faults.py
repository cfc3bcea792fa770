"""A real S3 server that fails in every way we know of: each is found out, named, and says what to do about it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gym_kit import faulty_s3 as faults
from gym_kit.bucket import Credentials, SeaweedFS
from gym_kit.faulty_s3 import FaultyS3, reading, refusing, writing
from gym_operator.api.conditions import ConditionReason as Reason
from gym_operator.effects import storage as storage_effects
from gym_rig.stack_storage import UID, Stack, written
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.cells import published, settle, verify
from gym_servers.storage.store import ObjectConflict, StorageProblem

pytestmark = pytest.mark.usefixtures("hasty")

# ---- what a look at the storage finds ----------------------------------------------------------------------


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
    assert "the endpoint http://127.0.0.1:9 cannot be reached; check `endpoint`" in found.message


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


# ---- faults in passing -------------------------------------------------------------------------------------


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


# ---- S1 ----------------------------------------------------------------------------------------------------


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
