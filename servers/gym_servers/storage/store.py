"""The few operations checkpoints need of a place that keeps objects, and its errors.

    StorageError                what happened, and what to do about it
     ├─ ObjectMissing           no object under this key
     └─ ObjectConflict          other bytes are there already: objects are immutable

All calls block; callers on an event loop run them in threads. Keys are `/`-separated and relative to the store.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol


class StorageProblem(StrEnum):
    """What is wrong with a storage, in one word: a condition's reason, and what an alert is about."""

    FAILED = "StorageFailed"
    UNREACHABLE = "StorageUnreachable"
    SLOW = "StorageSlow"
    BUSY = "StorageBusy"
    FULL = "StorageFull"
    CREDENTIALS_MISSING = "CredentialsMissing"
    CREDENTIALS_REFUSED = "CredentialsRefused"
    CLOCK_SKEWED = "ClockSkewed"
    ACCESS_DENIED = "AccessDenied"
    BUCKET_MISSING = "BucketMissing"
    REGION_WRONG = "RegionWrong"
    CERTIFICATE_REFUSED = "CertificateRefused"
    ENCRYPTION_REFUSED = "EncryptionRefused"
    CREATE_ONLY_UNSUPPORTED = "CreateOnlyUnsupported"
    BYTES_CHANGED = "BytesChanged"
    OWNED_BY_ANOTHER = "OwnedByAnother"


class StorageError(Exception):
    """The store cannot be used; the message says why and what to change, never a credential."""

    def __init__(self, message: str, problem: StorageProblem = StorageProblem.FAILED) -> None:
        super().__init__(message)
        self.problem = problem


class ObjectMissing(StorageError):
    """There is no object under this key."""


class ObjectConflict(StorageError):
    """Another object exists under this key. What is there stands."""


class ObjectStore(Protocol):
    """A place for immutable objects. Every method raises StorageError where the store is out of reach."""

    @property
    def uri(self) -> str:
        """Where this store is, as written into status and logs."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Write once, durably. The same bytes again are a success, others raise ObjectConflict."""
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Write whatever is there. Only for hints that carry no truth."""
        ...

    def get(self, key: str) -> bytes:
        """The object's bytes. Raises ObjectMissing."""
        ...

    def fingerprint(self, key: str) -> tuple[int, str]:
        """The object's size in bytes and its SHA-256, read in pieces: it may be larger than what memory is left.
        Raises ObjectMissing."""
        ...

    def list(self, prefix: str) -> dict[str, int]:
        """Keys below a prefix, with sizes in bytes."""
        ...

    def delete(self, key: str) -> None:
        """Remove an object. One that is not there is a success."""
        ...
