"""Sees to it that the data of a GymCheckpoint with `deletionPolicy: Delete` goes with it, and that nothing else does.

A finalizer holds the object meanwhile, but not for ever: a storage that fails for too long keeps the data, and an
Event says where.
"""

from __future__ import annotations

import asyncio
import logging
import posixpath
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from gym_operator.api import names
from gym_operator.api.checkpoint import CheckpointStatus
from gym_operator.api.conditions import ConditionReason
from gym_operator.api.event_reasons import Afterwards
from gym_operator.api.objects import format_time
from gym_operator.effects.accesses import Accesses
from gym_operator.effects.adoptions import claim_for
from gym_operator.effects.cache import Cache, Key
from gym_operator.effects.events import Events, Level, Subject
from gym_operator.effects.finalizers import set_finalizer
from gym_operator.effects.kube import CHECKPOINTS, STACKS, Kube, KubeError, NotFound
from gym_operator.effects.status_writers import CheckpointWriter, Gone, Superseded
from gym_operator.effects.storage import StackStorage
from gym_operator.rules import checkpoint_phases as phases
from gym_operator.rules import disposal as rules
from gym_operator.rules.checkpoint_entries import Entry
from gym_operator.rules.disposal import Duty
from gym_operator.rules.restores import held_by
from gym_operator.rules.retention import needs_of
from gym_servers.stack.settings import describe
from gym_servers.stack.spec import StorageSpec
from gym_servers.storage import leftovers
from gym_servers.storage.ownership import Owner, check_deletable, root_of
from gym_servers.storage.removal import Claim, NotOurs, Removed, remove
from gym_servers.storage.store import ObjectStore, StorageError, StorageProblem

log = logging.getLogger(__name__)

AT_ONCE: Final = 4
"""So many removals go on at the same time: they share the threads with the stacks' checkpoints."""
RETRY_SECONDS: Final = 5.0


