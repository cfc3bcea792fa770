"""What a cell keeps in storage: its checkpoints, and the attempt numbers that are used up.

Below a cell's root: `attempts/<n>` markers and one directory per checkpoint. A checkpoint's place in the order is
in its directory's name and in its `checkpoint.json`; the listing is the truth, no pointer is.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from gym_servers.protocol.digests import canonical, sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.manifest import CHECKPOINT, Member, Publication, read_publication
from gym_servers.storage.packs import check_packs, check_records, load_manifest
from gym_servers.storage.parallel import side_by_side
from gym_servers.storage.store import ObjectConflict, ObjectMissing, ObjectStore

CHECKPOINTS = "checkpoints"
ATTEMPTS = "attempts"
PROPOSAL = "proposal.json"  # the publication as it is about to be written; carries no truth of its own


def directory_name(cell_attempt: int, sequence: int, checkpoint_id: str) -> str:
    return f"{CHECKPOINTS}/{cell_attempt:06d}-{sequence:06d}-{checkpoint_id}"


def order_of(uri: str) -> tuple[int, int]:
    """Cell attempt and sequence of a checkpoint by the name of its directory, the highest being the newest; zeros for
    a directory that was named by somebody else."""
    attempt, _, rest = uri.rstrip("/").rsplit("/", 1)[-1].partition("-")
    sequence = rest.partition("-")[0]
    return (int(attempt), int(sequence)) if attempt.isdecimal() and sequence.isdecimal() else (0, 0)


def use_attempt_up(cell: ObjectStore, attempt: int, owner: str) -> None:
    """Use an attempt number up, durably, before any work starts under it. Raises ObjectConflict where another owner
    has it: a driver and a recovery must never run under the same number."""
    cell.create(f"{ATTEMPTS}/{attempt}", canonical({"attempt": attempt, "owner": owner}))


def reserve_attempt(cell: ObjectStore, above: int, owner: str) -> int:
    """The lowest number above `above` and above all that were used up, now used up by `owner`."""
    attempt = max(above, highest_attempt(cell)) + 1
    while True:
        try:
            use_attempt_up(cell, attempt, owner)
            return attempt
        except ObjectConflict:
            attempt += 1


def highest_attempt(cell: ObjectStore) -> int:
    """The highest attempt number that was used up; 0 where none was."""
    names = [key.rsplit("/", 1)[1] for key in cell.list(ATTEMPTS)]
    return max((int(name) for name in names if name.isdigit()), default=0)


def settle(store: ObjectStore, wanted: Publication) -> Publication:
    """Write `checkpoint.json` once: the publication or tombstone that stands, whoever wrote it.

    It is read back: some servers store other bytes than were sent, and then nothing was published.
    """
    with suppress(ObjectConflict):
        store.create(CHECKPOINT, wanted.to_bytes())
    return read_publication(store.get(CHECKPOINT))


def publication_of(store: ObjectStore, digest: str) -> Publication:
    """The publication whose document has this SHA-256. Raises `invalid_checkpoint_state` where it is not there any
    more, or is another one."""
    try:
        data = store.get(CHECKPOINT)
    except ObjectMissing as error:
        raise ProtocolError("invalid_checkpoint_state", f"{CHECKPOINT} is not there") from error
    if sha256(data) != digest:
        raise ProtocolError("invalid_checkpoint_state", f"{CHECKPOINT} is not the one with this digest")
    publication = read_publication(data)
    if publication.state != "published":
        raise ProtocolError("invalid_checkpoint_state", "the checkpoint was given up")
    return publication


def published(cell: ObjectStore) -> list[tuple[str, Publication, str]]:
    """The published checkpoints of a cell, newest first: directory key, publication, and its SHA-256.

    A document that cannot be read is left out: an unreadable publication is not one.
    """
    keys = [key for key in cell.list(CHECKPOINTS) if key.endswith(f"/{CHECKPOINT}")]
    found = [one for one in side_by_side(lambda key: _published(cell, key), keys) if one is not None]
    return sorted(found, key=lambda item: item[1].order, reverse=True)


def newest_published(
    cell: ObjectStore, *, since: int = 0, below: tuple[int, int] | None = None
) -> tuple[str, Publication, str] | None:
    """The newest published checkpoint of a cell, as `published` gives it, with no more read than is needed. `since`:
    the lowest cell attempt that counts; `below`: older than this place in the order."""
    keys = [key for key in cell.list(CHECKPOINTS) if key.endswith(f"/{CHECKPOINT}")]
    for key in sorted(keys, key=_directory_order, reverse=True):
        order = _directory_order(key)
        if order[0] < since:
            return None
        if below is not None and order >= below:
            continue
        if (found := _published(cell, key)) is not None:
            return found
    return None


def _directory_order(key: str) -> tuple[int, int]:
    return order_of(key.removesuffix(f"/{CHECKPOINT}"))


def _published(cell: ObjectStore, key: str) -> tuple[str, Publication, str] | None:
    """What the document under this key publishes; None for a tombstone, and for what cannot be read."""
    try:
        data = cell.get(key)
        publication = read_publication(data)
    except (ObjectMissing, ProtocolError):
        return None
    if publication.state != "published":
        return None
    return key.removesuffix(f"/{CHECKPOINT}"), publication, sha256(data)


def verify(store: ObjectStore, members: Sequence[Member], checkpoint_id: str, *, records: bool = False) -> None:
    """Check that every member's manifest is the named one and every pack has its size and digest; with `records` also
    that every record in them has its own, which a pack with a good digest can only fail by whoever wrote it.

    Raises `invalid_checkpoint_state` with the participant's name and what is wrong.
    """
    manifests = []
    for member in members:
        manifest, _ = load_manifest(store, member.directory, member.manifest_digest)
        if manifest.session != member.session or manifest.checkpoint_id != checkpoint_id:
            raise ProtocolError("invalid_checkpoint_state", f"{member.directory} was written by another process")
        manifests.append(manifest)
    if records:
        for manifest in manifests:
            check_records(store, manifest)
    else:
        check_packs(store, [pack for manifest in manifests for pack in manifest.packs])
