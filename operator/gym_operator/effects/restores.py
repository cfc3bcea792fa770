"""Brings one stack to the checkpoints that GymRestores name, one restore at a time, in order of creation.

Everything is read and checked before a single server is disturbed. Then the choice is written into the GymRestore,
and after it into the cell's record, from where it is carried out as any recovery: whoever dies meanwhile, the next
look goes on with it. The next restore never waits for one that has failed or was deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from gym_operator.api import names
from gym_operator.api.conditions import AnyReason, ConditionReason
from gym_operator.api.restore import Continued, GymRestore, RestoreCell, RestoredCheckpoint, RestoreStatus
from gym_operator.effects.cache import Key, key_of
from gym_operator.effects.events import Level, Subject
from gym_operator.effects.kube import CHECKPOINTS, NotFound
from gym_operator.effects.services import Services
from gym_operator.effects.status_writers import Gone, RestoreWriter, Superseded
from gym_operator.effects.waits import Waits
from gym_operator.rules import restores as rules
from gym_operator.rules.checkpoint_queue import PATIENCE_SECONDS, Obstacle
from gym_servers.coordination.cell_host import Wish
from gym_servers.coordination.controller import CellController
from gym_servers.coordination.record import CellRecord, Choice
from gym_servers.protocol.errors import ProtocolError
from gym_servers.stack.spec import Participant, SpecError
from gym_servers.storage.cells import publication_of, verify
from gym_servers.storage.manifest import Publication
from gym_servers.storage.store import ObjectStore, StorageError

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0
"""Between tries to read a checkpoint from a storage that does not answer."""


Parts = Sequence[tuple[rules.Place, Publication]]
"""A checkpoint that was read: where each cell's part is, and what it publishes."""