class Disposal:
    """`step` begins what is due; removals go on beside it. `cluster` is this cluster's id, None where it is not
    known."""

    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        events: Events,
        wall: Callable[[], float],
        monotonic: Callable[[], float],
        cluster: str | None,
        accesses: Accesses,
    ) -> None:
        self._kube, self._cache, self._events = kube, cache, events
        self._wall, self._monotonic, self._cluster, self._accesses = wall, monotonic, cluster, accesses
        self._seen = (-1, -1)
        self._duties: list[tuple[Entry, Duty]] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._due: dict[tuple[str, Duty], float] = {}
        self._failing_since: dict[str, float] = {}
        self._failed: list[Entry] = []
        self._cleared: set[str] = set()
        self._at_once = asyncio.Semaphore(AT_ONCE)

    async def step(self) -> None:
        self._tasks = {uid: task for uid, task in self._tasks.items() if not task.done()}
        seen = self._cache.entry_changes, len(self._cache.stacks)
        if seen != self._seen:  # else there may be thousands, and nothing new about any
            self._seen = seen
            self._look()
        now = self._monotonic()
        clearing = [(entry, Duty.CLEAR) for entry in self._failed if self._is_to_be_cleared(entry)]
        for entry, duty in (*self._duties, *clearing):
            if entry.uid not in self._tasks and now >= self._due.get((entry.uid, duty), now):
                self._due[entry.uid, duty] = now + RETRY_SECONDS
                self._tasks[entry.uid] = asyncio.create_task(self._do(duty, entry))

    def _look(self) -> None:
        entries = self._cache.entries()
        present = {entry.uid for entry in entries}
        self._due = {known: due for known, due in self._due.items() if known[0] in present}
        self._failing_since = {uid: since for uid, since in self._failing_since.items() if uid in present}
        self._accesses.keep({key.namespace for key in self._cache.stacks} | {entry.namespace for entry in entries})
        self._duties = [(entry, duty) for entry in entries if (duty := rules.duty_of(entry)) is not None]
        self._cleared &= present
        self._failed = [entry for entry in entries if entry.phase == "Failed" and entry.uid not in self._cleared]

    async def close(self) -> None:
        """Leave what is under way to the next operator."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())

    async def _do(self, duty: Duty, entry: Entry) -> None:
        try:
            async with self._at_once:
                match duty:
                    case Duty.TIE:
                        await self._tie(entry)
                    case Duty.LOOSE:
                        await self._set_finalizer(entry, present=False)
                    case Duty.OBSERVE:
                        writer = await self._writer(entry)
                        await writer.put(phases.observed(writer.status, writer.generation))
                    case Duty.DISPOSE:
                        await self._dispose(entry)
                    case Duty.CLEAR:
                        await self._clear(entry)
        except (Gone, NotFound):
            self._cache.drop_checkpoint(Key(entry.namespace, entry.name), entry.uid)
        except (KubeError, Superseded, NotOurs, StorageError) as error:
            log.warning("checkpoint %s/%s: %s", entry.namespace, entry.name, error)
        except Exception:
            log.exception("checkpoint %s/%s: what becomes of its data failed", entry.namespace, entry.name)

    async def _tie(self, entry: Entry) -> None:
        """One that was adopted to be kept, and is to go with its data now, has not claimed it yet."""
        if entry.adopted and entry.final:
            writer = await self._writer(entry)
            storage = self._storage_of(entry)
            await self._read(storage, writer.status)
            for part in entry.parts:
                of = part.uri, entry.stack_uid or "", entry.uid, self._cluster
                if stays := await asyncio.to_thread(claim_for, storage.open, *of):
                    self._say(entry, "Warning", Afterwards.HELD_BY_ANOTHER, stays)
        await self._set_finalizer(entry, present=True)

    async def _dispose(self, entry: Entry) -> None:
        writer = await self._writer(entry)
        claims = rules.claims_of(writer.status, entry.uid)
        if claims and (holds := await self._held(entry, writer.status)):
            told = phases.deleting(writer.status, ConditionReason.HELD, holds, writer.generation)
            await writer.put(told)
            return
        if claims:
            announced = ConditionReason.REMOVING, "its data is being removed"
            await writer.put(phases.deleting(writer.status, *announced, writer.generation))
        storage = self._storage_of(entry)
        try:
            removed = [await self._remove(storage, writer.status, uri, claim) for uri, claim in claims]
        except NotOurs as error:
            self._say(entry, "Warning", Afterwards.DATA_LEFT, f"its data is left where it is: {error}")
        except StorageError as error:
            since = self._failing_since.setdefault(entry.uid, self._monotonic())
            problem = StorageProblem.CREDENTIALS_MISSING if storage.remembered else error.problem
            if not rules.gives_up(self._monotonic() - since, problem):
                await writer.put(phases.deleting(writer.status, error.problem, str(error), writer.generation))
                return
            left = ", ".join(uri for uri, _ in claims)
            self._say(
                entry, "Warning", Afterwards.DATA_LEFT, f"its data is left at {left}, to be removed by hand: {error}"
            )
        else:
            if claims:
                self._say(entry, "Normal", Afterwards.DATA_REMOVED, _what(removed, [uri for uri, _ in claims]))
        await self._set_finalizer(entry, present=False)

    def _is_to_be_cleared(self, entry: Entry) -> bool:
        """Of a stack that is there its own worker sees to it."""
        if entry.uid in self._cleared or not rules.is_dead(entry, self._wall()):
            return False
        stack = self._cache.stacks.get(Key(entry.namespace, entry.stack))
        return stack is None or stack["metadata"]["uid"] != entry.stack_uid

    async def _clear(self, entry: Entry) -> None:
        self._cleared.add(entry.uid)  # what cannot be removed now is tried by the next operator
        writer = await self._writer(entry)
        storage = self._storage_of(entry)
        for uri, claim in rules.claims_of(writer.status, entry.uid):
            if claim.digest is None:
                await self._remove(storage, writer.status, uri, claim)

    async def _remove(self, storage: StackStorage, status: CheckpointStatus, uri: str, claim: Claim) -> Removed:
        await self._read(storage, status)
        above, _, directory = uri.rstrip("/").rpartition("/")
        root = root_of(uri, claim.stack_uid)

        def take_away() -> Removed:
            checkpoints = storage.open(above)
            cell = storage.open(posixpath.dirname(above)) if root is not None else None
            staged = cell is not None and claim.checkpoint_id in leftovers.staged(cell)
            if root is not None and (staged or checkpoints.list(directory)):
                self._check_cluster(storage.open(root), claim)
            removed = remove(checkpoints, directory, claim)
            if cell is not None and staged:
                leftovers.remove_staged(cell, claim.checkpoint_id)
            return removed

        # A thread cannot be called back: an operator that ends leaves it, and the next one finds what it has done.
        return await asyncio.to_thread(take_away)

    def _check_cluster(self, root: ObjectStore, claim: Claim) -> None:
        """Another cluster may have the same objects, as one made from a copy of this one's state: what is marked as
        its own is not ours to remove. Blocks. Raises NotOurs, StorageError."""
        us = Owner(cluster=self._cluster or claim.stack_uid, stack_uid=claim.stack_uid, namespace="", name="")
        try:
            check_deletable(root, us)
        except StorageError as error:
            if error.problem is StorageProblem.OWNED_BY_ANOTHER:
                raise NotOurs(str(error)) from error
            raise

    @staticmethod
    async def _read(storage: StackStorage, status: CheckpointStatus) -> None:
        """Learn how a checkpoint's storage is reached. Raises NotOurs, KubeError."""
        try:
            spec = StorageSpec.model_validate(status.storage or {}, by_alias=True, by_name=False)
        except ValueError as error:
            raise NotOurs(f"how its storage is reached is not known: {describe(error)}") from error
        await storage.read(spec)

    async def _held(self, entry: Entry, status: CheckpointStatus) -> str:
        """Why its data cannot go yet; empty where it can. What its stack would continue from next is nobody's matter
        here: somebody wants it gone."""
        if any(
            cell.uri is not None and cell.digest is None for cell in status.cells
        ) and self._wall() < rules.written_until(entry):
            return f"its servers may write until {format_time(rules.written_until(entry))}; then its data is removed"
        uris = {cell.uri for cell in status.cells if cell.uri}
        being_restored = "a cell is being restored from it; then its data is removed"
        if not uris.isdisjoint(held_by(self._cache.restores.values())[0]):
            return being_restored
        with suppress(NotFound):
            needs = needs_of(await self._kube.get(STACKS, entry.namespace, entry.stack))
            if not uris.isdisjoint(needs.restoring):
                return being_restored
        return ""

    async def _set_finalizer(self, entry: Entry, *, present: bool) -> None:
        await set_finalizer(self._kube, entry.namespace, entry.name, entry.uid, present=present)

    def _storage_of(self, entry: Entry) -> StackStorage:
        return StackStorage(self._kube, entry.namespace, accesses=self._accesses)

    async def _writer(self, entry: Entry) -> CheckpointWriter:
        """The status as it is. Raises Gone, KubeError."""
        body = await self._kube.get(CHECKPOINTS, entry.namespace, entry.name)
        if body["metadata"]["uid"] != entry.uid:
            raise Gone(f"{entry.name} was deleted and made again")
        return CheckpointWriter(self._kube, body)

    def _say(self, entry: Entry, level: Level, reason: str, message: str) -> None:
        subject = Subject(names.CHECKPOINT_KIND, entry.namespace, entry.name, entry.uid)
        self._events.say(subject, level, reason, message)


def _what(removed: list[Removed], uris: list[str]) -> str:
    objects = sum(each.objects for each in removed)
    shared = sum(len(each.shared) for each in removed)
    more = f"; {shared} stay, which other checkpoints need" if shared else ""
    return f"{objects} objects at {', '.join(uris)} were removed{more}"
