"""Writing status: of a stack, which holds the record of its cell, and of a checkpoint.

One writer per object, which remembers what it wrote last. Every write replaces the status on a resource version, so a
second operator is noticed: its write makes ours conflict, and what it wrote is not what we remember.

    Gone         the object was deleted, or another one has its name
    Superseded   somebody else has written since: what we know is out of date
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Final

from gym_operator.api import names
from gym_operator.api.checkpoint import CheckpointStatus
from gym_operator.api.stack import CellStatus, StackStatus
from gym_operator.effects.kube import CHECKPOINTS, STACKS, Body, Conflict, Kube, KubeError, NotFound, Resource
from gym_operator.rules.cell_record import from_document, to_document
from gym_servers.coordination.record import CellRecord

TRIES: Final = 5
"""Writes of others (annotations, the spec) cause conflicts that mean nothing; more in a row are not credible."""


class Gone(Exception):
    """The object was deleted, or another one has its name."""


class Superseded(Exception):
    """Another operator has written since."""


class StackWriter:
    """The status of one stack. `status` and `record` are what was written or read last.

    `follow` gives the status that goes with a new record, so that no status ever shows a cell as running whose record
    says that it is being replaced.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        uid: str,
        follow: Callable[[StackStatus, CellRecord], StackStatus] = lambda status, record: status,
    ) -> None:
        self._kube, self._namespace, self._name, self._uid = kube, namespace, name, uid
        self._follow = follow
        self._version = ""
        self._writing = asyncio.Lock()
        self.status = StackStatus()
        self.record: CellRecord | None = None
        self._unanswered: CellRecord | None = None

    async def load(self) -> Body:
        """Read the stack afresh, and believe it. Raises Gone, KubeError, ValueError."""
        async with self._writing:
            body = await _current(self._kube, STACKS, self._namespace, self._name, self._uid)
            self._version = body["metadata"]["resourceVersion"]
            self.status = StackStatus.model_validate(body.get("status") or {})
            self.record = _record_of(body)
            return body

    async def save_record(self, record: CellRecord) -> None:
        """Make the cell's record durable. Raises Gone, Superseded, KubeError."""
        async with self._writing:
            await self._replace(_with_record(self._follow(self.status, record), record), record)

    async def settled_record(self) -> CellRecord | None:
        """The record, once no write of it is under way."""
        async with self._writing:
            return self.record

    async def write(self, status: StackStatus) -> bool:
        """Write the status with the record as it was saved last; False where nothing changed.

        Raises Gone, Superseded, KubeError.
        """
        async with self._writing:
            if self.record is not None:
                status = _with_record(status, self.record)
            if status == self.status:
                return False
            await self._replace(status, self.record)
            return True

    async def _replace(self, status: StackStatus, record: CellRecord | None) -> None:
        for _ in range(TRIES):
            body = _body(names.STACK_KIND, self._namespace, self._name, self._uid, self._version, status.document())
            try:
                written = await self._kube.replace_status(STACKS, self._namespace, body)
            except NotFound as error:
                raise Gone(str(error)) from error
            except Conflict:
                current = await _current(self._kube, STACKS, self._namespace, self._name, self._uid)
                theirs = _record_of(current)
                if theirs not in (self.record, self._unanswered):
                    raise Superseded("another operator has written the record of this cell") from None
                self.record = theirs
                self._version = current["metadata"]["resourceVersion"]
                continue
            except KubeError:
                self._unanswered = record  # it may have been written all the same
                raise
            self._version = written["metadata"]["resourceVersion"]
            self.status, self.record = status, record
            return
        raise KubeError(409, f"the status of stack {self._name} could not be written: it changes all the time")


class CheckpointWriter:
    """The status of one GymCheckpoint. `status` is what was written or read last."""

    def __init__(self, kube: Kube, body: Mapping[str, Any], status: CheckpointStatus) -> None:
        metadata = body["metadata"]
        self._kube, self._version = kube, str(metadata["resourceVersion"])
        self.namespace, self.name, self.uid = metadata["namespace"], metadata["name"], metadata["uid"]
        self.generation = int(metadata.get("generation") or 0)
        self.status = status
        self._unanswered: CheckpointStatus | None = None
        self._writing = asyncio.Lock()

    async def write(self, status: CheckpointStatus) -> None:
        """Write a status that differs. Raises Gone, Superseded, KubeError.

        Whoever waits may be broken off by a death; the write goes on, so that what is there is never unknown.
        """
        writing = asyncio.ensure_future(self._write(status))
        writing.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to see it
        await asyncio.shield(writing)

    async def _write(self, status: CheckpointStatus) -> None:
        async with self._writing:
            if status == self.status:
                return
            for _ in range(TRIES):
                document = status.document()
                body = _body(names.CHECKPOINT_KIND, self.namespace, self.name, self.uid, self._version, document)
                try:
                    written = await self._kube.replace_status(CHECKPOINTS, self.namespace, body)
                except NotFound as error:
                    raise Gone(str(error)) from error
                except Conflict:
                    current = await _current(self._kube, CHECKPOINTS, self.namespace, self.name, self.uid)
                    theirs = CheckpointStatus.model_validate(current.get("status") or {})
                    if theirs not in (self.status, self._unanswered, status):
                        raise Superseded("another operator has written the status of this checkpoint") from None
                    self.status, self._version = theirs, current["metadata"]["resourceVersion"]
                    if theirs == status:  # our own write, whose answer was lost
                        return
                    continue
                except KubeError:
                    self._unanswered = status  # it may have been written all the same
                    raise
                self.status, self._version = status, written["metadata"]["resourceVersion"]
                return
            raise KubeError(
                409, f"the status of checkpoint {self.name} could not be written: it changes all the time"
            )


def _with_record(status: StackStatus, record: CellRecord) -> StackStatus:
    cells = status.cells or (CellStatus(index=0),)
    cell = cells[0].model_copy(update={"record": to_document(record), "attempt": record.attempt})
    return status.model_copy(update={"cells": (cell,), "attempt": record.attempt})


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


def _record_of(body: Mapping[str, Any]) -> CellRecord | None:
    cells = (body.get("status") or {}).get("cells") or ()
    return from_document(cells[0].get("record")) if cells else None