class Restores:
    """The restores of one stack."""

    def __init__(
        self,
        services: Services,
        stack: Key,
        stack_uid: str,
        open_store: Callable[[str], ObjectStore],
        wake: Callable[[], None],
        wake_cell: Callable[[int], None],
    ) -> None:
        self._kube, self._cache, self._events = services.kube, services.cache, services.events
        self._stack, self._uid = stack, stack_uid
        self._wall, self._monotonic = services.wall, services.monotonic
        self._waits = Waits(services.monotonic)
        self._open_store, self._wake, self._wake_cell = open_store, wake, wake_cell
        self._writers: dict[str, RestoreWriter] = {}
        self._reading: asyncio.Task[Parts] | None = None
        self._read_places: tuple[rules.Place, ...] = ()
        self._due = float("-inf")
        self._troubled: tuple[str, float] | None = None
        self._queued = False
        self._wishes: dict[int, Wish] = {}

    @property
    def waiting(self) -> bool:
        """Whether any restore is not finished, so that it is worth looking often."""
        return bool(self._mine())

    @property
    def is_next(self) -> bool:
        """Whether a restore waits for the checkpoint that is being taken, or for a cell to begin with it, so that no
        other checkpoint is to begin."""
        return self._queued or bool(self._wishes)

    def close(self) -> None:
        """Leave what is under way to the next operator."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def step(
        self,
        cells: Mapping[int, CellRecord | None],
        participants: Sequence[Participant],
        obstacle: Obstacle | None,
        taking: str | None,
    ) -> None:
        """See to the first of the queue. `cells` are those that the spec has, with their records as far as there are
        any; `taking` is the checkpoint that is being taken. Raises KubeError."""
        self._queued = False
        mine = self._mine()
        present = {body["metadata"]["uid"] for body in mine}
        self._wishes = {index: wish for index, wish in self._wishes.items() if wish.by in present}
        self._waits.keep(present)
        self._writers = {uid: writer for uid, writer in self._writers.items() if uid in present}
        for body in mine:
            # It knows what was written last, which the cache may not yet.
            writer = self._writers.setdefault(body["metadata"]["uid"], RestoreWriter(self._kube, body))
            if writer.status.completion_time is not None:
                continue  # the watch has not told yet
            try:
                if await self._see_to(writer, body, cells, participants, obstacle, taking):
                    return  # one at a time: the others wait for this one
            except Gone:
                self._cache.restores.drop(key_of(body), writer.uid)
            except Superseded:
                del self._writers[writer.uid]  # another operator is at it: look anew
                return

    def _mine(self) -> list[Mapping[str, Any]]:
        here = [body for body in self._cache.restores.values() if key_of(body).namespace == self._stack.namespace]
        return rules.in_order(here, self._stack.name)

    async def _see_to(
        self,
        writer: RestoreWriter,
        body: Mapping[str, Any],
        cells: Mapping[int, CellRecord | None],
        participants: Sequence[Participant],
        obstacle: Obstacle | None,
        taking: str | None,
    ) -> bool:
        """Whether it is not done with yet."""
        try:
            restore = GymRestore.parse({**body, "status": writer.status.document()})
        except SpecError as error:
            return await self._fail(writer, ConditionReason.INVALID_SPEC, str(error))
        if restore.status.phase == "Restoring":
            return await self._go_on(writer, restore, cells)
        if obstacle is not None:
            return await self._trouble(writer, *obstacle)
        if self._reading is None or self._reading.get_name() != writer.uid:
            return await self._begin_reading(writer, restore)
        if not self._reading.done():
            return True
        try:
            parts = await self._reading
        except ProtocolError as error:
            return await self._not_whole(writer, restore, error.detail)
        except StorageError as error:
            return await self._trouble(writer, error.problem, str(error))
        self._troubled = None
        return await self._begin(writer, parts, cells, participants, taking)

    # ---- reading ------------------------------------------------------------------------------------------

    async def _begin_reading(self, writer: RestoreWriter, restore: GymRestore) -> bool:
        if self._monotonic() < self._due:
            return True
        passed = restore.status.passed_over
        match await self._resolve(restore):
            case rules.Found(places):
                # Before it is read: from then on nobody removes it, however long the restore has to wait.
                await writer.put(rules.choosing(writer.status, places, writer.generation, self._wall()))
                self._read_beside(writer.uid, places)
                return True
            case rules.Wait() if passed:
                return await self._fail(writer, ConditionReason.SOURCE_INVALID, rules.none_whole(passed))
            case rules.Refuse(reason, message):
                return await self._fail(writer, reason, message)
            case rules.Wait(reason, message, patient):
                self._due = self._monotonic() + 1.0
                if not patient and self._waits.seconds(writer.uid) > PATIENCE_SECONDS:
                    return await self._fail(writer, reason, message)
                await self._wait(writer, reason, message)
                return True

    async def _resolve(self, restore: GymRestore) -> rules.Found | rules.Wait | rules.Refuse:
        """Which checkpoint is meant. The API server is asked: a watch that lags behind would choose an older one."""
        spec = restore.spec
        if (found := rules.by_place(spec) or rules.chosen(restore.status)) is not None:
            return found
        if spec.checkpoint_ref is not None:
            name = spec.checkpoint_ref.name
            try:
                return rules.by_checkpoint(await self._kube.get(CHECKPOINTS, self._stack.namespace, name), name)
            except NotFound:
                return rules.by_checkpoint(None, name)
        passed = frozenset(each.uri for each in restore.status.passed_over)
        search = rules.Labelled(spec.labels or {}, self._stack.name, self._uid, passed)
        async for page in self._kube.pages(CHECKPOINTS, self._stack.namespace):
            search = search.seen(page.items)
        return search.found()

    async def _not_whole(self, writer: RestoreWriter, restore: GymRestore, why: str) -> bool:
        """Of those with the labels that were asked for the next older one is tried, as after a death; whoever names
        one gets that one or none."""
        told = (
            rules.passing_over(writer.status, why, writer.generation, self._wall()) if restore.spec.labels else None
        )
        if told is None:
            return await self._fail(writer, ConditionReason.SOURCE_INVALID, why)
        self._reading = None
        await writer.put(told)
        self._events.say(_subject(writer), "Warning", "CheckpointUnusable", told.message or "")
        return True

    def _read_beside(self, uid: str, places: Sequence[rules.Place], *, whole: bool = True) -> None:
        self.close()  # it may be of one that is not there any more
        self._reading = asyncio.create_task(self._read(places, whole), name=uid)
        self._read_places = tuple(places)
        self._reading.add_done_callback(lambda _: self._wake())

    async def _read(self, places: Sequence[rules.Place], whole: bool) -> Parts:
        def look(place: rules.Place) -> Publication:
            store = self._open_store(place.uri)
            publication = publication_of(store, place.digest)
            if whole:
                verify(store, publication.members, publication.checkpoint_id)
            return publication

        parts = []
        for place in places:
            publication = await asyncio.to_thread(look, place)
            parts.append((replace(place, cell=publication.cell if place.cell is None else place.cell), publication))
        return parts

    async def _read_again(self, writer: RestoreWriter, cells: Sequence[RestoreCell], *, whole: bool) -> Parts | None:
        """What a restore that is under way restores, once it is read; None until then. Raises ProtocolError."""
        task, places = self._reading, tuple(rules.Place(cell.uri, cell.digest, cell.index) for cell in cells)
        if task is None or task.get_name() != writer.uid or self._read_places != places:
            if self._monotonic() >= self._due:
                self._read_beside(writer.uid, places, whole=whole)
            return None
        if not task.done():
            return None
        self._reading, self._due = None, self._monotonic() + RETRY_SECONDS
        try:
            return await task
        except StorageError as error:
            log.warning("restore %s/%s: %s", writer.namespace, writer.name, error)
            return None

    # ---- restoring ----------------------------------------------------------------------------------------

    async def _begin(
        self,
        writer: RestoreWriter,
        parts: Parts,
        cells: Mapping[int, CellRecord | None],
        participants: Sequence[Participant],
        taking: str | None,
    ) -> bool:
        """Nothing was changed up to here. From here on the choice is durable before it is acted upon."""
        if taking is not None:
            self._queued = True
            await self._wait(writer, ConditionReason.QUEUED, f"waits until checkpoint {taking} is taken")
            return True
        if None in cells.values():
            await self._wait(writer, ConditionReason.STACK_NOT_READY, "waits until the stack is looked after")
            return True
        fitting = _into(parts, cells)
        if fitting is None:
            wanted = ", ".join(str(place.cell) for place, _ in parts)
            message = (
                f"the checkpoint has parts of the cells {wanted}; set spec.cells of the stack so that it has them"
            )
            return await self._fail(writer, ConditionReason.MISFIT, message)
        for _, publication in fitting:
            if wrong := rules.misfit(publication, participants):
                return await self._fail(writer, ConditionReason.MISFIT, wrong)
        first = fitting[0][1]
        checkpoint = RestoredCheckpoint(name=first.name, id=first.checkpoint_id, stack_uid=first.stack_uid)
        now = self._wall()
        places = [place for place, _ in fitting]
        await writer.put(rules.restoring(writer.status, checkpoint, places, writer.generation, now))
        self._ask(writer.uid, fitting)
        return True

    def _ask(self, uid: str, parts: Parts) -> None:
        """Ask the cells to begin: each does so at its next look."""
        for place, publication in parts:
            choice = Choice(
                uri=place.uri,
                digest=place.digest,
                checkpoint_id=publication.checkpoint_id,
                name=publication.name,
            )
            index = place.cell or 0
            self._wishes[index] = Wish(choice, uid, rules.highest_attempt_of(publication))
            self._wake_cell(index)
        self._reading = None

    async def fulfil(self, index: int, controller: CellController) -> None:
        """After a look at a cell: bring it to what was chosen for it, or away from it where the restore has failed.
        Raises StorageError, and what saving the record raises."""
        chosen = controller.record.chosen
        if (wish := self._wishes.get(index)) is not None:
            await controller.restore_chosen(wish)
            if self._wishes.get(index) is wish:
                del self._wishes[index]
        elif chosen is not None and chosen.by in rules.failed_ones(self._cache.restores.values()):
            await controller.give_up_chosen(chosen.by, f"the restore to checkpoint {chosen.choice.name} has failed")

    async def _go_on(
        self, writer: RestoreWriter, restore: GymRestore, cells: Mapping[int, CellRecord | None]
    ) -> bool:
        """See how far it is; an operator that died may have left it before a cell knew."""
        status = restore.status
        begun = {}
        standing = {}
        for cell in status.cells:
            if cell.index not in cells:
                message = f"cell {cell.index} was taken away from the stack meanwhile"
                return await self._fail(writer, ConditionReason.MISFIT, message)
            record = cells[cell.index]
            if record is None:
                return True  # it is not looked after yet
            standing[cell.index] = rules.progress(
                record, writer.uid, cell.attempt is not None, restore.spec.backoff_limit
            )
            own = record.chosen if record.chosen is not None and record.chosen.by == writer.uid else None
            begun[cell.index] = own.attempt if own is not None else cell.attempt
        # Before the write is waited for: a cell that begins meanwhile has no wish any more, though it was asked.
        unasked = [
            cell for cell in status.cells if standing[cell.index] == "Pending" and cell.index not in self._wishes
        ]
        await writer.put(rules.begun(writer.status, begun))
        given_up = next((why for why in standing.values() if isinstance(why, tuple)), None)
        if given_up is not None:
            return await self._fail(writer, *given_up)  # the cells hear of it by the watch
        try:
            if unasked:  # the operator that had read it has died
                if (parts := await self._read_again(writer, unasked, whole=True)) is not None:
                    self._ask(writer.uid, parts)
                return True
            if set(standing.values()) != {"Succeeded"}:
                return True
            parts = await self._read_again(writer, status.cells, whole=False)
        except ProtocolError as error:
            # Where the cells have restored it already, it was removed in that moment.
            if not unasked:
                return await self._succeed(writer, (), {})
            return await self._fail(writer, ConditionReason.SOURCE_INVALID, error.detail)
        if parts is None:
            return True
        attempts = {index: record.attempt for index, record in cells.items() if record is not None}
        return await self._succeed(writer, parts, attempts)

    async def _succeed(self, writer: RestoreWriter, parts: Parts, attempts: Mapping[int, int]) -> bool:
        going_on: list[Continued] = []
        for place, publication in parts:
            assert place.cell is not None  # by now they are known
            going_on += rules.continued(publication, attempts[place.cell], place.cell)
        return await self._end(writer, rules.succeeded(writer.status, going_on, writer.generation, self._wall()))

    # ---- its status ---------------------------------------------------------------------------------------

    async def _wait(self, writer: RestoreWriter, reason: AnyReason, message: str) -> None:
        await writer.put(rules.waiting(writer.status, reason, message, writer.generation, self._wall()))

    async def _trouble(self, writer: RestoreWriter, reason: AnyReason, message: str) -> bool:
        """Wait for what only a person can mend, and not for ever."""
        now = self._monotonic()
        if self._troubled is None or self._troubled[0] != writer.uid:
            self._troubled = (writer.uid, now)
        self._reading, self._due = None, now + RETRY_SECONDS
        if now - self._troubled[1] > PATIENCE_SECONDS:
            return await self._fail(writer, reason, message)
        await self._wait(writer, reason, message)
        return True

    async def _fail(self, writer: RestoreWriter, reason: str, message: str) -> bool:
        # Before it is written: a cell that has not begun would go back with the others, and may be far ahead.
        self._wishes = {index: wish for index, wish in self._wishes.items() if wish.by != writer.uid}
        return await self._end(writer, rules.failed(writer.status, reason, message, writer.generation, self._wall()))

    async def _end(self, writer: RestoreWriter, status: RestoreStatus) -> bool:
        await writer.put(status)
        self._reading = self._troubled = None
        level: Level = "Normal" if status.phase == "Succeeded" else "Warning"
        self._events.say(_subject(writer), level, status.reason or "Unknown", status.message or "")
        return False


def _subject(writer: RestoreWriter) -> Subject:
    return Subject(names.RESTORE_KIND, writer.namespace, writer.name, writer.uid)


def _into(parts: Parts, cells: Mapping[int, object]) -> Parts | None:
    """The parts, each for a cell of this stack; None where they do not fit. A single part goes into a single cell,
    whichever it was taken of."""
    if len(parts) == len(cells) == 1:
        (only,) = cells
        return [(replace(parts[0][0], cell=only), parts[0][1])]
    return parts if {place.cell for place, _ in parts} <= set(cells) else None
