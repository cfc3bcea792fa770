"""Whether a storage does what checkpoints stand on, found out by doing it.

Checkpoints need four things: what is written comes back with the same bytes, it is listed, and a second write of
other bytes under a key that exists is refused. The last cannot be made up for: a coordinator that was cut off for a
while could replace another's decision about a checkpoint, and no order of looking and writing prevents that.
"""

from __future__ import annotations

from typing import Final

from gym_servers.storage.store import ObjectConflict, ObjectStore, StorageError, StorageProblem

FOLDER: Final = ".gymops-probe"
WRITTEN: Final = f"{FOLDER}/written"
ONCE: Final = f"{FOLDER}/once"
TRIES: Final = 2
"""Another operator's probe, of a moment ago, may have come in between."""
_BODY: Final = bytes(range(256)) * 16
_FIRST: Final = b"the first write stands\n"
_SECOND: Final = b"a second write is refused\n"


def probe(store: ObjectStore, nonce: str) -> None:
    """Use the store as checkpoints do. `nonce` is another one each time. Blocks.

    Raises StorageError, whose `problem` says what it does not do.
    """
    for left in reversed(range(TRIES)):
        try:
            _write_and_read(store, f"{nonce}-{left}".encode() + _BODY)
            break
        except StorageError as error:
            if error.problem is not StorageProblem.BYTES_CHANGED or not left:
                raise
    _create_twice(store)


def _write_and_read(store: ObjectStore, data: bytes) -> None:
    store.replace(WRITTEN, data)
    _same(store, WRITTEN, data)
    if store.list(FOLDER).get(WRITTEN) != len(data):
        raise _changed(store, "what was written is not listed with its size")


def _create_twice(store: ObjectStore) -> None:
    try:
        store.create(ONCE, _FIRST)
    except ObjectConflict:
        store.replace(ONCE, _FIRST)  # left by a time when the server let the second write through
    try:
        store.create(ONCE, _SECOND)
    except ObjectConflict:
        _same(store, ONCE, _FIRST)
        return
    raise StorageError(
        f"{store.uri}: the storage server lets a second write replace an object that must be created once (it "
        "ignores If-None-Match), so that two writers could both believe to have published; no checkpoint is taken "
        "here: use a server that honours it, or set spec.checkpoints.enabled to false",
        StorageProblem.CREATE_ONLY_UNSUPPORTED,
    )


def _same(store: ObjectStore, key: str, data: bytes) -> None:
    if store.get(key) != data:
        raise _changed(store, "what was written came back with other bytes")


def _changed(store: ObjectStore, what: str) -> StorageError:
    return StorageError(
        f"{store.uri}: {what}; no checkpoint would be readable: some servers store the checksum trailers of newer "
        "clients inside the object, so update the storage server or take out what stands before it",
        StorageProblem.BYTES_CHANGED,
    )
