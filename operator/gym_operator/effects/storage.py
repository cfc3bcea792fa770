"""A stack's storage, with the stack's own credentials, and whether it can be used.

One client serves all of a stack's checkpoints: making one costs a tenth of a second of CPU, which a recovery does not
have. Every call that blocks runs in a thread.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gym_operator.api.conditions import ConditionReason
from gym_operator.effects.kube import SECRETS, Kube, KubeError, NotFound
from gym_operator.rules.stack_status import Storage
from gym_servers.stack.render import s3_settings
from gym_servers.stack.spec import StorageSpec
from gym_servers.storage.locate import open_store
from gym_servers.storage.s3 import S3Credentials
from gym_servers.storage.store import ObjectStore, StorageError

BAD_SECONDS: Final = 30.0
"""Between probes of a storage that cannot be used."""
GOOD_SECONDS: Final = 600.0
"""Between probes of one that can: its use tells sooner."""
SECRET_SECONDS: Final = 15.0
"""Between looks at the credentials' Secret."""
MARKER: Final = ".gymops-probe"
KEYS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")

_UNKNOWN = Storage(None, ConditionReason.STORAGE_REACHABLE, "the storage is being looked at")


@dataclass(frozen=True)
class Below:
    """The part of an object store below a prefix."""

    store: ObjectStore
    prefix: str
    uri: str

    def create(self, key: str, data: bytes) -> None:
        self.store.create(f"{self.prefix}/{key}", data)

    def replace(self, key: str, data: bytes) -> None:
        self.store.replace(f"{self.prefix}/{key}", data)

    def get(self, key: str) -> bytes:
        return self.store.get(f"{self.prefix}/{key}")

    def list(self, prefix: str) -> dict[str, int]:
        found = self.store.list(f"{self.prefix}/{prefix}".rstrip("/"))
        return {key.removeprefix(f"{self.prefix}/"): size for key, size in found.items()}


class StackStorage:
    """The storage of one stack. `state` is what is known about it; `root` is where the cell keeps its checkpoints."""

    def __init__(self, kube: Kube, namespace: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._namespace, self._monotonic = kube, namespace, monotonic
        self.state = _UNKNOWN
        self._spec: StorageSpec | None = None
        self._root = ""
        self._credentials: S3Credentials | None = None
        self._secret_version: str | None = None
        self._missing: Storage | None = None
        self._bucket: ObjectStore | None = None
        self._secret_due = self._probe_due = float("-inf")
        self._probe: asyncio.Task[None] | None = None

    async def tend(self, spec: StorageSpec, root: str) -> None:
        """Keep up with the spec and its Secret; probe in the background when that is due. Raises KubeError."""
        now = self._monotonic()
        if (spec, root) != (self._spec, self._root):
            self._spec, self._root = spec, root
            self._bucket, self._secret_version = None, None
            self._secret_due = self._probe_due = float("-inf")
        if now >= self._secret_due:
            await self._read_secret()
            self._secret_due = now + SECRET_SECONDS
        if self._missing is not None:
            self.state = self._missing
        elif now >= self._probe_due and (self._probe is None or self._probe.done()):
            self._probe_due = float("inf")  # until this one has ended
            self._probe = asyncio.create_task(self._look())

    def open(self, uri: str) -> ObjectStore:
        """The store at `uri`. Blocks. Raises StorageError."""
        if self._missing is not None:
            raise StorageError(self._missing.message)
        s3 = self._spec.s3 if self._spec else None
        if s3 is None or not uri.startswith(f"s3://{s3.bucket}/"):
            return open_store(uri, s3_settings(s3) if s3 else None, self._credentials)
        if self._bucket is None:
            self._bucket = open_store(f"s3://{s3.bucket}", s3_settings(s3), self._credentials)
        return Below(self._bucket, uri.removeprefix(f"s3://{s3.bucket}/").strip("/"), uri)

    def failed(self, error: StorageError) -> None:
        """Somebody could not use the storage: look at it soon."""
        self.state = Storage(False, ConditionReason.STORAGE_FAILED, str(error))
        self._probe_due = min(self._probe_due, self._monotonic() + BAD_SECONDS)

    def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()

    async def _look(self) -> None:
        def use() -> None:
            # Create-only as everything that counts is; the same bytes again are a success.
            self.open(self._root).create(MARKER, b"gymops\n")

        try:
            await asyncio.to_thread(use)
        except StorageError as error:
            self.state = Storage(False, ConditionReason.STORAGE_FAILED, str(error))
        else:
            self.state = Storage(True, ConditionReason.STORAGE_REACHABLE, f"{self._root} can be written")
        self._probe_due = self._monotonic() + (GOOD_SECONDS if self.state.ok else BAD_SECONDS)

    async def _read_secret(self) -> None:
        name = self._spec.s3.credentials_secret if self._spec and self._spec.s3 else None
        if name is None:
            self._missing = None
            return
        try:
            secret = await self._kube.get(SECRETS, self._namespace, name)
        except NotFound:
            self._miss(f"there is no Secret {name} in this namespace; create it with the keys {' and '.join(KEYS)}")
            return
        except KubeError as error:
            if error.status != 403:
                raise
            self._miss(f"the operator may not read Secret {name}; give its role the right to get it")
            return
        version = secret["metadata"]["resourceVersion"]
        if version == self._secret_version:
            return
        try:
            values = [base64.b64decode(secret["data"][key]).decode().strip() for key in KEYS]
        except (KeyError, TypeError, binascii.Error, UnicodeDecodeError):
            values = []
        if not values or not all(values):
            self._miss(f"Secret {name} needs the keys {' and '.join(KEYS)}, each with a value")
            return
        self._credentials, self._secret_version = S3Credentials(*values), version
        self._missing, self._bucket = None, None
        self.state, self._probe_due = _UNKNOWN, float("-inf")

    def _miss(self, message: str) -> None:
        self._missing = Storage(False, ConditionReason.CREDENTIALS_MISSING, message)
        self._secret_version = None
