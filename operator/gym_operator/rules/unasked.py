"""Last checkpoints that the operator took of its own accord before a cell's pods went: no GymCheckpoint stands for
them, so nobody would ever delete them. Which of them may go.

In doubt one stays: it costs some space, and what is gone cannot be had again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gym_operator.api.objects import parse_time
from gym_operator.rules.cell_record import from_document
from gym_operator.rules.checkpoint_entries import Entry
from gym_operator.rules.restores import held_by
from gym_operator.rules.retention import needs_of
from gym_servers.coordination.record import CellRecord, Stage
from gym_servers.storage.cells import directory_name, order_of
from gym_servers.storage.manifest import Publication

SCALE_DOWN: Final = "scale-down"
"""How the last checkpoint of a cell that is to go is called."""
ROLL_OUT: Final = "roll-out"
"""How the last checkpoint before a cell's pods are replaced is called."""
PREFIXES: Final[Mapping[str, str]] = {SCALE_DOWN: f"{SCALE_DOWN}_", ROLL_OUT: f"{ROLL_OUT}-"}
"""How the ids of those begin; the cell's attempt follows, and what makes it the only one."""
SUPERSEDED_SECONDS: Final = 3600.0
"""How long one stays that its cell has a newer one than."""

_ID: Final = re.compile(f"({'|'.join(PREFIXES.values())})([0-9]+)-[0-9a-f]{{8}}")


@dataclass(frozen=True)
class Successor:
    """What a cell would continue from in place of an older one. `since`: Unix seconds of its publication."""

    uri: str
    digest: str
    since: float


def may_be_unasked(directory: str) -> bool:
    """Whether a checkpoint's directory is called as those are. What it holds has to say the same."""
    parts = directory.split("-", 2)
    return len(parts) == 3 and order_of(directory) > (0, 0) and _ID.fullmatch(parts[2]) is not None


def is_unasked(found: Publication, directory: str, stack_uid: str, cell: int) -> bool:
    """Whether a document that was found there is of such a checkpoint of this cell, published. A GymCheckpoint can
    have the name, and then its id is another; or such an id, and then its name is."""
    id = _ID.fullmatch(found.checkpoint_id)
    return (
        (found.state, found.stack_uid, found.cell) == ("published", stack_uid, cell)
        and id is not None
        and (id[1], int(id[2])) == (PREFIXES.get(found.name), found.cell_attempt)
        and f"checkpoints/{directory}" == directory_name(found.cell_attempt, found.sequence, found.checkpoint_id)
    )


def successor(stack: Mapping[str, Any], cell: int, uri: str) -> Successor | None:
    """What the cell would continue from as its stack's status says, where that is newer than the checkpoint at `uri`
    and beside it; None where it is not, or where the cell is not at rest with it."""
    for part in (stack.get("status") or {}).get("cells") or ():
        record, last = from_document(part.get("record")), part.get("lastCheckpoint") or {}
        if part["index"] != cell or record is None or record.stage not in (Stage.RUNNING, Stage.STOPPED):
            continue
        newer = last.get("uri") or ""
        beside = newer.rpartition("/")[0] == uri.rpartition("/")[0]
        if beside and order_of(newer) > order_of(uri) and last.get("digest") and last.get("time"):
            return Successor(newer, last["digest"], parse_time(last["time"]))
    return None


def needed(
    stack: Mapping[str, Any],
    others: Iterable[Mapping[str, Any]],
    entries: Iterable[Entry],
    checkpoints: Iterable[Mapping[str, Any]],
    restores: Iterable[Mapping[str, Any]],
) -> set[str]:
    """The URIs that somebody needs: the stack, and `others`; GymCheckpoints that stand for them, or are about to;
    unfinished restores. Raises ValueError where a stack's record cannot be read: nothing is known then."""
    uris = {part.uri for entry in entries for part in entry.parts} | held_by(restores)[0]
    uris |= {str(((body.get("spec") or {}).get("source") or {}).get("uri") or "") for body in checkpoints}
    uris |= _named_by(stack)
    for other in others:
        # Also where it runs by now: what its own cells have since is not asked here.
        uris |= _named_by(other) | {record.restore.uri for record in _records(other) if record.restore is not None}
    return {uri.rstrip("/") for uri in uris}


def _named_by(stack: Mapping[str, Any]) -> set[str]:
    needs = needs_of(stack)
    found = {each.uri for record in _records(stack) for each in (record.stopped, record.open) if each is not None}
    return {*needs.restoring, *needs.last, *found}


def _records(stack: Mapping[str, Any]) -> list[CellRecord]:
    read = [from_document(cell.get("record")) for cell in (stack.get("status") or {}).get("cells") or ()]
    return [record for record in read if record is not None]
