"""Whose data this is: a marker below each stack's root, written once by the first cluster that uses it.

A stack's folder is named by its UID, so two stacks never share one; two clusters may, where one was made from a copy
of the other's state. Only the cluster of the marker writes and deletes there.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gym_servers.protocol.digests import canonical
from gym_servers.storage.store import ObjectConflict, ObjectMissing, ObjectStore, StorageError, StorageProblem

OWNER: Final = "owner.json"


class Owner(BaseModel):
    """A stack of a cluster. `cluster` is the UID of the cluster's kube-system namespace; of the stack, where that
    cannot be read."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    format: Literal[1] = 1
    cluster: str
    stack_uid: str
    namespace: str
    name: str

    @property
    def knows_its_cluster(self) -> bool:
        return self.cluster != self.stack_uid


def root_of(uri: str, stack_uid: str) -> str | None:
    """The stack root that something lies in; None where it is elsewhere, as somebody's copy is."""
    above, found, _ = uri.partition(f"/{stack_uid}/")
    return f"{above}/{stack_uid}" if found else None


def owner_of(store: ObjectStore) -> Owner | None:
    """The owner of the stack root that `store` is, None where nobody has claimed it. Blocks. Raises StorageError."""
    try:
        data = store.get(OWNER)
    except ObjectMissing:
        return None
    try:
        return Owner.model_validate_json(data)
    except ValidationError as error:
        raise StorageError(
            f"{store.uri}/{OWNER} is not of a form this version reads, so it is nobody's to write or delete; "
            "give the stack another prefix",
            StorageProblem.OWNED_BY_ANOTHER,
        ) from error


def check_usable(store: ObjectStore, us: Owner) -> None:
    """Raises StorageError with OWNED_BY_ANOTHER where another cluster has claimed the stack root. Blocks.

    Who cannot tell its own cluster, and what was claimed by such a one, is taken at its word: the stack's UID is the
    same.
    """
    stands = owner_of(store)
    if stands is not None and (stands.stack_uid != us.stack_uid or _differ(stands, us, or_unknown=False)):
        raise _another(store, stands)


def claim(store: ObjectStore, us: Owner) -> None:
    """Make the stack root ours unless it is somebody's. Blocks. Raises StorageError as `check_usable`."""
    with suppress(ObjectConflict):
        store.create(OWNER, canonical(us.model_dump(mode="json")))
    check_usable(store, us)


def check_deletable(store: ObjectStore, us: Owner) -> None:
    """Raises StorageError with OWNED_BY_ANOTHER unless the marker says that the stack root's data is ours: without a
    marker, or under another cluster's, nothing is deleted, nor by who cannot tell its cluster. Blocks."""
    stands = owner_of(store)
    if stands is None:
        raise StorageError(
            f"{store.uri} has no {OWNER} that says whose it is, so nothing of it is deleted; delete it by hand",
            StorageProblem.OWNED_BY_ANOTHER,
        )
    if stands.stack_uid != us.stack_uid or _differ(stands, us, or_unknown=True):
        raise _another(store, stands)


def _differ(stands: Owner, us: Owner, *, or_unknown: bool) -> bool:
    """Whether these are two clusters; `or_unknown`: also where ours is not known."""
    if not stands.knows_its_cluster or not (us.knows_its_cluster or or_unknown):
        return False
    return stands.cluster != us.cluster


def _another(store: ObjectStore, stands: Owner) -> StorageError:
    return StorageError(
        f"{store.uri} belongs to stack {stands.namespace}/{stands.name} of the cluster with id "
        f"{stands.cluster[:64]}: this cluster neither writes nor deletes there; give the stack another prefix",
        StorageProblem.OWNED_BY_ANOTHER,
    )
