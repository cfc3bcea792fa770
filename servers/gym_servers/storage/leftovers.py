"""What checkpoints leave in a cell's folder that nobody can use any more: records of those that were given up, and
tokens that were staged for a cut, which are read once, while the checkpoint is prepared.

Only what is certain to be dead goes: a tombstone says that a checkpoint was given up, and stays; of staged tokens the
caller knows that their checkpoint is over. All of it blocks, and can be repeated.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.manifest import CHECKPOINT, Publication, read_publication
from gym_servers.storage.parallel import side_by_side
from gym_servers.storage.removal import Claim, remove
from gym_servers.storage.store import ObjectMissing, ObjectStore

CUTS: Final = "generation-cuts"
"""Below a cell's folder: `<checkpoint id>/<digest>`, the tokens that an engine's side has staged for a checkpoint."""


def staged(cell: ObjectStore) -> set[str]:
    """The checkpoints for which tokens are staged. Raises StorageError."""
    return {parts[1] for key in cell.list(CUTS) if len(parts := key.split("/")) == 3}


def remove_staged(cell: ObjectStore, checkpoint_id: str) -> int:
    """Remove what is staged for a checkpoint that is over; how many objects that was. Raises StorageError."""
    keys = list(cell.list(f"{CUTS}/{checkpoint_id}"))
    side_by_side(cell.delete, keys)
    return len(keys)


def given_up(checkpoints: ObjectStore, stack_uid: str) -> dict[str, Publication]:
    """Of a cell's checkpoints those that were given up and have left more than their tombstone: the names of their
    folders, and the tombstones. Raises StorageError."""
    objects: defaultdict[str, set[str]] = defaultdict(set)
    for key in checkpoints.list(""):
        directory, _, name = key.partition("/")
        objects[directory].add(name)
    left = [directory for directory, names in objects.items() if CHECKPOINT in names and len(names) > 1]
    found = side_by_side(lambda directory: _tombstone(checkpoints, directory, stack_uid), left)
    return {directory: one for directory, one in zip(left, found, strict=True) if one is not None}


def remove_given_up(checkpoints: ObjectStore, directory: str, stack_uid: str) -> int:
    """Remove what one of them has left, if its tombstone says so; how many objects that was. Raises NotOurs,
    StorageError."""
    grave = _tombstone(checkpoints, directory, stack_uid)
    return (
        0
        if grave is None
        else remove(checkpoints, directory, Claim(stack_uid, grave.checkpoint_id, None, "")).objects
    )


def _tombstone(checkpoints: ObjectStore, directory: str, stack_uid: str) -> Publication | None:
    try:
        found = read_publication(checkpoints.get(f"{directory}/{CHECKPOINT}"))
    except (ObjectMissing, ProtocolError):
        return None
    return found if (found.state, found.stack_uid) == ("abandoned", stack_uid) else None
