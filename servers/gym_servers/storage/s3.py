"""An S3 bucket as an object store, by boto3.

Creation is `PutObject` with `If-None-Match: *`: one writer wins, and what landed is compared with what was meant.
Outside AWS the checksum trailers of newer clients are off, because some servers store them inside the object; our
own digests are checked where objects are read back.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gym_servers.stack.settings import S3Settings
from gym_servers.storage.store import ObjectConflict, ObjectMissing, StorageError

_ADVICE = {
    "NoSuchBucket": "the bucket does not exist; create it or correct its name",
    "AccessDenied": "the credentials may not do this; check the bucket policy and the credentials' rights",
    "InvalidAccessKeyId": "the access key is unknown; check the credentials secret",
    "SignatureDoesNotMatch": "the secret key is wrong; check the credentials secret",
    "InvalidBucketName": "the bucket's name is not valid",
    "PermanentRedirect": "the bucket is in another region; set `region`",
}
_LOST_RACE = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
_MISSING = {"NoSuchKey", "404", "NotFound"}


@dataclass(frozen=True)
class S3Credentials:
    """A pair of keys, for whoever serves several buckets. Never part of a log or an error."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)


class S3Store:
    """Objects below a prefix of a bucket. Thread-safe. Without `credentials`, boto3's own search order is used."""

    def __init__(self, settings: S3Settings, prefix: str, credentials: S3Credentials | None = None) -> None:
        # Imported here: loading boto3 takes most of a second, and only processes that use S3 pay for it.
        import boto3
        from botocore.config import Config

        aws = settings.endpoint is None
        self._bucket, self._prefix = settings.bucket, prefix.strip("/")
        self._client: Any = boto3.session.Session().client(
            "s3",
            endpoint_url=settings.endpoint,
            region_name=settings.region,
            aws_access_key_id=credentials.access_key if credentials else None,
            aws_secret_access_key=credentials.secret_key if credentials else None,
            config=Config(
                s3={"addressing_style": settings.addressing_style},
                request_checksum_calculation="when_supported" if aws else "when_required",
                response_checksum_validation="when_supported" if aws else "when_required",
                connect_timeout=5,
                read_timeout=30,
                retries={"mode": "standard", "total_max_attempts": 4},
                max_pool_connections=32,
            ),
        )

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}" if self._prefix else f"s3://{self._bucket}"

    def create(self, key: str, data: bytes) -> None:
        try:
            self._call("put_object", key, Body=data, IfNoneMatch="*")
        except ObjectConflict:
            # A retry after a lost reply finds our own object: only other bytes are a conflict.
            if self.get(key) != data:
                raise

    def replace(self, key: str, data: bytes) -> None:
        self._call("put_object", key, Body=data)

    def get(self, key: str) -> bytes:
        body: bytes = self._call("get_object", key)["Body"].read()
        return body

    def list(self, prefix: str) -> dict[str, int]:
        base = self._key(prefix) if prefix else self._prefix
        found: dict[str, int] = {}
        strip = len(self._prefix) + 1 if self._prefix else 0
        token: dict[str, str] = {}
        while True:
            page = self._request(
                "list_objects_v2", self.uri, Bucket=self._bucket, Prefix=f"{base}/" if base else "", **token
            )
            for item in page.get("Contents", []):
                found[item["Key"][strip:]] = item["Size"]
            if not page.get("IsTruncated"):
                return found
            token = {"ContinuationToken": page["NextContinuationToken"]}

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key

    def _call(self, operation: str, key: str, **arguments: Any) -> Any:
        return self._request(operation, f"{self.uri}/{key}", Bucket=self._bucket, Key=self._key(key), **arguments)

    def _request(self, operation: str, where: str, **arguments: Any) -> Any:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            return getattr(self._client, operation)(**arguments)
        except ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", "unknown"))
            if code in _LOST_RACE:
                raise ObjectConflict(f"{where} exists already") from error
            if code in _MISSING:
                raise ObjectMissing(f"{where} does not exist") from error
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            advice = _ADVICE.get(code)
            if advice is None and isinstance(status, int) and status >= 500:
                advice = "the storage server failed; check its health and free space"
            raise StorageError(f"{where}: {code}: {advice or 'the request was refused'}") from error
        except BotoCoreError as error:
            name = type(error).__name__
            if name == "NoCredentialsError":
                raise StorageError(f"{where}: no S3 credentials; give a credentials secret or a role") from error
            raise StorageError(f"{where}: {name}: the endpoint cannot be reached; check `endpoint`") from error
