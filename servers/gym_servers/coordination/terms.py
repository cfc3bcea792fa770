"""A checkpoint's terms: what is asked for, how it goes, what comes of it, and the two documents that settle it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gym_servers.coordination.client import Unreachable
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import parse_key
from gym_servers.storage.cells import settle
from gym_servers.storage.manifest import Publication
from gym_servers.storage.store import ObjectStore, StorageError

log = logging.getLogger("gym_servers")

Phase = Literal["Preparing", "Committing", "Publishing"]


@dataclass(frozen=True)
class Request:
    """What to take and where to put it. Timeouts and `lease_grace` are seconds; `sessions` pins the processes.

    `episodes`: rollout ids or capture keys to keep, None for all that can be continued. `stop`: the participants stay
    closed after the publication, for processes that are about to be replaced. `labels` and `driver_state` are kept in
    the publication as they are.
    """

    checkpoint_id: str
    name: str
    uri: str
    stack_uid: str
    cell: int
    cell_attempt: int
    sequence: int
    sessions: Mapping[str, str]
    prepare_timeout: float = 60.0
    commit_timeout: float = 120.0
    lease_grace: float = 60.0
    episodes: frozenset[str] | None = None
    stop: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    driver_state: Mapping[str, Any] | None = None

    def keeps(self, key: str) -> bool:
        """Whether an episode that can be continued is to be."""
        return self.episodes is None or bool({key, parse_key(key).rollout_id} & self.episodes)


@dataclass(frozen=True)
class Progress:
    """Where a checkpoint stands, for status and for people."""

    phase: Phase
    participants: Mapping[str, str] = field(default_factory=dict)
    blockers: Sequence[tuple[str, m.Blocker]] = ()


@dataclass(frozen=True)
class Outcome:
    """A published checkpoint. `pause_seconds`: from the first prepare to the last resume, 0 where it stopped."""

    publication: Publication
    uri: str
    digest: str
    pause_seconds: float

    @property
    def bytes(self) -> int:
        return sum(member.bytes for member in self.publication.members)


NOT_BEGUN = frozenset({"CellNotRunning", "CheckpointOpen"})
"""Reasons of a checkpoint that was not even begun, since something else goes on in its cell."""


class CheckpointFailed(Exception):
    """The checkpoint was given up. `reason` is one CamelCase word, the text says what happened and to whom.
    `settled` is False where storage could not be told: the tombstone is still to be written."""

    def __init__(
        self, reason: str, message: str, blockers: Sequence[tuple[str, m.Blocker]] = (), *, settled: bool = True
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.blockers = blockers
        self.settled = settled


Tell = Callable[[Progress], Awaitable[None]]


def failure_of(error: Exception) -> CheckpointFailed:
    """What an error means for the checkpoint. One that nobody expected is a fault of ours, and goes into the log."""
    match error:
        case CheckpointFailed():
            return error
        case ProtocolError():
            return CheckpointFailed("Refused", str(error))
        case Unreachable():
            return CheckpointFailed("ParticipantUnreachable", str(error))
        case StorageError():
            return CheckpointFailed("StorageError", str(error))
        case _:
            log.error("a checkpoint failed by a fault of its coordinator", exc_info=error)
            return CheckpointFailed(
                "InternalError", f"a fault of the coordinator ({type(error).__name__}); see its log"
            )


def tombstone(request: Request, reason: str, created: float) -> Publication:
    return Publication(
        state="abandoned",
        checkpoint_id=request.checkpoint_id,
        name=request.name,
        stack_uid=request.stack_uid,
        cell=request.cell,
        cell_attempt=request.cell_attempt,
        sequence=request.sequence,
        created=created,
        reason=reason[:1000],
    )


def give_up(store: ObjectStore, request: Request, reason: str, created: float) -> Publication:
    """Write the tombstone, unless the checkpoint is settled already; what stands."""
    return settle(store, tombstone(request, reason, created))
