"""What a look at a storage finds, over stores that do one thing wrong each."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.ownership import OWNER, Owner, check_deletable, check_usable, claim, owner_of
from gym_servers.storage.probe import FOLDER, ONCE, probe
from gym_servers.storage.s3_access import CA_FILE, CREDENTIALS_FOLDER, MountedAccess, S3Credentials, access_of_process
from gym_servers.storage.s3_errors import KNOWN, refused, unanswered
from gym_servers.storage.store import ObjectConflict, ObjectMissing, StorageError, StorageProblem

P = StorageProblem


def problem_of(call: Callable[[], object]) -> StorageProblem | None:
    try:
        call()
    except StorageError as error:
        return error.problem
    return None


class Overwriting(DirectoryStore):
    """Lets every creation through."""

    def create(self, key: str, data: bytes) -> None:
        self.replace(key, data)


class Adding(DirectoryStore):
    def get(self, key: str) -> bytes:
        return super().get(key) + b"trailer"


class Listing(DirectoryStore):
    def list(self, prefix: str) -> dict[str, int]:
        return {key: size + 1 for key, size in super().list(prefix).items()}


def test_a_good_store_passes_as_often_as_it_is_asked(tmp_path: Path) -> None:
    for nonce in ("a", "b", "b"):
        probe(DirectoryStore(tmp_path), nonce)
    assert {path.parent.name for path in tmp_path.rglob("*") if path.is_file()} == {FOLDER}
    assert len(list((tmp_path / FOLDER).iterdir())) == 2, "it leaves no more behind than it did the first time"


@pytest.mark.parametrize(
    ("kind", "problem"),
    [(Overwriting, P.CREATE_ONLY_UNSUPPORTED), (Adding, P.BYTES_CHANGED), (Listing, P.BYTES_CHANGED)],
)
def test_a_bad_store_is_found_out_and_a_mended_one_passes(
    tmp_path: Path, kind: type[DirectoryStore], problem: StorageProblem
) -> None:
    assert problem_of(lambda: probe(kind(tmp_path), "a")) is problem
    assert problem_of(lambda: probe(kind(tmp_path), "b")) is problem
    probe(DirectoryStore(tmp_path), "c")
    assert DirectoryStore(tmp_path).get(ONCE).startswith(b"the first")


def test_another_probe_in_between_is_no_fault_of_the_store(tmp_path: Path) -> None:
    class Meddled(DirectoryStore):
        left = 1

        def replace(self, key: str, data: bytes) -> None:
            super().replace(key, data)
            if self.left:
                self.left -= 1
                super().replace(key, b"another operator's")

    probe(Meddled(tmp_path), "a")


@pytest.mark.parametrize(
    ("number", "problem"),
    [(errno.ENOSPC, P.FULL), (errno.EDQUOT, P.FULL), (errno.EROFS, P.ACCESS_DENIED), (errno.EIO, P.FAILED)],
)
def test_a_folder_that_cannot_be_written_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, problem: StorageProblem
) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", broken)
    assert problem_of(lambda: probe(DirectoryStore(tmp_path), "a")) is problem


# ---- ownership (S6) -----------------------------------------------------------------------------------------


def owner(cluster: str = "ours", uid: str = "uid") -> Owner:
    return Owner(cluster=cluster, stack_uid=uid, namespace="team", name="demo")


def test_s6_the_first_cluster_keeps_a_stack_s_data(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    check_usable(store, owner("theirs"))
    claim(store, owner("theirs"))
    claim(store, owner("theirs"))  # again, as at each start
    for call in (claim, check_usable, check_deletable):
        with pytest.raises(
            StorageError, match=r"belongs to stack team/demo of the cluster with id theirs"
        ) as refused:
            call(store, owner("ours"))
        assert refused.value.problem is P.OWNED_BY_ANOTHER
    assert owner_of(store) == owner("theirs")
    check_deletable(store, owner("theirs"))


def test_s6_without_a_marker_nothing_is_deleted(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"has no owner\.json that says whose it is, so nothing of it is deleted"):
        check_deletable(DirectoryStore(tmp_path), owner())


def test_s6_an_operator_that_cannot_tell_its_cluster_goes_on_but_deletes_nothing_of_a_known_one(
    tmp_path: Path,
) -> None:
    store = DirectoryStore(tmp_path)
    claim(store, owner("ours"))
    claim(store, owner("uid"))
    with pytest.raises(StorageError):
        check_deletable(store, owner("uid"))


def test_s6_what_such_an_operator_claimed_is_the_stack_s_own(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    claim(store, owner("uid"))
    claim(store, owner("ours"))  # the same operator, with more rights
    check_deletable(store, owner("ours"))
    with pytest.raises(StorageError):
        check_deletable(store, owner("other", "other"))


def test_s6_a_marker_that_cannot_be_read_is_somebody_s(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.create(OWNER, b"{}")
    for call in (claim, check_usable, check_deletable):
        assert problem_of(lambda call=call: call(store, owner())) is P.OWNED_BY_ANOTHER  # type: ignore[misc]


# ---- refusals -----------------------------------------------------------------------------------------------


def response(code: str = "", status: int = 400, **more: str) -> dict[str, Any]:
    return {"Error": {"Code": code, **more}, "ResponseMetadata": {"HTTPStatusCode": status}}


def test_every_known_refusal_says_what_to_do() -> None:
    for code, (problem, advice) in KNOWN.items():
        error = refused(response(code), "s3://b/k", create_only=False, encrypted=False)
        assert (error.problem, advice in str(error), code in str(error)) == (problem, True, True)


@pytest.mark.parametrize("code", ["PreconditionFailed", "ConditionalRequestConflict", "412"])
def test_a_lost_race_is_a_conflict(code: str) -> None:
    assert isinstance(refused(response(code), "k", create_only=True, encrypted=False), ObjectConflict)


def test_a_missing_key_is_not_a_missing_bucket() -> None:
    assert isinstance(refused(response("NoSuchKey", 404), "k", create_only=False, encrypted=False), ObjectMissing)
    bucket = refused(response("NoSuchBucket", 404), "k", create_only=False, encrypted=False)
    assert bucket.problem is P.BUCKET_MISSING and not isinstance(bucket, ObjectMissing)


@pytest.mark.parametrize(
    ("code", "status", "create_only", "encrypted", "problem"),
    [
        ("NotImplemented", 501, True, True, P.CREATE_ONLY_UNSUPPORTED),
        ("NotImplemented", 501, False, True, P.ENCRYPTION_REFUSED),
        ("NotImplemented", 501, False, False, P.FAILED),
        ("InvalidEncryptionAlgorithmError", 400, False, True, P.ENCRYPTION_REFUSED),
        ("Strange", 503, False, False, P.BUSY),
        ("Strange", 507, True, False, P.FULL),
        ("Strange", 500, True, False, P.FAILED),
    ],
)
def test_what_a_refusal_means_depends_on_what_was_asked(
    code: str, status: int, create_only: bool, encrypted: bool, problem: StorageProblem
) -> None:
    assert refused(response(code, status), "k", create_only=create_only, encrypted=encrypted).problem is problem


def test_a_refusal_never_repeats_the_server_s_text() -> None:
    document = response("SignatureDoesNotMatch", 403, Message="AKIA very-secret", StringToSign="very-secret")
    assert "very-secret" not in str(refused(document, "k", create_only=False, encrypted=False))


def test_silence_of_an_unknown_kind_is_an_endpoint_that_cannot_be_reached() -> None:
    class ProxyConnectionError(Exception):
        pass

    error = unanswered(ProxyConnectionError("http://user:password@proxy"), "s3://b/k", None)
    assert error.problem is P.UNREACHABLE
    assert "password" not in str(error)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("EndpointConnectionError", "the endpoint https://s3:9000 cannot be reached; check `endpoint`"),
        ("ConnectTimeoutError", "the endpoint https://s3:9000 cannot be reached in time; check `endpoint`"),
        ("ReadTimeoutError", "the endpoint https://s3:9000 did not answer in time"),
        ("SSLError", "the certificate of the endpoint https://s3:9000 is not trusted"),
    ],
)
@pytest.mark.parametrize(
    "address",
    ["https://s3:9000", "https://user:pass@s3:9000/", "https://u:pa@ss@s3:9000", "https://u:pa?s/s#@s3:9000?pass"],
)
def test_an_endpoint_that_does_not_answer_is_named_without_its_password(name: str, says: str, address: str) -> None:
    error = str(unanswered(type(name, (Exception,), {})(), "s3://b/k", address))
    assert says in error
    assert "pa" not in error


# ---- access out of files ------------------------------------------------------------------------------------


def put(folder: Path, access: str, secret: str) -> None:
    (folder / "AWS_ACCESS_KEY_ID").write_text(f"{access}\n")
    (folder / "AWS_SECRET_ACCESS_KEY").write_text(secret)


def test_mounted_keys_are_looked_at_again_after_a_while_or_when_refused(tmp_path: Path) -> None:
    now = [0.0]
    put(tmp_path, "a", "b")
    mounted = MountedAccess(tmp_path, None, lambda: now[0])
    assert mounted.current().credentials == S3Credentials("a", "b")
    put(tmp_path, "c", "d")
    (tmp_path / "AWS_SESSION_TOKEN").write_text("e")
    assert mounted.current().credentials == S3Credentials("a", "b")
    now[0] = 5.0
    assert mounted.current().credentials == S3Credentials("c", "d", "e")
    put(tmp_path, "f", "g")
    assert mounted.again().credentials == S3Credentials("f", "g", "e")


def test_keys_of_two_versions_are_never_paired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "old", "old")
    read = Path.read_text
    changed = [False]

    def meanwhile(self: Path, *arguments: Any, **options: Any) -> str:
        text = read(self, *arguments, **options)
        if self.name == "AWS_ACCESS_KEY_ID" and not changed[0]:
            changed[0] = True
            put(tmp_path, "new", "new")
        return text

    monkeypatch.setattr(Path, "read_text", meanwhile)
    assert MountedAccess(tmp_path, None).current().credentials == S3Credentials("new", "new")


@pytest.mark.parametrize("content", [None, "", b"\xff"])
def test_keys_that_cannot_be_read_are_named(tmp_path: Path, content: str | bytes | None) -> None:
    put(tmp_path, "a", "b")
    path = tmp_path / "AWS_SECRET_ACCESS_KEY"
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(StorageError, match="AWS_SECRET_ACCESS_KEY") as refused_:
        MountedAccess(tmp_path, None).current()
    assert refused_.value.problem is P.CREDENTIALS_MISSING


def test_certificates_are_looked_at_like_keys(tmp_path: Path) -> None:
    now = [0.0]
    file = tmp_path / "ca.crt"
    file.write_text("one")
    mounted = MountedAccess(None, file, lambda: now[0])
    assert (mounted.current().ca, mounted.current().credentials) == ("one", None)
    file.write_text("two")
    now[0] = 5.0
    assert mounted.current().ca == "two"


def test_a_process_finds_its_access_by_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CREDENTIALS_FOLDER, raising=False)
    monkeypatch.delenv(CA_FILE, raising=False)
    assert access_of_process().current().credentials is None
    put(tmp_path, "a", "b")
    monkeypatch.setenv(CREDENTIALS_FOLDER, str(tmp_path))
    assert access_of_process().current().credentials == S3Credentials("a", "b")
    (tmp_path / "ca.crt").write_text("authorities")
    monkeypatch.setenv(CA_FILE, str(tmp_path / "ca.crt"))
    assert access_of_process().current().ca == "authorities"
