"""Writing status: of a stack, which holds the records of its cells, and of the other kinds.

One writer per object, which remembers what it wrote last. Every write replaces the status on a resource version, so a
second operator is noticed: its write makes ours conflict, and what it wrote is not what we remember.

    Gone         the object was deleted, or another one has its name
    Superseded   somebody else has written since: what we know is out of date
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Generic, TypeVar

from gym_operator.api import names
from gym_operator.api.checkpoint import CheckpointStatus
from gym_operator.api.objects import StatusModel
from gym_operator.api.restore import RestoreStatus
from gym_operator.api.schedule import ScheduleStatus
from gym_operator.api.stack import CellStatus, StackStatus
from gym_operator.effects.kube import (
    CHECKPOINTS,
    RESTORES,
    SCHEDULES,
    STACKS,
    Body,
    Conflict,
    Kube,
    KubeError,
    NotFound,
    Resource,
)
from gym_operator.rules.cell_record import from_document, to_document
from gym_servers.coordination.record import CellRecord
from gym_servers.unattended import unattended

StatusT = TypeVar("StatusT", bound=StatusModel)

TRIES: Final = 5
"""Writes of others (annotations, the spec) cause conflicts that mean nothing; more in a row are not credible."""


class Gone(Exception):
    """The object was deleted, or another one has its name."""


class Superseded(Exception):
    """Another operator has written since."""


class StackWriter:
    """The status of one stack, with the record of each of its cells. `status` is what was written or read last.

    Each record is fenced on its own: where another operator has written the one of a cell, that is believed and kept,
    and only what concerns that cell ends in Superseded, until `reload` says that it is known.

    `follow` gives the status that goes with a new record of a cell, so that no status ever shows a cell as running
    whose record says that it is being replaced.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        uid: str,
        follow: Callable[[StackStatus, int, CellRecord], StackStatus] = lambda status, cell, record: status,
    ) -> None:
        self._kube, self._namespace, self._name, self._uid = kube, namespace, name, uid
        self._follow = follow
        self._version = ""
        self._writing = asyncio.Lock()
        self.status = StackStatus()
        self._records: dict[int, CellRecord] = {}
        self._unanswered: dict[int, CellRecord] = {}
        self._superseded: set[int] = set()

    def record(self, cell: int) -> CellRecord | None:
        """The record of a cell as it was written or read last."""
        return self._records.get(cell)

    @property
    def cells(self) -> Collection[int]:
        """The cells that have a record."""
        return self._records.keys()

    def superseded(self, cell: int) -> bool:
        """Whether another operator was seen to have written the record of this cell."""
        return cell in self._superseded

    async def load(self) -> Body:
        """Read the stack afresh, and believe it. Raises Gone, KubeError, ValueError."""
        async with self._writing:
            body = await self._current()
            self._version = body["metadata"]["resourceVersion"]
            self.status = StackStatus.model_validate(body.get("status") or {})
            self._records = _records_of(body)
            self._superseded = set()
            return body

    async def reload(self, cell: int) -> None:
        """Read afresh what stands of one cell, and believe it. Raises Gone, KubeError, ValueError."""
        async with self._writing:
            self._meet(await self._current())
            self._superseded.discard(cell)

    async def save_record(self, cell: int, record: CellRecord) -> None:
        """Make a cell's record durable. Raises Gone, Superseded, KubeError."""
        async with self._writing:
            await self._replace(lambda: self._follow(self.status, cell, record), (cell, record))

    async def settled_record(self, cell: int) -> CellRecord | None:
        """The record of a cell, once no write of it is under way."""
        async with self._writing:
            return self.record(cell)

    async def write(self, make: Callable[[StackStatus], StackStatus | None]) -> bool:
        """Write the status that `make` gives for the present one, with the records as they were saved last; False
        where it gives none, or one in which nothing has changed. Raises Gone, KubeError."""
        async with self._writing:
            status = make(self.status)
            if status is None or self._with_records(status) == self.status:
                return False
            await self._replace(lambda: status)
            return True

    async def _replace(self, make: Callable[[], StackStatus], saved: tuple[int, CellRecord] | None = None) -> None:
        for _ in range(TRIES):
            if saved is not None and saved[0] in self._superseded:
                raise Superseded(f"another operator has written the record of cell {saved[0]}")
            status = self._with_records(make(), saved)
            body = _body(names.STACK_KIND, self._namespace, self._name, self._uid, self._version, status.document())
            try:
                written = await self._kube.replace_status(STACKS, self._namespace, body)
            except NotFound as error:
                raise Gone(str(error)) from error
            except Conflict:
                self._meet(await self._current())
                continue
            except KubeError:
                if saved is not None:
                    self._unanswered[saved[0]] = saved[1]  # it may have been written all the same
                raise
            self._version = written["metadata"]["resourceVersion"]
            self.status = status
            if saved is not None:
                self._records[saved[0]] = saved[1]
            return
        raise KubeError(409, f"the status of stack {self._name} could not be written: it changes all the time")

    async def _current(self) -> Body:
        return await _current(self._kube, STACKS, self._namespace, self._name, self._uid)

    def _meet(self, current: Body) -> None:
        """Take over what stands, and note of which cells somebody else has written the record."""
        theirs = _records_of(current)
        for cell in self._records.keys() | theirs.keys():
            if theirs.get(cell) not in (self._records.get(cell), self._unanswered.get(cell)):
                self._superseded.add(cell)
        self._records = theirs
        self._version = current["metadata"]["resourceVersion"]

    def _with_records(self, status: StackStatus, saved: tuple[int, CellRecord] | None = None) -> StackStatus:
        records = self._records if saved is None else {**self._records, saved[0]: saved[1]}
        cells = {cell.index: cell for cell in status.cells}
        for index, record in records.items():
            update = {"record": to_document(record), "attempt": record.attempt}
            cells[index] = (cells.get(index) or CellStatus(index=index)).model_copy(update=update)
        attempt = max((cell.attempt for cell in cells.values()), default=0)
        return status.model_copy(update={"cells": tuple(cells[i] for i in sorted(cells)), "attempt": attempt})


