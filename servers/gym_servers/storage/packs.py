"""Records in packs: many small records become few objects, because requests are what object storage charges.

Writing: packs first, the manifest last. Reading: digests of the manifest, of each pack and of each record are
checked before anything is handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.manifest import MANIFEST, Manifest, PackEntry, RecordEntry, read_manifest
from gym_servers.storage.parallel import side_by_side
from gym_servers.storage.store import ObjectMissing, ObjectStore

PACK_BYTES = 8 * 1024 * 1024  # large enough that few requests carry much, small enough to write in parallel


@dataclass(frozen=True)
class Pack:
    """Bytes to store and which records they hold."""

    key: str
    data: bytes
    digest: str
    entries: tuple[RecordEntry, ...]


def pack_records(directory: str, records: Mapping[str, bytes]) -> list[Pack]:
    """Group records into packs below `directory` (`<kind>/<instance>`). Same records, same packs."""
    packs: list[Pack] = []
    chunk: list[tuple[str, bytes]] = []
    size = 0
    for name in sorted(records):
        data = records[name]
        if chunk and size + len(data) > PACK_BYTES:
            packs.append(_pack(directory, len(packs), chunk))
            chunk, size = [], 0
        chunk.append((name, data))
        size += len(data)
    if chunk:
        packs.append(_pack(directory, len(packs), chunk))
    return packs


def _pack(directory: str, number: int, chunk: list[tuple[str, bytes]]) -> Pack:
    body = b"".join(data for _, data in chunk)
    digest = sha256(body)
    key = f"{directory}/pack{number:04d}-{digest}"
    entries, offset = [], 0
    for name, data in chunk:
        entries.append(RecordEntry(id=name, pack=key, offset=offset, length=len(data), sha256=sha256(data)))
        offset += len(data)
    return Pack(key, body, digest, tuple(entries))


def write_records(
    store: ObjectStore,
    directory: str,
    packs: list[Pack],
    manifest: Callable[[list[PackEntry], list[RecordEntry]], Manifest],
    go_on: Callable[[], None] = lambda: None,
) -> str:
    """Write packs, then the manifest; the manifest's SHA-256. `go_on` is asked before each pack and may raise.
    Raises StorageError."""

    def write(pack: Pack) -> None:
        go_on()
        store.create(pack.key, pack.data)

    side_by_side(write, packs)
    document = manifest(
        [PackEntry(key=p.key, size=len(p.data), sha256=p.digest) for p in packs],
        [entry for p in packs for entry in p.entries],
    ).to_bytes()
    store.create(f"{directory}/{MANIFEST}", document)
    return sha256(document)


def load_manifest(store: ObjectStore, directory: str, digest: str | None) -> tuple[Manifest, str]:
    """A participant's manifest and its digest. Raises `invalid_checkpoint_state` where it is missing or another."""
    try:
        data = store.get(f"{directory}/{MANIFEST}")
    except ObjectMissing as error:
        raise ProtocolError("invalid_checkpoint_state", f"{directory} has no manifest") from error
    found = sha256(data)
    if digest is not None and digest != found:
        raise ProtocolError("invalid_checkpoint_state", f"the manifest of {directory} is not the published one")
    return read_manifest(data), found


def check_packs(store: ObjectStore, packs: Sequence[PackEntry]) -> None:
    """Raises `invalid_checkpoint_state` naming a pack that is missing or does not have its size and digest."""

    def check(entry: PackEntry) -> None:
        with _of_pack(entry):
            found = store.fingerprint(entry.key)
        _same(entry, *found)

    side_by_side(check, packs)


def check_records(store: ObjectStore, manifest: Manifest) -> None:
    """Raises `invalid_checkpoint_state` naming a pack or a record of it that is missing or does not match its digest.
    As many packs are in memory as are read side by side."""
    of_pack: dict[str, list[RecordEntry]] = {entry.key: [] for entry in manifest.packs}
    for record in manifest.records:
        of_pack.setdefault(record.pack, []).append(record)
    for key in of_pack.keys() - {entry.key for entry in manifest.packs}:
        _record_of(b"", of_pack[key][0])  # of a pack that nobody names

    def check(entry: PackEntry) -> None:
        data = _load(store, entry)
        for record in of_pack[entry.key]:
            _record_of(data, record)

    side_by_side(check, manifest.packs)


def load_records(store: ObjectStore, manifest: Manifest) -> dict[str, bytes]:
    """Every record of a manifest, checked. Raises `invalid_checkpoint_state` naming what does not verify."""
    keys = [entry.key for entry in manifest.packs]
    packs = dict(zip(keys, side_by_side(lambda entry: _load(store, entry), manifest.packs), strict=True))
    return {entry.id: _record_of(packs.get(entry.pack, b""), entry) for entry in manifest.records}


def _load(store: ObjectStore, entry: PackEntry) -> bytes:
    with _of_pack(entry):
        data = store.get(entry.key)
    _same(entry, len(data), sha256(data))
    return data


def _record_of(pack: bytes, entry: RecordEntry) -> bytes:
    data = pack[entry.offset : entry.offset + entry.length]
    if sha256(data) != entry.sha256:
        raise ProtocolError("invalid_checkpoint_state", f"record {entry.id} does not match its digest")
    return data


@contextmanager
def _of_pack(entry: PackEntry) -> Iterator[None]:
    try:
        yield
    except ObjectMissing as error:
        raise ProtocolError("invalid_checkpoint_state", f"pack {entry.key} is missing") from error


def _same(entry: PackEntry, size: int, digest: str) -> None:
    if (size, digest) != (entry.size, entry.sha256):
        raise ProtocolError("invalid_checkpoint_state", f"pack {entry.key} does not match its digest")
