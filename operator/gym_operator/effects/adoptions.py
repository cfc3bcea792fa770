"""Makes GymCheckpoints of checkpoints that are in storage already, named by their place and digest.

Nothing is taken and no cell is disturbed: what is there is read and every digest checked, beside the stack's passes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from gym_operator.api import names
from gym_operator.api.checkpoint import TERMINAL, CheckpointSource, CheckpointStatus, GymCheckpoint
from gym_operator.api.conditions import AnyReason, ConditionReason
from gym_operator.api.event_reasons import Afterwards
from gym_operator.effects.cache import Key, key_of
from gym_operator.effects.events import Subject
from gym_operator.effects.services import Services
from gym_operator.effects.status_writers import CheckpointWriter, Gone, Superseded
from gym_operator.rules import checkpoint_phases as phases
from gym_operator.rules.checkpoint_queue import PATIENCE_SECONDS, Obstacle
from gym_servers.protocol.errors import ProtocolError
from gym_servers.stack.spec import SpecError
from gym_servers.storage.cells import publication_of, verify
from gym_servers.storage.manifest import Publication
from gym_servers.storage.ownership import Owner, check_deletable, root_of
from gym_servers.storage.removal import hold
from gym_servers.storage.store import ObjectConflict, ObjectStore, StorageError, StorageProblem

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 5.0
HELD_BY_ANOTHER: Final = (
    "another GymCheckpoint has its data: it stays when this object is deleted. Set deletionPolicy: Retain; where "
    "nobody has it any more, remove holder.json beside its checkpoint.json and adopt it again"
)


_WHOLE: Final = phases.Which(0)
"""Nothing is known of its parts before it is read."""


def is_adoption(body: Mapping[str, Any]) -> bool:
    """Whether a GymCheckpoint names what is there already."""
    return bool((body.get("spec") or {}).get("source"))


def claim_for(
    open_store: Callable[[str], ObjectStore], uri: str, stack_uid: str, uid: str, cluster: str | None
) -> str:
    """Claim the data at `uri`, of a checkpoint of this stack, for the GymCheckpoint of this UID, with which it is to
    go; else why it stays: nothing is written where nothing could be removed. `cluster` is this cluster's id, None
    where it is not known. Blocks. Raises StorageError."""
    us = Owner(cluster=cluster or stack_uid, stack_uid=stack_uid, namespace="", name="")
    try:
        if (root := root_of(uri, stack_uid)) is not None:
            check_deletable(open_store(root), us)
        hold(open_store(uri), uid)
    except ObjectConflict:
        return HELD_BY_ANOTHER
    except StorageError as error:
        if error.problem is not StorageProblem.OWNED_BY_ANOTHER:
            raise
        return f"its data stays when this object is deleted, so set deletionPolicy: Retain: {error}"
    return ""


class Adoptions:
    """The adoptions of one stack, through whose storage they are read. One at a time: each may read a lot."""

    def __init__(
        self,
        services: Services,
        stack: Key,
        open_store: Callable[[str], ObjectStore],
        wake: Callable[[], None],
    ) -> None:
        self._kube, self._cache, self._events = services.kube, services.cache, services.events
        self._stack, self._open_store, self._wake = stack, open_store, wake
        self._wall, self._monotonic, self._cluster = services.wall, services.monotonic, services.cluster
        self._task: asyncio.Task[None] | None = None
        self._writers: dict[str, CheckpointWriter] = {}
        self._troubled: dict[str, float] = {}
        self._due = float("-inf")

    async def step(self, obstacle: Obstacle | None, origin: phases.Origin | None) -> None:
        """See to the next one. `origin` says how the storage is reached. Raises KubeError."""
        if self._task is not None:
            if not self._task.done():
                return
            task, self._task = self._task, None
            task.result()
        if self._monotonic() < self._due:
            return
        wanted = [body for body in self._cache.checkpoints_of(self._stack) if is_adoption(body)]
        present = {body["metadata"]["uid"] for body in wanted}
        self._writers = {uid: writer for uid, writer in self._writers.items() if uid in present}
        self._troubled = {uid: since for uid, since in self._troubled.items() if uid in present}
        # Whoever has been waiting longest without trouble goes first: one that cannot be read keeps no other waiting.
        wanted.sort(key=lambda body: (self._troubled.get(body["metadata"]["uid"], 0.0), key_of(body)))
        for body in wanted:
            # It knows what was written last, which the cache may not yet.
            writer = self._writers.setdefault(body["metadata"]["uid"], CheckpointWriter(self._kube, body))
            try:
                if writer.status.phase not in TERMINAL and await self._see_to(writer, body, obstacle, origin):
                    return
            except Gone:
                self._cache.drop_checkpoint(key_of(body), writer.uid)
            except Superseded:
                del self._writers[writer.uid]  # another operator is at it: look anew

    def close(self) -> None:
        """Leave what is under way to the next operator."""
        if self._task is not None:
            self._task.cancel()

    async def _see_to(
        self,
        writer: CheckpointWriter,
        body: Mapping[str, Any],
        obstacle: Obstacle | None,
        origin: phases.Origin | None,
    ) -> bool:
        """Whether it is under way now."""
        if body["metadata"].get("deletionTimestamp"):
            await self._fail(writer, ConditionReason.DELETED, "the GymCheckpoint was deleted before it began")
            return False
        try:
            checkpoint = GymCheckpoint.parse(body)
        except SpecError as error:
            await self._fail(writer, ConditionReason.INVALID_SPEC, str(error))
            return False
        assert checkpoint.spec.source is not None
        if obstacle is not None:
            await self._trouble(writer, *obstacle)
            return False
        if origin is None:
            return False  # its stack's storage is not known yet
        told = ConditionReason.IN_PROGRESS, "what is there is read, and every digest checked"
        await writer.put(phases.waiting(writer.status, _WHOLE, *told, self._at(writer)))
        wants_it = checkpoint.spec.deletion_policy == "Delete"
        self._task = asyncio.create_task(self._adopt(writer, checkpoint.spec.source, wants_it, origin))
        self._task.add_done_callback(lambda _: self._wake())
        return True

    async def _adopt(
        self, writer: CheckpointWriter, source: CheckpointSource, wants_it: bool, origin: phases.Origin
    ) -> None:
        uri = source.uri.rstrip("/")

        def look() -> tuple[Publication, str]:
            store = self._open_store(uri)
            publication = publication_of(store, source.digest)
            verify(store, publication.members, publication.checkpoint_id)
            if not wants_it:
                return publication, ""
            return publication, claim_for(self._open_store, uri, publication.stack_uid, writer.uid, self._cluster)

        try:
            try:
                publication, stays = await asyncio.to_thread(look)
            except ProtocolError as error:
                await self._fail(writer, ConditionReason.SOURCE_INVALID, f"{uri}: {error.detail}")
                return
            except StorageError as error:
                await self._trouble(writer, error.problem, str(error))
                return
            status = writer.status.model_copy(
                update={
                    "checkpoint_id": publication.checkpoint_id,
                    "stack_uid": publication.stack_uid,
                    "storage": dict(origin.storage),
                }
            )
            only = phases.Which(publication.cell, (publication.cell,))
            at = self._at(writer)
            await self._end(writer, phases.part_succeeded(status, only, publication, uri, source.digest, None, at))
            if stays:
                self._say(writer, "Warning", Afterwards.HELD_BY_ANOTHER, stays)
        except Gone:
            self._cache.drop_checkpoint(Key(writer.namespace, writer.name), writer.uid)
        except Superseded:
            self._writers.pop(writer.uid, None)

    async def _trouble(self, writer: CheckpointWriter, reason: AnyReason, message: str) -> None:
        """Wait for what only a person can mend, and not for ever."""
        now = self._monotonic()
        since = self._troubled.setdefault(writer.uid, now)
        self._due = now + RETRY_SECONDS
        if now - since > PATIENCE_SECONDS:
            await self._fail(writer, reason, message)
        else:
            await writer.put(phases.waiting(writer.status, _WHOLE, reason, message, self._at(writer)))

    async def _fail(self, writer: CheckpointWriter, reason: AnyReason, message: str) -> None:
        await self._end(writer, phases.failed(writer.status, reason, message, self._at(writer)))

    def _at(self, writer: CheckpointWriter) -> phases.At:
        return phases.At(writer.generation, self._wall())

    async def _end(self, writer: CheckpointWriter, status: CheckpointStatus) -> None:
        await writer.put(status)
        level: Any = "Normal" if status.phase == "Succeeded" else "Warning"
        self._say(writer, level, status.reason or "Unknown", status.message or "")
        self._cache.finish_checkpoint(Key(writer.namespace, writer.name), writer.uid)

    def _say(self, writer: CheckpointWriter, level: Any, reason: str, message: str) -> None:
        subject = Subject(names.CHECKPOINT_KIND, writer.namespace, writer.name, writer.uid)
        self._events.say(subject, level, reason, message)
