"""From a URI to a store: `s3://bucket/prefix`, or a directory."""

from __future__ import annotations

from pathlib import Path

from gym_servers.stack.settings import S3Settings
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.s3 import S3Credentials, S3Store
from gym_servers.storage.s3_access import AccessSource
from gym_servers.storage.store import ObjectStore, StorageError


def open_store(
    uri: str, s3: S3Settings | None = None, access: AccessSource | S3Credentials | None = None
) -> ObjectStore:
    """The store at `uri`. `s3` gives endpoint, region, addressing and encryption; the bucket and prefix are the
    URI's. Without `access`, the process's own is used.

    Raises StorageError for a URI of another kind.
    """
    if uri.startswith("s3://"):
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        if not bucket:
            raise StorageError(f"{uri!r} names no bucket; write s3://bucket/prefix")
        base = s3 or S3Settings(bucket=bucket)
        return S3Store(base.model_copy(update={"bucket": bucket, "prefix": prefix}), prefix, access)
    if "://" in uri and not uri.startswith("file://"):
        raise StorageError(f"{uri!r} is neither s3://bucket/prefix nor a directory")
    return DirectoryStore(Path(uri.removeprefix("file://")))


def join(uri: str, *parts: str) -> str:
    """A URI below another."""
    return "/".join([uri.rstrip("/"), *parts])
