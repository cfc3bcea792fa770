"""An S3 bucket as an object store, by boto3.

Creation is `PutObject` with `If-None-Match: *`: one writer wins, and what landed is compared with what was meant.
Outside AWS the checksum trailers of newer clients are off, because some servers store them inside the object; our
own digests are checked where objects are read back.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal, TypeVar
from urllib.parse import urlsplit

from gym_servers.protocol.digests import sha256
from gym_servers.stack.settings import S3Encryption, S3Settings
from gym_servers.storage.s3_access import AccessSource, S3Access, S3Credentials, access_of_process
from gym_servers.storage.s3_errors import STALE, code_of, refused, unanswered
from gym_servers.storage.store import ObjectConflict, ObjectMissing, StorageError, StorageProblem

__all__ = ["S3Credentials", "S3Store"]

CONNECT_SECONDS: Final = 5
READ_SECONDS: Final = 30
"""A server that takes longer for one object is as good as away."""
REQUEST_TRIES: Final = 4
PIECE_BYTES: Final = 1024 * 1024
BODY_TRIES: Final = 3
"""boto3 repeats requests, but not the reading of an answer that was cut."""

T = TypeVar("T")


class S3Store:
    """Objects below a prefix of a bucket. Thread-safe. `access` is asked for credentials and trust before each
    request; without it the process's own are used."""

    def __init__(self, settings: S3Settings, prefix: str, access: AccessSource | S3Credentials | None = None) -> None:
        self._settings = settings
        self._bucket, self._prefix = settings.bucket, prefix.strip("/")
        if isinstance(access, S3Credentials):
            access = AccessSource(S3Access(access))
        self._source = access_of_process() if access is None else access
        self._encryption = _encryption(settings.encryption)
        self._making = threading.Lock()
        self._made: tuple[S3Access, Any] | None = None

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}" if self._prefix else f"s3://{self._bucket}"

    def create(self, key: str, data: bytes) -> None:
        try:
            self._put(key, data, IfNoneMatch="*")
        except ObjectConflict:
            # A retry after a lost reply finds our own object: only other bytes are a conflict.
            if self.get(key) != data:
                raise

    def replace(self, key: str, data: bytes) -> None:
        self._put(key, data)

    def get(self, key: str) -> bytes:
        def read(client: Any) -> bytes:
            body: bytes = client.get_object(Bucket=self._bucket, Key=self._key(key))["Body"].read()
            return body

        return self._request(f"{self.uri}/{key}", read, tries=BODY_TRIES)

    def fingerprint(self, key: str) -> tuple[int, str]:
        def read(client: Any) -> tuple[int, str]:
            return _fingerprint(client.get_object(Bucket=self._bucket, Key=self._key(key))["Body"])

        return self._request(f"{self.uri}/{key}", read, tries=BODY_TRIES)

    def list(self, prefix: str) -> dict[str, int]:
        base = self._key(prefix) if prefix else self._prefix
        found: dict[str, int] = {}
        strip = len(self._prefix) + 1 if self._prefix else 0
        arguments = {"Bucket": self._bucket, "Prefix": f"{base}/" if base else ""}
        while True:
            page = self._request(self.uri, lambda client: client.list_objects_v2(**arguments))
            for item in page.get("Contents", []):
                found[item["Key"][strip:]] = item["Size"]
            if not page.get("IsTruncated"):
                return found
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str) -> None:
        place = {"Bucket": self._bucket, "Key": self._key(key)}
        with suppress(ObjectMissing):
            self._request(f"{self.uri}/{key}", lambda client: client.delete_object(**place))

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _put(self, key: str, data: bytes, **condition: str) -> None:
        arguments = {"Bucket": self._bucket, "Key": self._key(key), "Body": data, **condition, **self._encryption}
        self._request(f"{self.uri}/{key}", lambda client: client.put_object(**arguments), create_only=bool(condition))

    def _request(self, where: str, ask: Callable[[Any], T], *, create_only: bool = False, tries: int = 1) -> T:
        """Ask the server; once more where credentials were replaced meanwhile, or an answer was cut."""
        from botocore.exceptions import BotoCoreError, ClientError, IncompleteReadError, ResponseStreamingError

        looked_again, endpoint = False, self._settings.endpoint
        while True:
            try:
                access, client = self._client()
                endpoint = client.meta.endpoint_url  # also where the environment or the region says it
                return ask(client)
            except ClientError as error:
                if code_of(error.response) in STALE and not looked_again and self._source.again() != access:
                    looked_again = True
                    continue
                raise refused(
                    error.response, where, create_only=create_only, encrypted=bool(self._encryption)
                ) from error
            except (IncompleteReadError, ResponseStreamingError) as error:
                tries -= 1
                if tries <= 0:
                    raise unanswered(error, where, endpoint) from error
            except BotoCoreError as error:
                raise unanswered(error, where, endpoint) from error

    def _client(self) -> tuple[S3Access, Any]:
        """A client for the access as it is now, made when that has changed."""
        access = self._source.current()
        with self._making:
            if self._made is None or self._made[0] != access:
                self._made = (access, self._make(access))
            return self._made

    def _make(self, access: S3Access) -> Any:
        from botocore.exceptions import BotoCoreError

        try:
            if self._settings.endpoint is None:
                client = self._client_with(access, "when_supported")
                if _is_aws(client.meta.endpoint_url):  # else the environment names another server
                    return client
            return self._client_with(access, "when_required")
        except BotoCoreError:
            raise
        except ValueError as error:  # boto3's own word for an address that is none
            raise StorageError(
                f"{self.uri}: `endpoint` is not an address such as https://s3.example:9000",
                StorageProblem.UNREACHABLE,
            ) from error

    def _client_with(self, access: S3Access, checksums: Literal["when_supported", "when_required"]) -> Any:
        from botocore.config import Config

        settings, credentials = self._settings, access.credentials
        return _made(
            "s3",
            endpoint_url=settings.endpoint,
            region_name=settings.region,
            verify=_bundle(access.ca) if access.ca is not None else None,
            aws_access_key_id=credentials.access_key if credentials else None,
            aws_secret_access_key=credentials.secret_key if credentials else None,
            aws_session_token=credentials.session_token if credentials else None,
            config=Config(
                s3={"addressing_style": settings.addressing_style},
                request_checksum_calculation=checksums,
                response_checksum_validation=checksums,
                connect_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS,
                retries={"mode": "standard", "total_max_attempts": REQUEST_TRIES},
                max_pool_connections=32,
            ),
        )


