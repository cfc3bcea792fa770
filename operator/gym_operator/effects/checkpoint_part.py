"""One cell's part of a GymCheckpoint: taken, or, where an operator before this one left it, brought to its end.

What comes of it is returned; whoever keeps the queue writes it. Only the phases on the way are written here, each
before the act it announces.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from gym_operator.api.checkpoint import CheckpointStatus
from gym_operator.effects.kube import KubeError
from gym_operator.effects.status_writers import CheckpointWriter, Gone, Superseded
from gym_operator.rules import checkpoint_phases as phases
from gym_servers.coordination.checkpoint import CheckpointFailed, Progress, Request, tombstone
from gym_servers.coordination.controller import CellController
from gym_servers.coordination.record import CellRecord
from gym_servers.coordination.terms import NOT_BEGUN, Phase
from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.messages import Blocker
from gym_servers.storage.cells import settle
from gym_servers.storage.manifest import CHECKPOINT, Publication, read_publication
from gym_servers.storage.removal import hold
from gym_servers.storage.store import ObjectConflict, ObjectMissing, ObjectStore, StorageError

log = logging.getLogger(__name__)

TELL_SECONDS: Final = 10.0
"""How long a phase may take to be written before the part is given up: rollouts are paused meanwhile."""
LONGEST_RETRY_SECONDS: Final = 5.0

Change = Callable[[CheckpointStatus], CheckpointStatus]


@dataclass(frozen=True)
class Published:
    """It can be restored from now on."""

    publication: Publication
    uri: str
    digest: str
    pause_seconds: float | None = None


@dataclass(frozen=True)
class Failed:
    """It was given up."""

    reason: str
    message: str
    blockers: Sequence[tuple[str, Blocker]] = ()


@dataclass(frozen=True)
class Unsettled:
    """It was given up, but a publication whose answer was lost may stand all the same: storage is to be asked."""

    failure: CheckpointFailed


End = Published | Failed | Unsettled | None
"""What came of it; None where nothing did yet."""


@dataclass(frozen=True)
class Part:
    """A cell's part of a GymCheckpoint. `among` are all cells it is about; `wall` gives Unix time; `origin` is the
    stack, None before it is known."""

    writer: CheckpointWriter
    index: int
    among: Collection[int]
    id: str
    wall: Callable[[], float]
    origin: phases.Origin | None = None

    @property
    def which(self) -> phases.Which:
        return phases.Which(self.index, self.among, self.origin)

    @property
    def takers(self) -> set[str]:
        """The names of those that take part, once it has begun."""
        return {each.name for each in phases.part_of(self.writer.status, self.index).participants}

    @property
    def at(self) -> phases.At:
        return phases.At(self.writer.generation, self.wall())

    def announced(
        self, record: CellRecord, phase: Phase, pinned: Sequence[phases.Pinned], standing: Mapping[str, str]
    ) -> Change:
        """The status that says that the part is in a phase. The record has the checkpoint open: it is saved before a
        phase is told."""
        assert record.open is not None
        uri, attempt, at = record.open.uri, record.attempt, self.at
        return lambda status: phases.under_way(status, self.which, phase, self.id, uri, attempt, pinned, standing, at)


async def take(
    part: Part,
    controller: CellController,
    open_store: Callable[[str], ObjectStore],
    pinned: Sequence[phases.Pinned],
    wishes: Mapping[str, Any],
) -> End:
    """Take it. None where something died before it began: then it waits for its turn again. Raises Superseded."""
    writer = part.writer

    async def tell(progress: Progress) -> None:
        change = part.announced(controller.record, progress.phase, pinned, progress.participants)
        try:
            async with asyncio.timeout(TELL_SECONDS):
                await persist(writer, change)
        except Gone as error:
            raise CheckpointFailed("Deleted", "the GymCheckpoint was deleted") from error
        except (Superseded, TimeoutError) as error:
            raise CheckpointFailed("StatusNotWritten", "its status could not be written") from error
        uri = phases.part_of(writer.status, part.index).uri
        if progress.phase == "Publishing" and uri is not None:
            # Before it is published: whoever adopts it somewhere else finds whose it is.
            await asyncio.to_thread(lambda: hold(open_store(uri), writer.uid))

    try:
        outcome = await controller.take(part.id, writer.name, tell, **wishes)
    except CheckpointFailed as error:
        begun = phases.part_of(writer.status, part.index).phase != "Pending"
        if error.reason in NOT_BEGUN and not begun:
            return None
        return Failed(error.reason, str(error), error.blockers) if error.settled else Unsettled(error)
    except StorageError as error:
        return Failed("StorageError", str(error))
    return Published(outcome.publication, outcome.uri, outcome.digest, outcome.pause_seconds)


async def resolve(part: Part, open_store: Callable[[str], ObjectStore], failure: CheckpointFailed | None) -> End:
    """Bring to its end what its record does not know any more, or never knew: what landed under its key stands, and
    a tombstone lands where nothing did, so that nobody can publish it later. `failure` is what is known to have gone
    wrong. None while storage cannot be asked."""
    found = phases.part_of(part.writer.status, part.index)
    if found.uri is None:
        return _restarted("the operator ended before it had begun")
    uri = found.uri
    stack_uid = part.writer.status.stack_uid or ""
    request = Request(part.id, part.writer.name, uri, stack_uid, part.index, found.attempt, 0, {})
    grave = tombstone(request, "its operator ended before it was published", part.wall())

    def conclude() -> Publication:
        store = open_store(uri)
        try:
            stands = read_publication(store.get(CHECKPOINT))
        except ObjectMissing:
            stands = None
        # Held by another object: then it is not removed with this one. What stands needs no room to be known.
        with suppress(ObjectConflict if stands is None else StorageError):
            hold(store, part.writer.uid)
        return settle(store, grave) if stands is None else stands

    try:
        landed = await asyncio.to_thread(conclude)
    except StorageError as error:
        if phases.is_left_behind(part.writer.status, part.origin):  # and no record has it open: it stays unpublished
            message = f"{error}; the stack has another storage since, so it is given up: create another GymCheckpoint"
            return Failed("StorageError", message)
        log.warning("checkpoint %s/%s cannot be settled yet: %s", part.writer.namespace, part.writer.name, error)
        return None
    except ProtocolError as error:
        # As for a recovery: what nobody here can read nobody here can restore.
        landed = grave.model_copy(update={"reason": error.detail})
    if landed.state == "published":
        return Published(landed, uri, sha256(landed.to_bytes()))
    if failure is not None:
        return Failed(failure.reason, str(failure), failure.blockers)
    return _restarted(landed.reason)


async def persist(writer: CheckpointWriter, change: Change) -> None:
    """Write until it is written. Raises Gone, Superseded."""
    pause = 0.2
    while True:
        try:
            await writer.write(change)
            return
        except KubeError as error:
            log.warning("status of checkpoint %s/%s: %s", writer.namespace, writer.name, error)
        await asyncio.sleep(pause)
        pause = min(pause * 2, LONGEST_RETRY_SECONDS)


def _restarted(why: str) -> Failed:
    message = f"the operator was restarted while it was being taken ({why}); create another GymCheckpoint"
    return Failed("OperatorRestarted", message)
