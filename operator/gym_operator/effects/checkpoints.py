"""The GymCheckpoints of one stack, one at a time, beside the looks at its cells. Each cell's part of one is taken by
itself: one cell after the other, or all together.

A phase is written into the GymCheckpoint before the act it announces. Whatever an operator before this one left
behind is brought to an end first: by what the cell's record has open, else by what landed in storage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

from gym_operator.api import names
from gym_operator.api.checkpoint import TERMINAL, CheckpointStatus, GymCheckpoint
from gym_operator.api.conditions import AnyReason, ConditionReason
from gym_operator.api.objects import format_time
from gym_operator.api.stack import LastCheckpoint
from gym_operator.effects import checkpoint_part as parts
from gym_operator.effects.adoptions import is_adoption
from gym_operator.effects.cache import Key
from gym_operator.effects.checkpoint_part import Part
from gym_operator.effects.events import Subject
from gym_operator.effects.kube import Kube
from gym_operator.effects.services import Services
from gym_operator.effects.status_writers import CheckpointWriter, Gone
from gym_operator.rules import checkpoint_phases as phases
from gym_operator.rules import checkpoint_queue as queue
from gym_operator.rules.pod_state import PodState
from gym_servers.coordination.checkpoint import CheckpointFailed, Outcome
from gym_servers.coordination.controller import CellController
from gym_servers.coordination.record import CellRecord
from gym_servers.protocol.messages import Status
from gym_servers.stack.durations import parse_duration
from gym_servers.stack.spec import Participant, SpecError
from gym_servers.storage.manifest import Publication
from gym_servers.storage.store import ObjectStore

log = logging.getLogger(__name__)

RESOLVE_SECONDS: Final = 5.0
"""Between tries to learn from storage what became of a checkpoint."""
BLOCKERS_SECONDS: Final = 10.0
"""Before a checkpoint that is being prepared says what it waits for, and again where that has changed: most are
prepared sooner, and what many rollouts are at changes with each look."""

CellOrder = Literal["OneByOne", "Together"]
Work = Callable[[], Coroutine[Any, Any, parts.End]]


@dataclass(frozen=True)
class Side:
    """A cell's side of the queue. `controller` is None where nobody coordinates the cell now; `pinned` are the
    processes that would take part, `statuses` what they said last."""

    situation: queue.Situation
    controller: CellController | None
    pinned: Callable[[], Sequence[phases.Pinned]]
    statuses: Mapping[str, Status] = field(default_factory=dict)


_DELETED: Final = (ConditionReason.DELETED.value, "the GymCheckpoint was deleted before it was finished")
_GONE: Final = Side(
    queue.Situation(
        enabled=True,
        stage=None,
        free=False,
        open_id=None,
        obstacle=(ConditionReason.STACK_NOT_READY, "the stack does not have this cell any more"),
    ),
    None,
    tuple,
)


@dataclass
class _UnderWay:
    """A part that is being taken or resolved. `told`: when it began, or said last what it waits for. `closing` stops
    it, where nobody wants it any more."""

    part: Part
    task: asyncio.Task[None]
    controller: CellController | None
    told: float
    closing: asyncio.Task[None] | None = None


class Checkpoints:
    """The checkpoints of one stack. `among` are its cells now; `origin` is what each is told to be of; `active` names
    the checkpoint being taken; `last_of` is the newest that each cell has published since the operator began. `wake`
    is told the cell of a part that begins or ends."""

    def __init__(
        self,
        services: Services,
        stack: Key,
        open_store: Callable[[str], ObjectStore],
        wake: Callable[[int], None],
    ) -> None:
        self._kube, self._cache, self._events = services.kube, services.cache, services.events
        self._stack, self._open_store, self._wake = stack, open_store, wake
        self._wall, self._monotonic = services.wall, services.monotonic
        self._under_way: dict[int, _UnderWay] = {}
        self._writers: dict[str, CheckpointWriter] = {}
        self._resolve_due: dict[int, float] = {}
        self._endings: dict[int, tuple[str, str]] = {}
        self._hindered_since: dict[tuple[str, int, bool, bool], float] = {}
        self._unsettled: dict[tuple[str, int], CheckpointFailed] = {}
        self.among: Sequence[int] = (0,)
        self.origin: phases.Origin | None = None
        self.active: str | None = None
        self.last_of: dict[int, LastCheckpoint] = {}

    @property
    def waiting(self) -> bool:
        """Whether any checkpoint is not finished, so that it is worth looking often."""
        return bool(self._under_way) or bool(self._cache.checkpoints_of(self._stack))

    # ---- the queue ----------------------------------------------------------------------------------------

    async def adopt(self, index: int, record: CellRecord | None) -> None:
        """Before a cell is looked at: let a checkpoint that its record has open say so, with its place, which the
        record forgets once it is settled. Raises KubeError, Superseded."""
        if record is None or record.open is None or index in self._under_way:
            return
        for body in self._cache.checkpoints_of(self._stack):
            part = self._part(self._writer_of(body), index)
            told = phases.part_of(part.writer.status, index)
            if part.id == record.open.checkpoint_id and told.uri is None and told.phase == "Pending":
                await self._write(part.writer, part.announced(record, "Preparing", (), {}))

    async def step(self, cells: Mapping[int, Side], order: CellOrder) -> None:
        """See to the first of the queue. Raises KubeError, Superseded."""
        self._collect()
        active = None
        for body in queue.in_order(self._cache.checkpoints_of(self._stack)):
            if is_adoption(body):
                continue
            writer = self._writer_of(body)
            if writer.status.phase in TERMINAL:
                continue  # the watch has not told yet
            if self._unwanted(writer):
                await self._drop_what_has_not_begun(writer, cells)
                if writer.status.phase in TERMINAL:
                    continue
            try:
                checkpoint = GymCheckpoint.parse(body)
            except SpecError as error:
                await self._give_up(writer, ConditionReason.INVALID_SPEC, str(error))
                continue
            await self._advance(writer, checkpoint, cells, order)
            await self._tell_what_holds_up(cells)
            if writer.status.phase not in TERMINAL:
                active = writer.name if self._under_way or phases.has_begun(writer.status) else None
                break  # one at a time: the others wait for this one
        self.active = active

    async def _drop_what_has_not_begun(self, writer: CheckpointWriter, cells: Mapping[int, Side]) -> None:
        """Somebody has deleted it, and it is there only because data is to be removed: no part of it begins now."""
        among = [part.index for part in writer.status.cells] or self.among
        unbegun = [
            part
            for part in (self._part(writer, index) for index in among)
            if phases.part_of(writer.status, part.index).phase == "Pending"
            and part.index not in self._under_way
            and cells.get(part.index, _GONE).situation.open_id != part.id
        ]
        if len(unbegun) == len(among):
            await self._give_up(writer, *_DELETED)
            return
        for part in unbegun:
            await self._end(part, parts.Failed(*_DELETED))

    async def _advance(
        self, writer: CheckpointWriter, checkpoint: GymCheckpoint, cells: Mapping[int, Side], order: CellOrder
    ) -> None:
        """Do what is next for each cell's part of a checkpoint."""
        among = [part.index for part in writer.status.cells] or self.among
        left = [
            self._part(writer, index)
            for index in among
            if index not in self._under_way and phases.part_of(writer.status, index).phase not in TERMINAL
        ]
        sides = {part.index: cells.get(part.index, _GONE) for part in left}
        idle = not self._under_way and not any(side.situation.free for side in sides.values())
        last = idle and len(left) < len(among)
        unwanted = self._unwanted(writer)
        held: list[tuple[Part, AnyReason, str]] = []
        for part in left:
            side = sides[part.index]
            phase = phases.part_of(writer.status, part.index).phase
            hindered = self._hindered(part, side.situation, queue.hinders(side.situation, last, unwanted=unwanted))
            match queue.next_move(phase, part.id, hindered, side.situation, last=last, unwanted=unwanted):
                case queue.Take() if not _is_tied(checkpoint):
                    pass  # no data is written before the object is held for it
                case queue.Take() if side.controller is not None and (order == "Together" or not self._under_way):
                    wishes = side.pinned(), _wishes(checkpoint)
                    taking = partial(parts.take, part, side.controller, self._open_store, *wishes)
                    self._begin(part, taking, side.controller)
                case queue.Resolve():
                    self._resolve(part)
                case queue.Forsake() if side.controller is not None:
                    await side.controller.forsake(part.id)
                case queue.Fail(reason, message):
                    await self._end(part, parts.Failed(reason, message))
                case queue.Hold(reason, message) if reason is not None:
                    held.append((part, reason, message))
                case _:
                    pass
        if not self._under_way and not phases.has_begun(writer.status):
            held = held[:1]  # the whole can say one thing
        for part, why, message in held:
            await self._write(writer, _waiting(part, why, message))

    async def _tell_what_holds_up(self, cells: Mapping[int, Side]) -> None:
        """Let the status name what the parts that are being prepared wait for. Raises KubeError, Superseded."""
        now = self._monotonic()
        for found in list(self._under_way.values()):
            part, side = found.part, cells.get(found.part.index, _GONE)
            if now - found.told < BLOCKERS_SECONDS or not part.takers <= side.statuses.keys():
                continue  # of whoever does not answer nobody knows what it waits for
            blockers = phases.waited_for(side.statuses, part.id)
            before = part.writer.status
            await self._write(part.writer, partial(phases.held_up, which=part.which, blockers=blockers, at=part.at))
            if part.writer.status is not before:
                found.told = now

    def _hindered(self, part: Part, situation: queue.Situation, hindered: bool) -> float:
        """For how many seconds time has run against a part, since its cell's record has said of it what it says."""
        is_open = situation.open_id == part.id
        key = (part.writer.uid, part.index, is_open, is_open and situation.given_up)
        if not hindered:
            self._hindered_since.pop(key, None)
            return 0.0
        return self._monotonic() - self._hindered_since.setdefault(key, self._monotonic())

    # ---- ends that others bring about ---------------------------------------------------------------------

    async def let_go(self, index: int, controller: CellController, reason: str, message: str) -> None:
        """Give up what is being taken in a cell, and say why: its controller is given up."""
        self._endings[index] = (reason, message)
        try:
            await controller.close()
            if (found := self._under_way.get(index)) is not None:
                done, _ = await asyncio.wait([found.task], timeout=parts.TELL_SECONDS)
                if not done:
                    found.task.cancel()
                self._under_way.pop(index, None)
        finally:
            self._endings.pop(index, None)

    async def close(self, reason: str, message: str) -> None:
        """Give up what was begun, as when the operator ends or the stack is gone, and say why. Each cell has let go
        of its part before; what storage has still to be asked about is left to the next operator. Raises KubeError,
        Superseded."""
        for found in self._under_way.values():
            found.task.cancel()
        self._under_way.clear()
        for writer in list(self._writers.values()):
            status = writer.status
            unknown = any(part.phase in phases.OPEN for part in status.cells)
            if status.phase not in TERMINAL and phases.has_begun(status) and not unknown:
                await self._give_up(writer, reason, message)

    def published(self, index: int, name: str, outcome: Outcome) -> None:
        """A cell has published a checkpoint that no GymCheckpoint asked for."""
        self.last_of[index] = _last(name, outcome.publication, outcome.uri, outcome.digest)

    def forget(self) -> None:
        """Begin anew, with nothing remembered of what was written: somebody else writes too."""
        self._writers = {}

    # ---- one part -----------------------------------------------------------------------------------------

    def _part(self, writer: CheckpointWriter, index: int) -> Part:
        id = phases.checkpoint_id(writer.name, writer.uid)
        return Part(writer, index, self.among, id, self._wall, self.origin)

    def _begin(self, part: Part, work: Work, controller: CellController | None) -> None:
        async def run() -> None:
            if part.index not in self._endings:  # else its cell has been let go of before this has begun
                await self._end(part, await work())

        task = asyncio.create_task(run())
        task.add_done_callback(lambda _: self._wake(part.index))
        self._under_way[part.index] = _UnderWay(part, task, controller, self._monotonic())
        self._wake(part.index)  # what goes on in a cell is looked at more often

    def _resolve(self, part: Part) -> None:
        if self._monotonic() >= self._resolve_due.get(part.index, float("-inf")):
            self._resolve_due[part.index] = self._monotonic() + RESOLVE_SECONDS
            failure = self._unsettled.get((part.writer.uid, part.index))
            self._begin(part, partial(parts.resolve, part, self._open_store, failure), None)

    def _collect(self) -> None:
        """Let go of what has ended, and stop what nobody wants any more. Raises what a part could not deal with."""
        for index, found in list(self._under_way.items()):
            writer = found.part.writer
            if found.task.done():
                del self._under_way[index]
                if not found.task.cancelled():
                    found.task.result()
            elif found.controller is not None and found.closing is None and self._unwanted(writer):
                found.closing = asyncio.create_task(found.controller.close())

    def _unwanted(self, writer: CheckpointWriter) -> bool:
        """Whether somebody has deleted it: where it is still there, its data is to be removed."""
        body = self._cache.checkpoints.get(Key(writer.namespace, writer.name))
        if body is None or body["metadata"]["uid"] != writer.uid:
            return True
        return bool(body["metadata"].get("deletionTimestamp"))

    # ---- ends ---------------------------------------------------------------------------------------------

    async def _end(self, part: Part, end: parts.End) -> None:
        """Write what came of a part, however long that takes; a GymCheckpoint that is gone needs nothing."""
        writer, which = part.writer, part.which
        ending = self._endings.get(part.index)
        if ending is None and self._unwanted(writer):
            ending = _DELETED
        if isinstance(end, parts.Unsettled):
            # A publication whose answer was lost may stand, or may still be finished by whoever settles what the
            # record has open: storage is asked before this is final.
            reason, message = ending or (end.failure.reason, str(end.failure))
            self._unsettled[writer.uid, part.index] = CheckpointFailed(reason, message, end.failure.blockers)
            return
        match end:
            case parts.Published(publication, uri, digest, pause):
                self.last_of[part.index] = _last(writer.name, publication, uri, digest)

                def change(status: CheckpointStatus) -> CheckpointStatus:
                    return phases.part_succeeded(status, which, publication, uri, digest, pause, part.at)

            case parts.Failed(failed, said, blockers):
                reason, message = ending or (failed, said)

                def change(status: CheckpointStatus) -> CheckpointStatus:
                    return phases.part_failed(status, which, reason, message, part.at, blockers)

            case None:
                return
        self._unsettled.pop((writer.uid, part.index), None)
        with suppress(Gone):
            await parts.persist(writer, change)
            self._concluded(writer)
        if isinstance(end, parts.Failed) and end.blockers:
            subject = Subject(names.CHECKPOINT_KIND, writer.namespace, writer.name, writer.uid)
            self._events.say(subject, "Warning", "Blocked", phases.blocked_by(end.blockers))

    async def _give_up(self, writer: CheckpointWriter, reason: str, message: str) -> None:
        at = phases.At(writer.generation, self._wall())
        with suppress(Gone):
            await parts.persist(writer, lambda status: phases.failed(status, reason, message, at))
            self._concluded(writer)

    def _concluded(self, writer: CheckpointWriter) -> None:
        """Tell of a checkpoint if it is final now."""
        status = writer.status
        if status.phase not in TERMINAL:
            return
        self._writers.pop(writer.uid, None)
        self._hindered_since = {key: at for key, at in self._hindered_since.items() if key[0] != writer.uid}
        subject = Subject(names.CHECKPOINT_KIND, writer.namespace, writer.name, writer.uid)
        level: Literal["Normal", "Warning"] = "Normal" if status.phase == "Succeeded" else "Warning"
        self._events.say(subject, level, status.reason or "Unknown", status.message or "")
        self._cache.finish_checkpoint(Key(writer.namespace, writer.name), writer.uid)

    async def _write(self, writer: CheckpointWriter, change: parts.Change) -> None:
        try:
            await writer.write(change)
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


