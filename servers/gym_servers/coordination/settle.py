"""Checkpoints at rest, as a coordinator needs them: settle one that was left open, choose one to restore."""

from __future__ import annotations

from collections.abc import Callable, Collection

from gym_servers.coordination.record import Choice, OpenCheckpoint
from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.cells import PROPOSAL, published, settle, verify
from gym_servers.storage.locate import join
from gym_servers.storage.manifest import CHECKPOINT, Publication, read_publication
from gym_servers.storage.store import ObjectMissing, ObjectStore


def settle_left_open(store: ObjectStore, left: OpenCheckpoint, tombstone: Publication) -> tuple[Publication, str]:
    """Settle a checkpoint whose coordinator is gone: finish its publication if all of it is durable, else give it
    up. What stands and the SHA-256 of its document. Blocks. Raises StorageError."""
    try:
        landed = store.get(CHECKPOINT)
    except ObjectMissing:
        pass
    else:
        try:
            return read_publication(landed), sha256(landed)
        except ProtocolError:
            return tombstone, sha256(landed)  # nobody can restore it: it counts as given up
    wanted = tombstone
    try:
        if left.given_up:
            raise ObjectMissing("nothing is to be published")
        proposed = read_publication(store.get(PROPOSAL))
        verify(store, proposed.members, left.checkpoint_id)
        wanted = proposed
    except (ObjectMissing, ProtocolError):
        pass  # not everything was written: it does not exist
    landed_as = settle(store, wanted)
    return landed_as, sha256(landed_as.to_bytes())


def choose(
    cell: ObjectStore,
    open_store: Callable[[str], ObjectStore],
    stack_uid: str,
    refused: Collection[str],
    say: Callable[[str], None],
    since: int = 0,
    too_old: Callable[[Publication], bool] = lambda _: False,
) -> Choice | None:
    """The newest published checkpoint of this cell whose every digest verifies; None where there is none, or it is
    `too_old`. `since` is the lowest cell attempt that counts.

    `say` is told why a newer one is passed over. Blocks. Raises StorageError.
    """
    for directory, publication, digest in published(cell):
        uri = join(cell.uri, directory)
        if uri in refused or publication.stack_uid != stack_uid or publication.cell_attempt < since:
            continue
        try:
            verify(open_store(uri), publication.members, publication.checkpoint_id)
        except ProtocolError as error:
            say(f"checkpoint {publication.name} is passed over: {error.detail}")
            continue
        if too_old(publication):
            return None
        return Choice(uri=uri, digest=digest, checkpoint_id=publication.checkpoint_id, name=publication.name)
    return None
