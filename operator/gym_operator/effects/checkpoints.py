"""Takes the GymCheckpoints of one stack, one at a time, beside the looks at its cell.

A phase is written into the GymCheckpoint before the act it announces. Whatever an operator before this one left
behind is brought to an end first: by what the cell's record has open, else by what landed in storage.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from gym_operator.api import names
from gym_operator.api.checkpoint import TERMINAL, CheckpointStatus, GymCheckpoint
from gym_operator.api.conditions import ConditionReason
from gym_operator.api.objects import format_time
from gym_operator.api.stack import LastCheckpoint
from gym_operator.effects.cache import Cache, Key
from gym_operator.effects.events import Events, Subject
from gym_operator.effects.kube import Kube, KubeError
from gym_operator.effects.status_writers import CheckpointWriter, Gone, Superseded
from gym_operator.rules import checkpoint_phases as phases
from gym_operator.rules import checkpoint_queue as queue
from gym_operator.rules.pod_state import PodState
from gym_servers.coordination.checkpoint import CheckpointFailed, Progress, Request, tombstone
from gym_servers.coordination.controller import CellController
from gym_servers.coordination.record import CellRecord
from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.messages import Blocker
from gym_servers.stack.durations import parse_duration
from gym_servers.stack.spec import Participant, SpecError
from gym_servers.storage.cells import settle
from gym_servers.storage.manifest import Publication
from gym_servers.storage.store import ObjectStore, StorageError

log = logging.getLogger(__name__)

TELL_SECONDS: Final = 10.0
"""How long a phase may take to be written before the checkpoint is given up: rollouts are paused meanwhile."""
RESOLVE_SECONDS: Final = 5.0
"""Between tries to learn from storage what became of a checkpoint."""
LONGEST_RETRY_SECONDS: Final = 5.0


class Checkpoints:
    """The checkpoints of one stack. `active` names the one being taken; `last` is the newest that was published."""

    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        events: Events,
        stack: Key,
        open_store: Callable[[str], ObjectStore],
        wake: Callable[[], None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._kube, self._cache, self._events, self._stack = kube, cache, events, stack
        self._open_store, self._wake, self._wall = open_store, wake, wall
        self._task: asyncio.Task[None] | None = None
        self._writer: CheckpointWriter | None = None
        self._writers: dict[str, CheckpointWriter] = {}
        self._resolve_due = float("-inf")
        self._ending: tuple[str, str] | None = None
        self._hindered_since: tuple[str, float] | None = None
        self._unsettled: dict[str, CheckpointFailed] = {}
        self.last: LastCheckpoint | None = None

    @property
    def active(self) -> str | None:
        return self._writer.name if self._writer is not None and self._task is not None else None

    @property
    def waiting(self) -> bool:
        """Whether any checkpoint is not finished, so that it is worth looking often."""
        return self._task is not None or bool(self._cache.checkpoints_of(self._stack))

    # ---- the queue ----------------------------------------------------------------------------------------

    async def adopt(self, index: int, record: CellRecord | None) -> None:
        """Before the cell is looked at: let a checkpoint that the record has open say so, with its place, which the
        record forgets once it is settled. Raises KubeError, Superseded."""
        if record is None or record.open is None or self._task is not None:
            return
        for body in self._cache.checkpoints_of(self._stack):
            writer = self._writer_of(body)
            id = phases.checkpoint_id(writer.name, writer.uid)
            if id == record.open.checkpoint_id and writer.status.uri is None:
                await self._write(writer, self._announced(writer, id, record, "Preparing", (), {}))

    async def step(
        self,
        controller: CellController | None,
        situation: queue.Situation,
        participants: Sequence[Participant],
        pods: Mapping[str, PodState],
    ) -> None:
        """See to the first of the queue. Raises KubeError, Superseded."""
        await self._collect(controller)
        if self._task is not None:
            return
        for body in queue.in_order(self._cache.checkpoints_of(self._stack)):
            writer = self._writer_of(body)
            if writer.status.phase in TERMINAL:
                continue  # the watch has not told yet
            try:
                checkpoint = GymCheckpoint.parse(body)
            except SpecError as error:
                await self._fail(writer, ConditionReason.INVALID_SPEC, str(error))
                continue
            id = phases.checkpoint_id(writer.name, writer.uid)
            match queue.next_move(writer.status, id, self._hindered(writer.uid, situation), situation):
                case queue.Take() if controller is not None:
                    pinned = pins(controller.record, participants, pods)
                    self._begin(writer, self._take(writer, controller, id, pinned, _timeouts(checkpoint)))
                case queue.Resolve():
                    self._resolve(writer, id)
                case queue.Fail(reason, message):
                    await self._fail(writer, reason, message)
                    continue
                case queue.Hold(reason, message) if reason is not None:
                    status = phases.waiting(writer.status, reason, message, writer.generation, self._wall())
                    await self._write(writer, status)
                case _:
                    pass
            return  # one at a time: the others wait for this one

    def _hindered(self, uid: str, situation: queue.Situation) -> float:
        """For how many seconds something that only a person can mend has been in the way of a checkpoint."""
        if situation.obstacle is None:
            self._hindered_since = None
            return 0.0
        if self._hindered_since is None or self._hindered_since[0] != uid:
            self._hindered_since = (uid, self._wall())
        return self._wall() - self._hindered_since[1]

    async def close(self, controller: CellController | None, reason: str, message: str) -> None:
        """Give up what is being taken, as when the operator ends or the stack is gone, and say why."""
        self._ending = (reason, message)
        if controller is not None:
            await controller.close()
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=TELL_SECONDS)
            if not done:
                self._task.cancel()
        self._task = self._writer = None

    async def let_go(self, index: int, controller: CellController, reason: str, message: str) -> None:
        """As `close`, for one cell whose controller is given up."""
        await self.close(controller, reason, message)
        self.reopen()

    def reopen(self) -> None:
        """Begin anew after `close`, with nothing remembered."""
        self._ending = None
        self._writers = {}

    def _begin(self, writer: CheckpointWriter, work: Any) -> None:
        self._writer = writer
        self._task = asyncio.create_task(work)
        self._task.add_done_callback(lambda _: self._wake())

    async def _collect(self, controller: CellController | None) -> None:
        """Let go of what has ended, and stop what nobody wants any more."""
        task, writer = self._task, self._writer
        if task is None or writer is None:
            return
        if not task.done():
            deleted = Key(writer.namespace, writer.name) not in self._cache.checkpoints
            if deleted and controller is not None and writer.status.phase not in TERMINAL:
                await controller.close()
            return
        self._task = self._writer = None
        task.result()  # what the task could not deal with is the worker's

    # ---- taking -------------------------------------------------------------------------------------------

    async def _take(
        self,
        writer: CheckpointWriter,
        controller: CellController,
        id: str,
        pinned: Sequence[phases.Pinned],
        timeouts: Mapping[str, float],
    ) -> None:
        """Take one checkpoint and write what came of it. Raises Superseded, KubeError."""

        async def tell(progress: Progress) -> None:
            status = self._announced(writer, id, controller.record, progress.phase, pinned, progress.participants)
            try:
                async with asyncio.timeout(TELL_SECONDS):
                    await self._persist(writer, status)
            except Gone as error:
                raise CheckpointFailed("Deleted", "the GymCheckpoint was deleted") from error
            except (Superseded, TimeoutError) as error:
                raise CheckpointFailed("StatusNotWritten", "its status could not be written") from error

        try:
            outcome = await controller.take(id, writer.name, tell, **timeouts)
        except CheckpointFailed as error:
            if (
                error.reason in ("CellNotRunning", "CheckpointOpen")
                and (writer.status.phase or "Pending") == "Pending"
            ):
                return  # something died in between: it stays in the queue
            reason, message = self._ending or (error.reason, str(error))
            if not error.settled:
                # A publication whose answer was lost may stand, or may still be finished by whoever settles what the
                # record has open: storage is asked before this is final.
                self._unsettled[writer.uid] = CheckpointFailed(reason, message, error.blockers)
                return
            await self._fail(writer, reason, message, error.blockers)
            return
        except StorageError as error:
            await self._fail(writer, "StorageError", str(error))
            return
        await self._published(writer, outcome.publication, outcome.uri, outcome.digest, outcome.pause_seconds)

    def _announced(
        self,
        writer: CheckpointWriter,
        id: str,
        record: CellRecord,
        phase: Any,
        pinned: Sequence[phases.Pinned],
        standing: Mapping[str, str],
    ) -> CheckpointStatus:
        assert record.open is not None  # the record is saved before a phase is told
        return phases.under_way(
            writer.status,
            phase,
            id,
            record.open.uri,
            record.attempt,
            pinned,
            standing,
            writer.generation,
            self._wall(),
        )

    # ---- what an operator before this one left ------------------------------------------------------------

    def _resolve(self, writer: CheckpointWriter, id: str) -> None:
        if self._wall() >= self._resolve_due:
            self._resolve_due = self._wall() + RESOLVE_SECONDS
            self._begin(writer, self._resolved(writer, id))

    async def _resolved(self, writer: CheckpointWriter, id: str) -> None:
        """Its record is settled or was never written: what landed under its key stands, and a tombstone lands where
        nothing did, so that nobody can publish it later."""
        uri = writer.status.uri
        if uri is None:
            await self._abandon(writer, "the operator ended before it had begun")
            return
        request = Request(
            id,
            writer.name,
            uri,
            "",
            0,
            writer.status.cells[0].attempt if writer.status.cells else 0,
            0,
            {},
        )
        grave = tombstone(request, "its operator ended before it was published", self._wall())
        try:
            landed = await asyncio.to_thread(lambda: settle(self._open_store(uri), grave))
        except StorageError as error:
            log.warning("checkpoint %s/%s cannot be settled yet: %s", writer.namespace, writer.name, error)
            return
        except ProtocolError as error:
            # As for a recovery: what nobody here can read nobody here can restore.
            landed = grave.model_copy(update={"reason": error.detail})
        if landed.state == "published":
            self._unsettled.pop(writer.uid, None)
            await self._published(writer, landed, uri, sha256(landed.to_bytes()), None)
        elif (failure := self._unsettled.pop(writer.uid, None)) is not None:
            await self._fail(writer, failure.reason, str(failure), failure.blockers)
        else:
            await self._abandon(writer, landed.reason)

    async def _abandon(self, writer: CheckpointWriter, why: str) -> None:
        message = f"the operator was restarted while it was being taken ({why}); create another GymCheckpoint"
        await self._fail(writer, "OperatorRestarted", message)

    # ---- ends ---------------------------------------------------------------------------------------------

    async def _published(
        self, writer: CheckpointWriter, publication: Publication, uri: str, digest: str, pause: float | None
    ) -> None:
        self.last = LastCheckpoint(
            name=writer.name,
            id=publication.checkpoint_id,
            uri=uri,
            digest=digest,
            time=format_time(publication.created),
        )
        status = phases.succeeded(writer.status, publication, uri, digest, pause, writer.generation, self._wall())
        await self._end(writer, status)

    async def _fail(
        self, writer: CheckpointWriter, reason: str, message: str, blockers: Sequence[tuple[str, Blocker]] = ()
    ) -> None:
        status = phases.failed(writer.status, reason, message, writer.generation, self._wall(), blockers)
        await self._end(writer, status)

    async def _end(self, writer: CheckpointWriter, status: CheckpointStatus) -> None:
        """Write a final status, however long that takes; a GymCheckpoint that is gone needs none."""
        try:
            await self._persist(writer, status)
        except Gone:
            return
        finally:
            self._writers.pop(writer.uid, None)
        subject = Subject(names.CHECKPOINT_KIND, writer.namespace, writer.name, writer.uid)
        said = (status.reason or "Unknown", status.message or "")
        self._events.say(subject, "Normal" if status.phase == "Succeeded" else "Warning", *said)
        self._cache.finish_checkpoint(Key(writer.namespace, writer.name), writer.uid)

    async def _persist(self, writer: CheckpointWriter, status: CheckpointStatus) -> None:
        """Write until it is written. Raises Gone, Superseded."""
        pause = 0.2
        while True:
            try:
                await writer.write(status)
                return
            except KubeError as error:
                log.warning("status of checkpoint %s/%s: %s", writer.namespace, writer.name, error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, LONGEST_RETRY_SECONDS)

    async def _write(self, writer: CheckpointWriter, status: CheckpointStatus) -> None:
        try:
            await writer.write(status)
        except Gone:
            self._cache.drop_checkpoint(Key(writer.namespace, writer.name), writer.uid)

    def _writer_of(self, body: Mapping[str, Any]) -> CheckpointWriter:
        """The writer of this very object. It knows what was written last, which the cache may not yet."""
        uid = body["metadata"]["uid"]
        if uid not in self._writers:
            present = {each["metadata"]["uid"] for each in self._cache.checkpoints_of(self._stack)}
            self._writers = {known: writer for known, writer in self._writers.items() if known in present}
            self._writers[uid] = writer_for(self._kube, body)
        return self._writers[uid]


def writer_for(kube: Kube, body: Mapping[str, Any]) -> CheckpointWriter:
    return CheckpointWriter(kube, body, CheckpointStatus.model_validate(body.get("status") or {}))


def pins(
    record: CellRecord, participants: Sequence[Participant], pods: Mapping[str, PodState]
) -> list[phases.Pinned]:
    """The processes that take part, as they are pinned."""
    found = []
    for each in participants:
        pod, pin = pods.get(each.name), record.pins.get(each.name)
        found.append(
            phases.Pinned(
                each.name,
                each.kind,
                pod.name if pod else None,
                pod.uid if pod else None,
                pin.session if pin else None,
            )
        )
    return found


def _timeouts(checkpoint: GymCheckpoint) -> dict[str, float]:
    timeouts = checkpoint.spec.timeouts
    chosen = {
        "prepare_timeout": timeouts.prepare if timeouts else None,
        "commit_timeout": timeouts.commit if timeouts else None,
    }
    return {name: float(parse_duration(text)) for name, text in chosen.items() if text is not None}
