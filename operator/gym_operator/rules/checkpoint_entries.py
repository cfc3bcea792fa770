"""What is kept in mind of every GymCheckpoint, also of thousands of finished ones: enough to decide when one goes.

Each takes less than a kilobyte. What many of them say alike is kept once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gym_operator.api import names
from gym_operator.api.checkpoint import TERMINAL
from gym_operator.api.objects import parse_time
from gym_servers.stack.durations import parse_age, parse_duration
from gym_servers.storage.cells import order_of

COMMIT_SECONDS: Final = 120
"""How long the servers of a stack write, unless somebody says otherwise."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one cell contributed: where it is, its place in the order of the cell's checkpoints, and whether it is
    published: then it serves the recovery of its cell, whatever became of the others' parts."""

    cell: int
    uri: str
    order: tuple[int, int]
    published: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A GymCheckpoint in short. `ended` is in Unix seconds, None while it is not final; `ttl` in seconds;
    `commit_seconds`: for how long its servers may write; `tied`: it has our finalizer; `observed`: the generation
    that its status speaks of."""

    namespace: str
    name: str
    uid: str
    version: int
    stack: str
    stack_uid: str | None
    schedule_uid: str | None
    phase: str
    ended: float | None
    parts: tuple[Part, ...]
    ttl: int | None
    deleting: bool
    policy: str = "Retain"
    adopted: bool = False
    commit_seconds: int = 0
    tied: bool = False
    generation: int = 0
    observed: int = 0

    @property
    def final(self) -> bool:
        return self.phase in TERMINAL

    @property
    def over(self) -> bool:
        """Nothing is taken for it any more: it is final, or on its way out."""
        return self.final or self.phase == "Deleting"


def entry_of(body: Mapping[str, Any]) -> Entry:
    """Read a GymCheckpoint as the API server holds it, also one whose spec this version would refuse."""
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    return Entry(
        namespace=sys.intern(metadata["namespace"]),
        name=metadata["name"],
        uid=metadata["uid"],
        version=int(metadata.get("resourceVersion") or 0),
        stack=sys.intern(str((spec.get("stackRef") or {}).get("name") or "")),
        stack_uid=_shared(status.get("stackUID")),
        schedule_uid=_shared((metadata.get("labels") or {}).get(names.SCHEDULE_UID_LABEL)),
        phase=sys.intern(status.get("phase") or "Pending"),
        ended=_time(status.get("completionTime")),
        parts=tuple(
            Part(int(cell["index"]), cell["uri"], order_of(cell["uri"]), cell.get("phase") == "Succeeded")
            for cell in status.get("cells") or ()
            if cell.get("uri")
        ),
        ttl=_seconds(spec.get("ttl"), parse_age),
        deleting=bool(metadata.get("deletionTimestamp")),
        policy=sys.intern(str(spec.get("deletionPolicy") or "Retain")),
        adopted=bool(spec.get("source")),
        commit_seconds=_seconds((spec.get("timeouts") or {}).get("commit"), parse_duration) or COMMIT_SECONDS,
        tied=names.DATA_FINALIZER in (metadata.get("finalizers") or ()),
        generation=int(metadata.get("generation") or 0),
        observed=int(status.get("observedGeneration") or 0),
    )


def _shared(text: str | None) -> str | None:
    return None if text is None else sys.intern(text)


def _time(text: str | None) -> float | None:
    return parse_time(text) if text else None


def _seconds(text: Any, parse: Callable[[str], int]) -> int | None:
    try:
        return parse(text) if isinstance(text, str) else None
    except ValueError:
        return None  # another version's CRD let it in