class ObjectWriter(Generic[StatusT]):
    """The status of one object of a kind of ours. `status` is what was written or read last."""

    resource: Resource
    kind: str
    model: type[StatusT]

    def __init__(self, kube: Kube, body: Mapping[str, Any]) -> None:
        metadata = body["metadata"]
        self._kube, self._version = kube, str(metadata["resourceVersion"])
        self.namespace, self.name, self.uid = metadata["namespace"], metadata["name"], metadata["uid"]
        self.generation = int(metadata.get("generation") or 0)
        self.status = self.model.model_validate(body.get("status") or {})
        self._unanswered: StatusT | None = None
        self._writing = asyncio.Lock()

    async def write(self, change: Callable[[StatusT], StatusT]) -> None:
        """Write what `change` makes of the status as it stands, if that differs: several cells have their part in
        it. Raises Gone, Superseded, KubeError.

        Whoever waits may be broken off by a death; the write goes on, so that what is there is never unknown.
        """
        await asyncio.shield(unattended(self._write(change)))

    async def put(self, status: StatusT) -> None:
        """Write this status if it differs, whatever stands. Raises Gone, Superseded, KubeError."""
        await self.write(lambda _: status)

    async def _write(self, change: Callable[[StatusT], StatusT]) -> None:
        async with self._writing:
            for _ in range(TRIES):
                status = change(self.status)
                if status == self.status:
                    return
                document = status.document()
                body = _body(self.kind, self.namespace, self.name, self.uid, self._version, document)
                try:
                    written = await self._kube.replace_status(self.resource, self.namespace, body)
                except NotFound as error:
                    raise Gone(str(error)) from error
                except Conflict:
                    current = await _current(self._kube, self.resource, self.namespace, self.name, self.uid)
                    theirs = self.model.model_validate(current.get("status") or {})
                    if theirs not in (self.status, self._unanswered, status):
                        raise Superseded(
                            f"another operator has written the status of {self.kind} {self.name}"
                        ) from None
                    # What we did not hear of may be our own: then nothing is left to change.
                    self.status, self._version = theirs, current["metadata"]["resourceVersion"]
                    continue
                except KubeError:
                    self._unanswered = status  # it may have been written all the same
                    raise
                self.status, self._version = status, written["metadata"]["resourceVersion"]
                return
            raise KubeError(
                409, f"the status of {self.kind} {self.name} could not be written: it changes all the time"
            )


class CheckpointWriter(ObjectWriter[CheckpointStatus]):
    """The status of one GymCheckpoint."""

    resource, kind, model = CHECKPOINTS, names.CHECKPOINT_KIND, CheckpointStatus


class ScheduleWriter(ObjectWriter[ScheduleStatus]):
    """The status of one GymCheckpointSchedule."""

    resource, kind, model = SCHEDULES, names.SCHEDULE_KIND, ScheduleStatus


class RestoreWriter(ObjectWriter[RestoreStatus]):
    """The status of one GymRestore."""

    resource, kind, model = RESTORES, names.RESTORE_KIND, RestoreStatus


def _body(kind: str, namespace: str, name: str, uid: str, version: str, status: Body) -> Body:
    metadata = {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": version}
    return {"apiVersion": names.API_VERSION, "kind": kind, "metadata": metadata, "status": status}


async def _current(kube: Kube, resource: Resource, namespace: str, name: str, uid: str) -> Body:
    try:
        body = await kube.get(resource, namespace, name)
    except NotFound as error:
        raise Gone(str(error)) from error
    if body["metadata"]["uid"] != uid:
        raise Gone(f"{name} was deleted and made again")
    return body


def _records_of(body: Mapping[str, Any]) -> dict[int, CellRecord]:
    """The records in a stack's status, by cell. Raises ValueError where one cannot be read."""
    cells = (body.get("status") or {}).get("cells") or ()
    found = ((int(cell["index"]), from_document(cell.get("record"))) for cell in cells)
    return {index: record for index, record in found if record is not None}
