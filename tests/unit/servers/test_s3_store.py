"""Answers of an S3 server that are cut short: nothing comes out of the store but whole bytes and StorageError."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import boto3.session
import pytest
from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError

from gym_servers.protocol.digests import sha256
from gym_servers.stack.settings import S3Settings
from gym_servers.storage.s3 import S3Credentials, S3Store
from gym_servers.storage.store import StorageError

ENDPOINT = "http://s3"
CUT = {
    "in the middle": ResponseStreamingError(error="connection broken"),
    "short": IncompleteReadError(actual_bytes=3, expected_bytes=5),
}
SLOW = ReadTimeoutError(endpoint_url=ENDPOINT, error="timed out")


class Client:
    """Answers every request, but `failures` come while a body is read."""

    meta = SimpleNamespace(endpoint_url=ENDPOINT)

    def __init__(self, failures: list[Exception]) -> None:
        self.failures = failures
        self.asked = 0

    def get_object(self, **_: Any) -> dict[str, Any]:
        self.asked += 1
        return {"Body": self}

    def read(self) -> bytes:
        if self.failures:
            raise self.failures.pop(0)
        return b"whole"

    def iter_chunks(self, size: int) -> Iterator[bytes]:
        yield b"wh"
        if self.failures:
            raise self.failures.pop(0)
        yield b"ole"


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made = Client([])
    monkeypatch.setattr(boto3.session.Session, "client", lambda *_, **__: made)
    return made


def test_many_stores_share_one_description_of_the_service() -> None:
    """It takes 12 MiB: an operator with hundreds of stacks has one."""
    stores = [S3Store(S3Settings(bucket="bucket"), "prefix", S3Credentials("key", str(i))) for i in range(3)]
    models = {id(each._client()[1].meta.service_model._service_description) for each in stores}
    assert len({id(each._client()[1]) for each in stores}) == 3
    assert len(models) == 1


def store() -> S3Store:
    return S3Store(S3Settings(bucket="bucket", endpoint=ENDPOINT), "prefix")


@pytest.mark.parametrize("how", CUT)
def test_a_body_that_is_cut_is_asked_for_again(client: Client, how: str) -> None:
    client.failures = [CUT[how]] * 2
    assert store().get("key") == b"whole"
    assert client.asked == 3


@pytest.mark.parametrize("error", [*CUT.values(), SLOW], ids=[*CUT, "slow"])
def test_a_body_that_never_comes_whole_is_an_error_of_the_storage(client: Client, error: Exception) -> None:
    client.failures = [error] * 100
    with pytest.raises(StorageError, match=f"s3://bucket/prefix/key: {type(error).__name__}: the ") as failed:
        store().get("key")
    assert client.asked <= 5
    assert "http" not in str(failed.value).replace(f"the endpoint {ENDPOINT} did", "")


@pytest.mark.parametrize("how", CUT)
def test_a_fingerprint_is_taken_piece_by_piece_and_of_a_whole_body_only(client: Client, how: str) -> None:
    client.failures = [CUT[how]] * 2
    assert store().fingerprint("key") == (5, sha256(b"whole"))
    assert client.asked == 3
    client.failures = [CUT[how]] * 100
    with pytest.raises(StorageError, match=type(CUT[how]).__name__):
        store().fingerprint("key")
