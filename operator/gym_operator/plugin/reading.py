"""Reads checkpoints out of storage, by the rules by which they are restored. Everything here blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gym_operator.plugin.exits import Unusable
from gym_operator.plugin.sources import Source
from gym_operator.plugin.views.inspection import Part
from gym_operator.plugin.views.verification import Checked
from gym_servers.participants.environment import EnvironmentParticipant, stage_of
from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.cells import publication_of, verify
from gym_servers.storage.manifest import CHECKPOINT, Publication
from gym_servers.storage.packs import load_manifest, load_records
from gym_servers.storage.store import ObjectMissing, ObjectStore


def part_of(source: Source) -> Part:
    """What is in a part of a checkpoint; of packs, only what the stages are read from. Raises ProtocolError where it
    does not verify, StorageError and Unusable."""
    store = source.open()
    digest, publication = _published(source, store)
    manifests = {
        member.directory: load_manifest(store, member.directory, member.manifest_digest)[0]
        for member in publication.members
    }
    stages = {
        key: stage_of(key, data)
        for manifest in manifests.values()
        if manifest.kind == EnvironmentParticipant.kind
        for key, data in load_records(store, manifest).items()
    }
    return Part(source.uri, digest, publication, manifests, stages)


def check(source: Source, told: Callable[[str, str], None]) -> Iterator[Checked]:
    """Read a part of a checkpoint again, and check every digest in it; a participant that does not verify is no
    reason to leave the others out. `told` is given the place and the digest of what is checked, before all else.
    Raises as `part_of` where its document does not verify."""
    store = source.open()
    digest, publication = _published(source, store)
    told(source.uri, digest)
    for member in publication.members:
        problem = ""
        try:
            verify(store, [member], publication.checkpoint_id, records=True)
        except ProtocolError as error:
            problem = error.detail
        yield Checked(source.uri, publication.cell, member.instance, member.records, member.bytes, problem)


def _published(source: Source, store: ObjectStore) -> tuple[str, Publication]:
    digest = source.digest
    if digest is None:
        try:
            digest = sha256(store.get(CHECKPOINT))
        except ObjectMissing as error:
            raise Unusable(
                f"there is no {CHECKPOINT} in {source.uri}: give the folder that holds it; nothing is published "
                "without it"
            ) from error
    return digest, publication_of(store, digest)
