"""Ways into storages as their Secrets said last, for removals alone.

A namespace that is deleted loses its Secrets and its GymCheckpoints in any order. Data that is to go with a
checkpoint is removed all the same, with what the operator knew a moment before.
"""

from __future__ import annotations

from collections.abc import Collection

from gym_servers.stack.spec import S3Spec
from gym_servers.storage.s3_access import S3Access

_Names = tuple[str, str | None, str | None]


class Accesses:
    """By namespace and the names of the Secrets, for as long as something in the namespace may need them."""

    def __init__(self) -> None:
        self._known: dict[_Names, S3Access] = {}

    def note(self, namespace: str, s3: S3Spec | None, access: S3Access) -> None:
        """The Secrets are there, and say this."""
        if s3 is not None:
            self._known[_names(namespace, s3)] = access

    def last(self, namespace: str, s3: S3Spec | None) -> S3Access | None:
        """What they have said, None where this operator has never read them."""
        return self._known.get(_names(namespace, s3)) if s3 is not None else None

    def keep(self, namespaces: Collection[str]) -> None:
        """Forget those of all other namespaces."""
        self._known = {names: access for names, access in self._known.items() if names[0] in namespaces}


def _names(namespace: str, s3: S3Spec) -> _Names:
    return namespace, s3.credentials_secret, s3.ca_secret
