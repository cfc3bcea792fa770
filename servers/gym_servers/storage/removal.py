"""Removing a checkpoint's data, and only its own.

Whose it is says `holder.json`, written create-only by whoever claims it first: of two GymCheckpoints that stand for
the same data one removes it. The order in which objects go makes every moment safe to be interrupted in:

    checkpoint.json   nobody begins to restore it from now on
    manifests, packs  packs that another manifest names stay
    proposal.json     the same bytes as checkpoint.json: it proves what is being removed until all else is gone
    holder.json

Nothing is ever written.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from gym_servers.protocol.digests import canonical, sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.cells import CHECKPOINTS, PROPOSAL
from gym_servers.storage.manifest import CHECKPOINT, MANIFEST, Publication, read_manifest, read_publication
from gym_servers.storage.store import ObjectMissing, ObjectStore

HOLDER: Final = "holder.json"
PARALLEL: Final = 8


class NotOurs(Exception):
    """Nothing was removed: what is there is not proved to be the claimant's. The text says why, for people."""


@dataclass(frozen=True)
class Claim:
    """What is to be removed, and in whose name. `digest` is the SHA-256 of its checkpoint.json, None where it was
    never published; `holder` is the claimant, as it stands in holder.json."""

    stack_uid: str
    checkpoint_id: str
    digest: str | None
    holder: str


@dataclass(frozen=True)
class Removed:
    """What became of it: objects that are gone, and what stays because another checkpoint needs it."""

    objects: int
    shared: tuple[str, ...] = ()


def hold(store: ObjectStore, holder: str) -> None:
    """Claim the checkpoint in `store` for `holder`; a claim stands for good. Blocks.

    Raises ObjectConflict where somebody else has claimed it.
    """
    store.create(HOLDER, canonical({"holder": holder}))


def remove(above: ObjectStore, directory: str, claim: Claim) -> Removed:
    """Remove the checkpoint that is in `directory` of the store above it. Repeatable: what is gone is gone. Blocks.

    Raises NotOurs, StorageError.
    """
    present = sorted(above.list(directory))
    if not present:
        return Removed(0)
    stays = _prove(above, directory, present, claim)
    # A checkpoint is only ever built upon once it is published.
    shared = _named_by_others(above, directory) & set(present) if claim.digest is not None else set[str]()
    first, last = f"{directory}/{CHECKPOINT}", [f"{directory}/{PROPOSAL}", f"{directory}/{HOLDER}"]
    manifests = [key for key in present if posixpath.basename(key) == MANIFEST]
    between = [key for key in present if key not in {first, *last, *manifests, *shared, *stays}]
    doomed = 0
    for stage in ([first] if first not in stays else [], manifests, between, *([key] for key in last)):
        doomed += _delete(above, [key for key in stage if key in present])
    return Removed(doomed, tuple(sorted(shared)))


def _prove(above: ObjectStore, directory: str, present: Iterable[str], claim: Claim) -> set[str]:
    """What of a proved directory must stay. Raises NotOurs."""
    uri = f"{above.uri}/{directory}"
    if claim.digest is None:
        return _prove_unpublished(above, directory, claim, uri)
    if set(present) == {f"{directory}/{HOLDER}"}:
        proved = True  # all but the claim was removed before
    else:
        proved = any(_is_it(above, f"{directory}/{name}", claim) for name in (CHECKPOINT, PROPOSAL))
    if not proved:
        raise NotOurs(f"{uri} does not hold the checkpoint with the digest {claim.digest[:12]}... of this stack")
    holder = _holder(above, directory)
    if holder != claim.holder:
        whose = f"belongs to GymCheckpoint UID {holder}" if holder else f"has no {HOLDER}"
        raise NotOurs(f"{uri} {whose}: only what an object has claimed is removed with it")
    return set()


def _prove_unpublished(above: ObjectStore, directory: str, claim: Claim, uri: str) -> set[str]:
    """What was never published is known by the names it is under. Its tombstone stays: nobody shall publish it."""
    if f"/{claim.stack_uid}/" not in f"{uri}/" or not directory.endswith(f"-{claim.checkpoint_id}"):
        raise NotOurs(f"{uri} is not where checkpoint {claim.checkpoint_id} of this stack was written")
    try:
        landed = read_publication(above.get(f"{directory}/{CHECKPOINT}"))
    except ObjectMissing:
        return set()
    except ProtocolError:
        raise NotOurs(f"{uri}/{CHECKPOINT} cannot be read by this version") from None
    if landed.state != "abandoned":
        raise NotOurs(f"{uri} was published, which its GymCheckpoint does not know; adopt it to restore or remove it")
    return {f"{directory}/{CHECKPOINT}"}


def _is_it(above: ObjectStore, key: str, claim: Claim) -> bool:
    try:
        data = above.get(key)
        found: Publication = read_publication(data)
    except (ObjectMissing, ProtocolError):
        return False
    return (sha256(data), found.stack_uid, found.checkpoint_id) == (
        claim.digest,
        claim.stack_uid,
        claim.checkpoint_id,
    )


def _holder(above: ObjectStore, directory: str) -> str | None:
    with suppress(ObjectMissing, ValueError, AttributeError):
        return str(json.loads(above.get(f"{directory}/{HOLDER}")).get("holder"))
    return None


def _named_by_others(above: ObjectStore, directory: str) -> set[str]:
    """Objects of this directory that manifests of the checkpoints beside it name. Raises NotOurs where one of those
    cannot be read: nobody knows what it needs."""
    if posixpath.basename(above.uri.rstrip("/")) != CHECKPOINTS:
        return set()  # somebody's copy of one checkpoint, without others beside it
    keys = [
        key for key in above.list("") if posixpath.basename(key) == MANIFEST and not key.startswith(f"{directory}/")
    ]

    def named(key: str) -> list[str]:
        try:
            manifest = read_manifest(above.get(key))
        except ObjectMissing:
            return []  # removed meanwhile
        except ProtocolError:
            raise NotOurs(f"{above.uri}/{key} cannot be read by this version, and may need what is here") from None
        beside = key.partition("/")[0]
        return [posixpath.normpath(f"{beside}/{pack.key}") for pack in manifest.packs]

    with ThreadPoolExecutor(PARALLEL) as pool:
        return {name for names in pool.map(named, keys) for name in names}


def _delete(store: ObjectStore, keys: list[str]) -> int:
    # One request an object: the bulk request of S3 wants a checksum that not every server knows.
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(store.delete, keys))
    return len(keys)
