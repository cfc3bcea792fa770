"""A stack's storage, with the stack's own credentials and trust, and whether it does what checkpoints stand on.

One client serves all of a stack's checkpoints, so that its connections stand when a recovery needs them. Every call
that blocks runs in a thread.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import secrets
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from gym_operator.api import names
from gym_operator.api.conditions import ConditionReason
from gym_operator.effects.accesses import Accesses
from gym_operator.effects.kube import SECRETS, Kube, KubeError, NotFound
from gym_operator.rules.observed import Storage
from gym_servers.stack.render import s3_settings
from gym_servers.stack.spec import S3Spec, StorageSpec
from gym_servers.storage.locate import open_store
from gym_servers.storage.ownership import Owner, check_usable, claim
from gym_servers.storage.probe import probe
from gym_servers.storage.s3_access import KEYS, SESSION_TOKEN, AccessSource, S3Access, S3Credentials
from gym_servers.storage.store import ObjectStore, StorageError, StorageProblem

log = logging.getLogger(__name__)

BAD_SECONDS: Final = 30.0
"""Between probes of a storage that cannot be used."""
GOOD_SECONDS: Final = 600.0
"""Between probes of one that can: its use tells sooner."""
SECRET_SECONDS: Final = 15.0
"""Between looks at the Secrets with credentials and certificates."""

T = TypeVar("T")

_UNPROVED = Storage(None, ConditionReason.STORAGE_UNPROVED, "the storage is being tried")


@dataclass(frozen=True)
class Below:
    """The part of an object store below a prefix. `progressed` is told of each use that had an answer."""

    store: ObjectStore
    prefix: str
    uri: str
    progressed: Callable[[], None] = lambda: None

    def create(self, key: str, data: bytes) -> None:
        self._told(self.store.create, f"{self.prefix}/{key}", data)

    def replace(self, key: str, data: bytes) -> None:
        self._told(self.store.replace, f"{self.prefix}/{key}", data)

    def get(self, key: str) -> bytes:
        return self._told(self.store.get, f"{self.prefix}/{key}")

    def fingerprint(self, key: str) -> tuple[int, str]:
        return self._told(self.store.fingerprint, f"{self.prefix}/{key}")

    def list(self, prefix: str) -> dict[str, int]:
        found = self._told(self.store.list, f"{self.prefix}/{prefix}".rstrip("/"))
        return {key.removeprefix(f"{self.prefix}/"): size for key, size in found.items()}

    def delete(self, key: str) -> None:
        self._told(self.store.delete, f"{self.prefix}/{key}")

    def _told(self, use: Callable[..., T], *arguments: Any) -> T:
        found = use(*arguments)
        self.progressed()
        return found


class _Absent(StorageError):
    """A Secret is not there."""


class StackStorage:
    """The storage of one stack. `state` is what is known about it; `owner` is who claims it, once it is proved.
    `progressed` is told, in any thread, of each use of the bucket that had an answer. `remembered`: its Secrets are
    gone, and it is reached as they said last."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        monotonic: Callable[[], float] = time.monotonic,
        owner: Owner | None = None,
        progressed: Callable[[], None] = lambda: None,
        accesses: Accesses | None = None,
    ) -> None:
        self._kube, self._namespace, self._monotonic, self._owner = kube, namespace, monotonic, owner
        self._progressed = progressed
        self._accesses = accesses if accesses is not None else Accesses()
        self.state = _UNPROVED
        self.remembered = False
        self._spec: StorageSpec | None = None
        self._root = ""
        self._access = AccessSource(S3Access())
        self._missing: StorageError | None = None
        self._bucket: ObjectStore | None = None
        self._secrets_due = self._probe_due = float("-inf")
        self._probe: asyncio.Task[None] | None = None

    async def tend(self, spec: StorageSpec, root: str) -> None:
        """Keep up with the spec and its Secrets; probe in the background when that is due. `root` is the stack's
        part of the storage. Raises KubeError."""
        now = self._monotonic()
        if (spec, root) != (self._spec, self._root):
            self._spec, self._root = spec, root
            self._bucket, self.state = None, _UNPROVED
            self._secrets_due = self._probe_due = float("-inf")
            self._end_probe()  # of what was there before
        if now >= self._secrets_due:
            await self._read_secrets(spec.s3)
            self._secrets_due = now + SECRET_SECONDS
        if self._missing is not None:
            self.state = _bad(self._missing)
        elif now >= self._probe_due and (self._probe is None or self._probe.done()):
            self._probe_due = float("inf")  # until this one has ended
            self._probe = asyncio.create_task(self._look())

    async def read(self, spec: StorageSpec) -> None:
        """Learn how it is reached without trying whether it can be written: for who only takes away, also where the
        Secrets went first. Raises KubeError."""
        self._spec = spec
        await self._read_secrets(spec.s3)
        last = self._accesses.last(self._namespace, spec.s3)
        if isinstance(self._missing, _Absent) and last is not None:
            self._missing, self.remembered = None, True
            self._access.replace(last)

    def open(self, uri: str) -> ObjectStore:
        """The store at `uri`. Blocks. Raises StorageError."""
        if self._missing is not None:
            raise StorageError(str(self._missing), self._missing.problem)
        s3 = self._spec.s3 if self._spec else None
        if s3 is None or not uri.startswith(f"s3://{s3.bucket}/"):
            return open_store(uri, s3_settings(s3) if s3 else None, self._access)
        if self._bucket is None:
            self._bucket = open_store(f"s3://{s3.bucket}", s3_settings(s3), self._access)
        return Below(self._bucket, uri.removeprefix(f"s3://{s3.bucket}/").strip("/"), uri, self._progressed)

    def failed(self, error: StorageError) -> None:
        """Somebody could not use the storage: look at it soon."""
        self.state = _bad(error)
        self._probe_due = min(self._probe_due, self._monotonic() + BAD_SECONDS)

    def close(self) -> None:
        self._end_probe()

    def _end_probe(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            self._probe = None

    async def _look(self) -> None:
        def use() -> None:
            store = self.open(self._root)
            if self._owner is not None:
                check_usable(store, self._owner)  # before anything is written there
            probe(store, secrets.token_hex(8))
            if self._owner is not None:
                claim(store, self._owner)

        try:
            await asyncio.to_thread(use)
        except StorageError as error:
            self.state = _bad(error)
        except Exception:  # a fault of ours: said, and tried again like any other
            log.exception("the storage at %s could not be tried", self._root)
            message = f"{self._root} could not be tried; the operator's log says why"
            self.state = Storage(False, StorageProblem.FAILED, message)
        else:
            done = f"{self._root} was written, read back with the same bytes, and refused a second creation"
            self.state = Storage(True, ConditionReason.STORAGE_REACHABLE, done)
        self._probe_due = self._monotonic() + (GOOD_SECONDS if self.state.ok else BAD_SECONDS)

    # ---- Secrets ------------------------------------------------------------------------------------------

    async def _read_secrets(self, s3: S3Spec | None) -> None:
        """What the Secrets say now. A change is noticed by the client that is there already, and tried at once."""
        try:
            credentials = await self._credentials(s3.credentials_secret) if s3 and s3.credentials_secret else None
            ca = await self._authorities(s3.ca_secret) if s3 and s3.ca_secret else None
        except StorageError as error:
            self._missing = error
            return
        access = S3Access(credentials, ca)
        self._accesses.note(self._namespace, s3, access)
        if self._missing is not None or access != self._access.current():
            self._missing, self.state, self._probe_due = None, _UNPROVED, float("-inf")
            self._end_probe()  # of the access before
            self._access.replace(access)

    async def _credentials(self, name: str) -> S3Credentials:
        data = await self._secret(name, KEYS, StorageProblem.CREDENTIALS_MISSING)
        values = [_decoded(data, key) for key in KEYS]
        if not all(values):
            raise StorageError(
                f"Secret {name} needs the keys {' and '.join(KEYS)}, each with a value",
                StorageProblem.CREDENTIALS_MISSING,
            )
        return S3Credentials(values[0], values[1], _decoded(data, SESSION_TOKEN) or None)

    async def _authorities(self, name: str) -> str:
        data = await self._secret(name, (names.CA_KEY,), StorageProblem.CERTIFICATE_REFUSED)
        ca = _decoded(data, names.CA_KEY)
        try:
            ssl.create_default_context(cadata=ca or "none")
        except (ssl.SSLError, ValueError, TypeError) as error:
            raise StorageError(
                f"Secret {name} needs the key {names.CA_KEY} with the certificates of the endpoint's authorities in "
                "PEM form",
                StorageProblem.CERTIFICATE_REFUSED,
            ) from error
        return ca

    async def _secret(self, name: str, keys: Sequence[str], problem: StorageProblem) -> Mapping[str, Any]:
        try:
            secret = await self._kube.get(SECRETS, self._namespace, name)
        except NotFound as error:
            raise _Absent(
                f"there is no Secret {name} in this namespace; create it with the keys {' and '.join(keys)}", problem
            ) from error
        except KubeError as error:
            if error.status != 403:
                raise
            raise StorageError(
                f"the operator may not read Secret {name}; give its role the right to get it", problem
            ) from error
        return secret.get("data") or {}


def _bad(error: StorageError) -> Storage:
    return Storage(False, error.problem, str(error))


def _decoded(data: Mapping[str, Any], key: str) -> str:
    """A value of a Secret; empty where there is none that is a text."""
    try:
        return base64.b64decode(data[key]).decode().strip()
    except (KeyError, TypeError, binascii.Error, UnicodeDecodeError):
        return ""