def _is_aws(address: str) -> bool:
    return (urlsplit(address).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))


_MAKING: Final = threading.Lock()


def _made(service: str, **options: Any) -> Any:
    """A client of the session that all share. One of its own has its own description of the service beside it: 12 MiB
    and a fifth of a second for each stack of an operator. Sessions are not thread-safe, clients are."""
    with _MAKING:
        return _session().client(service, **options)


@cache
def _session() -> Any:
    # Imported here: loading boto3 takes most of a second, and only processes that use S3 pay for it.
    import boto3

    return boto3.session.Session()


def _fingerprint(body: Any) -> tuple[int, str]:
    """Size and SHA-256 of an answer's body. What is cut short ends in an error of the body's own."""
    size, digest = 0, hashlib.sha256()
    for piece in body.iter_chunks(PIECE_BYTES):
        size += len(piece)
        digest.update(piece)
    return size, digest.hexdigest()


def _encryption(wanted: S3Encryption | None) -> dict[str, str]:
    """What every write says about encryption at rest."""
    match wanted:
        case None:
            return {}
        case S3Encryption(type="SSE-S3"):
            return {"ServerSideEncryption": "AES256"}
        case _:
            key = {"SSEKMSKeyId": wanted.kms_key_id} if wanted.kms_key_id else {}
            return {"ServerSideEncryption": "aws:kms", **key}


def _bundle(ca: str) -> str:
    """A file with these certificates, since boto3 takes no others. Named by their digest: the same ones, one file."""
    path = _private_folder() / f"{sha256(ca.encode())}.pem"
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(ca)
        Path(file.name).replace(path)
    return str(path)


@cache
def _private_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="gym-ca-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