def _is_tied(checkpoint: GymCheckpoint) -> bool:
    """Whether the object stays until its data is removed, where that is wanted."""
    return checkpoint.spec.deletion_policy == "Retain" or names.DATA_FINALIZER in checkpoint.metadata.finalizers


def _last(name: str, publication: Publication, uri: str, digest: str) -> LastCheckpoint:
    return LastCheckpoint(
        name=name, id=publication.checkpoint_id, uri=uri, digest=digest, time=format_time(publication.created)
    )


def _waiting(part: Part, reason: AnyReason, message: str) -> parts.Change:
    return lambda status: phases.waiting(status, part.which, reason, message, part.at)


def writer_for(kube: Kube, body: Mapping[str, Any]) -> CheckpointWriter:
    return CheckpointWriter(kube, body)


def pins(
    record: CellRecord | None, participants: Sequence[Participant], pods: Mapping[str, PodState]
) -> list[phases.Pinned]:
    """The processes that take part, as they are pinned."""
    found = []
    for each in participants:
        pod, pin = pods.get(each.name), record.pins.get(each.name) if record else None
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


def _wishes(checkpoint: GymCheckpoint) -> dict[str, Any]:
    """What the spec asks for, as `CellController.take` takes it."""
    spec = checkpoint.spec
    timeouts = spec.timeouts
    chosen = {
        "prepare_timeout": timeouts.prepare if timeouts else None,
        "commit_timeout": timeouts.commit if timeouts else None,
    }
    return {
        **{name: float(parse_duration(text)) for name, text in chosen.items() if text is not None},
        "episodes": None if spec.episodes is None else frozenset(spec.episodes),
        "stop": spec.stop_after,
        "labels": spec.labels,
        "driver_state": None if spec.driver_state is None else spec.driver_state.document(),
    }
