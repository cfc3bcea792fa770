"""All stacks: a worker for each, started and ended as stacks come and go, and what belongs to no stack.

Watches tell; a slow list of everything mends what they missed, and proves that they are alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from gym_operator.api import names
from gym_operator.effects.cache import Key, key_of, stack_of, version_of
from gym_operator.effects.checkpoints import writer_for
from gym_operator.effects.disposal import Disposal
from gym_operator.effects.events import Subject
from gym_operator.effects.kube import (
    CHECKPOINTS,
    PODS,
    RESTORES,
    SCHEDULES,
    STACKS,
    KubeError,
    Listing,
    NotFound,
    Resource,
)
from gym_operator.effects.retention import Retention
from gym_operator.effects.schedules import Schedules
from gym_operator.effects.services import Services
from gym_operator.effects.status_writers import Gone, RestoreWriter, Superseded
from gym_operator.effects.worker import StackWorker
from gym_operator.rules import checkpoint_phases, checkpoint_queue
from gym_operator.rules import restores as restore_rules
from gym_operator.rules.restores import is_finished
from gym_operator.rules.watch_health import Watches

log = logging.getLogger(__name__)

ORPHANS_SECONDS: Final = 2.0
SCHEDULES_SECONDS: Final = 1.0
RETENTION_SECONDS: Final = 5.0
DISPOSAL_SECONDS: Final = 0.5
RESYNC_SECONDS: Final = 30.0
STUCK_SECONDS: Final = 600.0
"""A pass may wait for a storage that does not answer, but not so long."""
WATCHED: Final[Mapping[Resource, str]] = {
    STACKS: "",
    CHECKPOINTS: "",
    SCHEDULES: "",
    RESTORES: "",
    PODS: names.STACK_LABEL,
}


class Fleet:
    """The workers by stack. `namespaces` empty means all of them."""

    def __init__(self, services: Services, namespaces: Sequence[str] = ()) -> None:
        self._s, self._cache = services, services.cache
        self._namespaces: Sequence[str | None] = list(namespaces) or [None]
        self._workers: dict[Key, tuple[StackWorker, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self._watches = Watches()
        self._listed = asyncio.Event()
        self._disposal = Disposal(
            services.kube, services.cache, services.events, services.wall, services.monotonic, services.cluster
        )
        self._retention = Retention(services.kube, services.cache, services.events, services.wall)
        self._schedules = Schedules(services.kube, services.cache, services.events, services.wall)

    # ---- what the watches tell ----------------------------------------------------------------------------

    def stack_event(self, deleted: bool, body: Mapping[str, Any]) -> None:
        key, uid = key_of(body), body["metadata"]["uid"]
        self._seen(STACKS, body)
        if deleted:
            self._cache.drop_stack(key, uid)
        else:
            self._cache.put_stack(body)
        self._see_to(key)

    def checkpoint_event(self, deleted: bool, body: Mapping[str, Any]) -> None:
        self._seen(CHECKPOINTS, body)
        if deleted:
            self._cache.drop_checkpoint(key_of(body), body["metadata"]["uid"])
        else:
            self._cache.put_checkpoint(body)
        self._wake(stack_of(body))

    def schedule_event(self, deleted: bool, body: Mapping[str, Any]) -> None:
        self._seen(SCHEDULES, body)
        if deleted:
            self._cache.schedules.drop(key_of(body), body["metadata"]["uid"])
        else:
            self._cache.schedules.put(body)

    def restore_event(self, deleted: bool, body: Mapping[str, Any]) -> None:
        self._seen(RESTORES, body)
        if deleted:
            self._cache.restores.drop(key_of(body), body["metadata"]["uid"])
        else:
            self._cache.restores.put(body)
        self._wake(stack_of(body))

    def pod_event(self, deleted: bool, body: Mapping[str, Any]) -> None:
        self._seen(PODS, body)
        pod = self._cache.put_pod(body)
        if deleted:
            self._cache.drop_pod(pod.stack_uid, pod.uid)
        if (found := self._workers.get(Key(pod.namespace, pod.stack))) is None:
            return
        found[0].pod_changed(pod.cell, ended=deleted or (pod.incarnation is not None and not pod.alive))

    def _seen(self, resource: Resource, body: Mapping[str, Any]) -> None:
        self._watches.told((resource.plural, self._scope(body["metadata"]["namespace"])), version_of(body))

    def _scope(self, namespace: str) -> str | None:
        return None if self._namespaces == [None] else namespace

    def _wake(self, key: Key) -> None:
        if (found := self._workers.get(key)) is not None:
            found[0].wake()

    # ---- workers ------------------------------------------------------------------------------------------

    def _see_to(self, key: Key) -> None:
        """A worker for the stack that is there now, and for no other."""
        body = self._cache.stacks.get(key)
        wanted = None if body is None or body["metadata"].get("deletionTimestamp") else body["metadata"]["uid"]
        found = self._workers.get(key)
        if found is not None and found[0].uid != wanted:
            del self._workers[key]
            self._end(*found, "StackDeleted", "the stack was deleted")
            found = None
        if wanted is None or self._closed:
            return
        if found is not None:
            found[0].wake()
            return
        worker = StackWorker(self._s, key, wanted)
        task = asyncio.create_task(worker.run(), name=f"stack {key.namespace}/{key.name}")
        task.add_done_callback(lambda _: self._ended(worker))
        self._workers[key] = (worker, task)

    def _ended(self, worker: StackWorker) -> None:
        """It found its stack gone before the watch told so."""
        found = self._workers.get(worker.key)
        if found is not None and found[0] is worker:
            del self._workers[worker.key]
            self._cache.drop_stack(worker.key, worker.uid)
            self._end(*found, "StackDeleted", "the stack was deleted")

    def _end(self, worker: StackWorker, task: asyncio.Task[None], reason: str, message: str) -> None:
        async def end() -> None:
            task.cancel()
            await asyncio.wait([task])
            await worker.close(reason, message)

        ending = asyncio.create_task(end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """End all workers. A checkpoint under way is given up: no rollout stays parked until its lease ends."""
        self._closed = True  # what is written on the way out comes back as events, and must not start them again
        for key in list(self._workers):
            self._end(*self._workers.pop(key), "OperatorStopped", "the operator was stopped")
        if self._ending:
            await asyncio.wait(self._ending)
        await self._disposal.close()

    # ---- beside the workers -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Everything that is not one stack's, for ever."""
        await asyncio.gather(
            self._s.events.run(),
            self._again(ORPHANS_SECONDS, self._see_to_orphans),
            self._again(SCHEDULES_SECONDS, self._schedules.step),
            self._again(RETENTION_SECONDS, self._retention.step, self._listed),
            self._again(DISPOSAL_SECONDS, self._disposal.step),
            self._again(RESYNC_SECONDS, self._resync),
        )

    async def _again(self, seconds: float, step: Callable[[], Any], begin: asyncio.Event | None = None) -> None:
        if begin is not None:
            await begin.wait()
        while True:
            await asyncio.sleep(seconds)
            try:
                await step()
            except KubeError as error:
                log.warning("%s: %s", step.__name__, error)
            except Exception:
                log.exception("%s failed", step.__name__)

    async def _see_to_orphans(self) -> None:
        """Checkpoints and restores of stacks that are not there. The API server is asked, since watches may lag
        behind."""
        for body in list(self._cache.checkpoints.values()):
            if await self._is_orphan(stack_of(body)):
                await self._see_to_orphan(body, stack_of(body))
        for body in self._cache.restores.values():
            if not is_finished(body) and await self._is_orphan(stack_of(body)):
                await self._see_to_lost_restore(body, stack_of(body))

    async def _is_orphan(self, stack: Key) -> bool:
        if stack in self._cache.stacks:
            return False
        try:
            self.stack_event(False, await self._s.kube.get(STACKS, stack.namespace, stack.name))
        except NotFound:
            return True
        return False

    async def _see_to_lost_restore(self, body: Mapping[str, Any], stack: Key) -> None:
        writer, now = RestoreWriter(self._s.kube, body), self._s.wall()
        age = checkpoint_phases.age_seconds(body["metadata"]["creationTimestamp"], now)
        status = restore_rules.without_stack(writer.status, stack.name, age, writer.generation, now)
        try:
            await writer.put(status)
        except Gone:
            self._cache.restores.drop(key_of(body), writer.uid)
        except Superseded:
            pass  # an old view: the next event brings a younger one

    async def _see_to_orphan(self, body: Mapping[str, Any], stack: Key) -> None:
        writer, now = writer_for(self._s.kube, body), self._s.wall()
        at = checkpoint_phases.At(writer.generation, now)
        age = checkpoint_phases.age_seconds(body["metadata"]["creationTimestamp"], now)
        if body["metadata"].get("deletionTimestamp"):
            age = float("inf")  # nobody waits for its stack any more
        try:
            match checkpoint_queue.without_stack(writer.status, stack.name, age):
                case checkpoint_queue.Fail(reason, message):
                    await writer.write(partial(checkpoint_phases.failed, reason=reason, message=message, at=at))
                    subject = Subject(names.CHECKPOINT_KIND, writer.namespace, writer.name, writer.uid)
                    self._s.events.say(subject, "Warning", reason, message)
                    self._cache.finish_checkpoint(key_of(body), writer.uid)
                case checkpoint_queue.Hold(reason, message) if reason is not None:
                    whole = checkpoint_phases.Which(0)
                    held = partial(checkpoint_phases.waiting, which=whole, reason=reason, message=message, at=at)
                    await writer.write(held)
        except Gone:
            self._cache.drop_checkpoint(key_of(body), writer.uid)
        except Superseded:
            pass  # an old view: the next event brings a younger one

    async def _resync(self) -> None:
        """List everything: what a watch has missed is mended here."""
        for resource, selector in WATCHED.items():
            for namespace in self._namespaces:
                listing = await self._s.kube.list_all(resource, namespace, selector)
                latest = max((version_of(body) for body in listing.items), default=0)
                self._watches.listed((resource.plural, namespace), latest, self._s.monotonic())
                self._mend(resource, namespace, listing)
        self._listed.set()  # what is in the cache now is all there is: a checkpoint that is missing may go

    def _mend(self, resource: Resource, namespace: str | None, listing: Listing) -> None:
        present = {body["metadata"]["uid"] for body in listing.items}

        def vanished(version: int, uid: str, place: str) -> bool:
            return uid not in present and version <= listing.version and namespace in (None, place)

        match resource:
            case r if r == PODS:
                for body in listing.items:
                    self._cache.put_pod(body)
                for pod in self._cache.all_pods():
                    if vanished(pod.version, pod.uid, pod.namespace):
                        self._cache.drop_pod(pod.stack_uid, pod.uid)
                        self._wake(Key(pod.namespace, pod.stack))
            case r if r == STACKS:
                for body in listing.items:
                    self._cache.put_stack(body)
                for key, known in list(self._cache.stacks.items()):
                    if vanished(version_of(known), known["metadata"]["uid"], key.namespace):
                        self._cache.drop_stack(key, known["metadata"]["uid"])
                for key in {*self._cache.stacks, *self._workers}:
                    self._see_to(key)
            case r if r in (SCHEDULES, RESTORES):
                objects = self._cache.schedules if r == SCHEDULES else self._cache.restores
                for body in listing.items:
                    objects.put(body)
                for known in objects.values():
                    if vanished(version_of(known), known["metadata"]["uid"], known["metadata"]["namespace"]):
                        objects.drop(key_of(known), known["metadata"]["uid"])
            case _:
                for body in listing.items:
                    self._cache.put_checkpoint(body)
                for entry in self._cache.entries():
                    if vanished(entry.version, entry.uid, entry.namespace):
                        self._cache.drop_checkpoint(Key(entry.namespace, entry.name), entry.uid)

    # ---- health -------------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """`ok`, and what is wrong. It does not ask whether the API server or a storage answers: a restart of the
        operator would not help against that."""
        now = self._s.monotonic()
        stuck = [
            f"{worker.key.namespace}/{worker.key.name}"
            for worker, _ in self._workers.values()
            if worker.stuck(STUCK_SECONDS)
        ]
        silent = self._watches.silent(now)
        return {"ok": not stuck and not silent, "stacks": len(self._workers), "stuck": stuck, "silentWatches": silent}
