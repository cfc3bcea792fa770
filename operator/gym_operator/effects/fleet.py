"""All stacks: a worker for each, started and ended as stacks come and go, and what belongs to no stack.

Watches tell; a slow list of everything mends what they missed, and proves that they are alive.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from gym_operator.api import names
from gym_operator.effects.cache import Key, key_of, lean, stack_of, version_of
from gym_operator.effects.checkpoints import writer_for
from gym_operator.effects.disposal import Disposal
from gym_operator.effects.events import Level, Subject
from gym_operator.effects.kube import (
    CHECKPOINTS,
    NODES,
    PODS,
    RESTORES,
    SCHEDULES,
    STACKS,
    KubeError,
    NotFound,
    Resource,
)
from gym_operator.effects.orphans import Orphans
from gym_operator.effects.resync import Resync
from gym_operator.effects.retention import Retention
from gym_operator.effects.schedules import Schedules
from gym_operator.effects.services import Services
from gym_operator.effects.status_writers import Gone, RestoreWriter, Superseded
from gym_operator.effects.waits import Waits
from gym_operator.effects.worker import DELETED, StackWorker
from gym_operator.rules import checkpoint_phases, checkpoint_queue
from gym_operator.rules import restores as restore_rules
from gym_operator.rules.generations import Series
from gym_operator.rules.restores import is_finished

log = logging.getLogger(__name__)

ORPHANS_SECONDS: Final = 2.0
SCHEDULES_SECONDS: Final = 1.0
RETENTION_SECONDS: Final = 5.0
DISPOSAL_SECONDS: Final = 0.5
RESYNC_SECONDS: Final = 30.0
STUCK_SECONDS: Final = 600.0
"""A pass may wait for a storage that does not answer, but not so long."""
FIRST_LOOKS: Final = 8
"""Stacks that are looked at for the first time at once: hundreds that are there when an operator starts would all
ask the API server together."""


class Fleet:
    """The workers by stack. `namespaces` empty means all of them. `reopen` opens the watches anew."""

    def __init__(
        self, services: Services, namespaces: Sequence[str] = (), reopen: Callable[[], None] = lambda: None
    ) -> None:
        self._s, self._cache = services, services.cache
        self._namespaces: Sequence[str | None] = list(namespaces) or [None]
        self._workers: dict[Key, tuple[StackWorker, asyncio.Task[None]]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False
        self._reopen = reopen
        self._first_looks = asyncio.Semaphore(FIRST_LOOKS)
        self._under_way: dict[str, float] = {}
        self._orphans = Waits(services.monotonic)
        self._tellers: Mapping[Resource, Callable[[bool, Mapping[str, Any]], None]] = {
            STACKS: self._stack_is,
            CHECKPOINTS: self._checkpoint_is,
            SCHEDULES: self._schedule_is,
            RESTORES: self._restore_is,
            PODS: self._pod_is,
            NODES: self._node_is,
        }
        self._resync = Resync(
            services.kube,
            services.cache,
            self._namespaces,
            self._is,
            self._see_to,
            services.monotonic,
            nodes=services.watches_nodes,
        )
        self._disposal = Disposal(
            services.kube,
            services.cache,
            services.events,
            services.wall,
            services.monotonic,
            services.cluster,
            services.accesses,
        )
        self._left_alone = Orphans(services.kube, services.wall, services.monotonic, services.accesses)
        self._retention = Retention(services.kube, services.cache, services.events, services.wall)
        self._schedules = Schedules(services.kube, services.cache, services.events, services.wall)

    # ---- what the watches tell ----------------------------------------------------------------------------

    def event(self, resource: Resource, deleted: bool, body: Mapping[str, Any]) -> None:
        """A watch has told of an object as it is, or as it was before it was deleted."""
        watch = (resource.plural, self._scope(body["metadata"].get("namespace")))
        self._resync.watches.told(watch, version_of(body))
        self._is(resource, deleted, body)

    def _is(self, resource: Resource, deleted: bool, body: Mapping[str, Any]) -> None:
        """An object is so, whoever says so."""
        self._tellers[resource](deleted, lean(body))

    def _stack_is(self, deleted: bool, body: Mapping[str, Any]) -> None:
        if deleted:
            self._cache.drop_stack(key_of(body), body["metadata"]["uid"])
        elif not self._cache.put_stack(body):
            return
        self._see_to(key_of(body))

    def _checkpoint_is(self, deleted: bool, body: Mapping[str, Any]) -> None:
        if deleted:
            self._cache.drop_checkpoint(key_of(body), body["metadata"]["uid"])
        elif not self._cache.put_checkpoint(body):
            return
        self._wake(stack_of(body))

    def _schedule_is(self, deleted: bool, body: Mapping[str, Any]) -> None:
        if deleted:
            self._cache.schedules.drop(key_of(body), body["metadata"]["uid"])
        else:
            self._cache.schedules.put(body)

    def _restore_is(self, deleted: bool, body: Mapping[str, Any]) -> None:
        if deleted:
            self._cache.restores.drop(key_of(body), body["metadata"]["uid"])
        elif not self._cache.restores.put(body):
            return
        self._wake(stack_of(body))

    def _pod_is(self, deleted: bool, body: Mapping[str, Any]) -> None:
        pod = self._cache.put_pod(body)
        if deleted:
            self._cache.drop_pod(pod.stack_uid, pod.uid)
        if (found := self._workers.get(Key(pod.namespace, pod.stack))) is None:
            return
        found[0].pod_changed(pod.cell, ended=deleted or (pod.incarnation is not None and not pod.alive))

    def _node_is(self, deleted: bool, body: Mapping[str, Any]) -> None:
        if self._cache.put_node(body, deleted=deleted):
            for worker, _ in self._workers.values():
                worker.wake()

    def _scope(self, namespace: str | None) -> str | None:
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
            self._end(*found, DELETED, "the stack was deleted")
            found = None
        if wanted is None or self._closed:
            return
        if found is not None:
            found[0].wake()
            return
        worker = StackWorker(self._s, key, wanted, self._first_looks)
        task = asyncio.create_task(worker.run(), name=f"stack {key.namespace}/{key.name}")
        task.add_done_callback(lambda _: self._ended(worker))
        self._workers[key] = (worker, task)

    def _ended(self, worker: StackWorker) -> None:
        """It found its stack gone before the watch told so."""
        found = self._workers.get(worker.key)
        if found is not None and found[0] is worker:
            del self._workers[worker.key]
            self._cache.drop_stack(worker.key, worker.uid)
            self._end(*found, DELETED, "the stack was deleted")

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
            self._again("orphans", ORPHANS_SECONDS, self._see_to_orphans),
            self._again("schedules", SCHEDULES_SECONDS, self._schedules.step),
            self._again("retention", RETENTION_SECONDS, self._retain),
            self._again("disposal", DISPOSAL_SECONDS, self._disposal.step),
            self._again("resync", RESYNC_SECONDS, self._look_beside_the_watches),
        )

    async def _again(self, name: str, seconds: float, step: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            await asyncio.sleep(seconds)
            self._under_way[name] = self._s.monotonic()
            try:
                await step()
            except KubeError as error:
                log.warning("%s: %s", name, error)
            except Exception:
                log.exception("%s failed", name)
            finally:
                del self._under_way[name]

    async def _retain(self) -> None:
        if self._resync.complete.is_set():  # before it is, what a checkpoint is needed for may not be known
            await self._retention.step()

    async def _look_beside_the_watches(self) -> None:
        await self._resync.step()
        if late := self._resync.watches.late():
            log.warning("no news from the watches of %s: they are opened anew", ", ".join(late))
            self._reopen()

    async def _see_to_orphans(self) -> None:
        """Checkpoints and restores of stacks that are not there. The API server is asked, since watches may lag
        behind."""
        checkpoints, restores = list(self._cache.checkpoints.values()), self._cache.restores.values()
        self._orphans.keep({body["metadata"]["uid"] for body in (*checkpoints, *restores)})
        for body in checkpoints:
            if await self._is_orphan(stack_of(body)):
                await self._see_to_orphan(body, stack_of(body))
        for body in restores:
            if not is_finished(body) and await self._is_orphan(stack_of(body)):
                await self._see_to_lost_restore(body, stack_of(body))

    async def _is_orphan(self, stack: Key) -> bool:
        if stack in self._cache.stacks:
            return False
        try:
            self._is(STACKS, False, await self._s.kube.get(STACKS, stack.namespace, stack.name))
        except NotFound:
            return True
        return False

    async def _see_to_lost_restore(self, body: Mapping[str, Any], stack: Key) -> None:
        writer, now = RestoreWriter(self._s.kube, body), self._s.wall()
        age = self._orphans.seconds(writer.uid)
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
        age = self._orphans.seconds(writer.uid)
        if body["metadata"].get("deletionTimestamp"):
            age = float("inf")  # nobody waits for its stack any more
        try:
            match checkpoint_queue.without_stack(writer.status, stack.name, age):
                case checkpoint_queue.Fail(reason, message):
                    if not await self._left_alone.end(writer, reason, message):
                        return  # storage is still to be asked
                    subject = Subject(names.CHECKPOINT_KIND, writer.namespace, writer.name, writer.uid)
                    level: Level = "Normal" if writer.status.phase == "Succeeded" else "Warning"
                    self._s.events.say(subject, level, writer.status.reason or reason, writer.status.message or "")
                    self._cache.finish_checkpoint(key_of(body), writer.uid)
                case checkpoint_queue.Hold(reason, message) if reason is not None:
                    whole = checkpoint_phases.Which(0)
                    held = partial(checkpoint_phases.waiting, which=whole, reason=reason, message=message, at=at)
                    await writer.write(held)
        except Gone:
            self._cache.drop_checkpoint(key_of(body), writer.uid)
        except Superseded:
            pass  # an old view: the next event brings a younger one

    # ---- health and numbers -------------------------------------------------------------------------------

    def generations(self) -> Iterator[tuple[Key, Mapping[Series, int]]]:
        """What the policy servers of each stack have counted."""
        for key, (worker, _) in self._workers.items():
            yield key, worker.generations.totals

    def health(self) -> dict[str, Any]:
        """`ok`, and what is wrong. It does not ask whether the API server or a storage answers: a restart of the
        operator would not help against that. `looked` is how many stacks were looked at."""
        now = self._s.monotonic()
        workers = [worker for worker, _ in self._workers.values()]
        stuck = [f"{worker.key.namespace}/{worker.key.name}" for worker in workers if worker.stuck(STUCK_SECONDS)]
        stuck += [name for name, began in self._under_way.items() if now - began > STUCK_SECONDS]
        silent = self._resync.watches.silent()
        return {
            "ok": not stuck and not silent,
            "stacks": len(workers),
            "looked": sum(worker.looked for worker in workers),
            "stuck": stuck,
            "silentWatches": silent,
        }
