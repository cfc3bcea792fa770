"""Who we are to an S3 server and whose certificates we trust there, looked up again where that can change.

In a pod both are Secrets mounted as files, which the kubelet replaces while processes run: a rotation must cost
neither a checkpoint nor a process. Elsewhere they are given, or found by boto3 in its usual places.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gym_servers.storage.store import StorageError, StorageProblem

ACCESS_KEY: Final = "AWS_ACCESS_KEY_ID"
SECRET_KEY: Final = "AWS_SECRET_ACCESS_KEY"
SESSION_TOKEN: Final = "AWS_SESSION_TOKEN"
KEYS: Final = (ACCESS_KEY, SECRET_KEY)
CREDENTIALS_FOLDER: Final = "GYM_S3_CREDENTIALS_FOLDER"
"""Environment variable: a folder with a file for each key."""
CA_FILE: Final = "GYM_S3_CA_FILE"
"""Environment variable: a file with the certificates of the authorities to trust, in PEM form."""
LOOK_SECONDS: Final = 5.0
"""Between looks at files that may have been replaced."""
TRIES: Final = 5


@dataclass(frozen=True)
class S3Credentials:
    """A pair of keys. Never part of a log or an error."""

    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class S3Access:
    """`credentials` None: boto3's own search order. `ca` (PEM) None: the authorities that boto3 trusts by itself."""

    credentials: S3Credentials | None = None
    ca: str | None = field(default=None, repr=False)


class AccessSource:
    """Access as it was given last. Thread-safe."""

    def __init__(self, access: S3Access) -> None:
        self._access = access

    def replace(self, access: S3Access) -> None:
        """From the next request on."""
        self._access = access

    def current(self) -> S3Access:
        """As known now. Raises StorageError where it is missing."""
        return self._access

    def again(self) -> S3Access:
        """Looked up at once: what is known was refused. Raises StorageError."""
        return self._access


class MountedAccess(AccessSource):
    """Access out of files, either of which may be absent from the start but not go away."""

    def __init__(
        self, credentials: Path | None, ca: Path | None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(S3Access())
        self._credentials, self._ca, self._monotonic = credentials, ca, monotonic
        self._due = float("-inf")
        self._looking = threading.Lock()

    def current(self) -> S3Access:
        with self._looking:
            if self._monotonic() >= self._due:
                self._look()
            return self._access

    def again(self) -> S3Access:
        with self._looking:
            self._look()
            return self._access

    def _look(self) -> None:
        ca = _text(self._ca, "certificates") if self._ca is not None else None
        self._access = S3Access(_pair(self._credentials) if self._credentials is not None else None, ca)
        self._due = self._monotonic() + LOOK_SECONDS


def access_of_process() -> AccessSource:
    """The access that this process's environment names."""
    folder, ca = os.environ.get(CREDENTIALS_FOLDER), os.environ.get(CA_FILE)
    if folder or ca:
        return MountedAccess(Path(folder) if folder else None, Path(ca) if ca else None)
    return AccessSource(S3Access())


def _pair(folder: Path) -> S3Credentials:
    """Both keys of one version of the Secret: they are read until they are read twice the same."""
    last: S3Credentials | None = None
    for _ in range(TRIES):
        token = folder / SESSION_TOKEN
        found = S3Credentials(
            _text(folder / ACCESS_KEY, "credentials"),
            _text(folder / SECRET_KEY, "credentials"),
            _text(token, "credentials") if token.exists() else None,
        )
        if found == last:
            return found
        last = found
    raise StorageError(f"the S3 credentials in {folder} change all the time", StorageProblem.CREDENTIALS_MISSING)


def _text(path: Path, what: str) -> str:
    try:
        value = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(
            f"the S3 {what} cannot be read from {path}: {type(error).__name__}; check the Secret that is mounted",
            StorageProblem.CREDENTIALS_MISSING,
        ) from error
    if not value:
        raise StorageError(f"{path} is empty; give it a value in the Secret", StorageProblem.CREDENTIALS_MISSING)
    return value
