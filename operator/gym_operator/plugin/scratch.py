"""Makes the scratch stack of a drill, and takes away all that it has left, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

from gym_operator.api import names
from gym_operator.effects.kube import PODS, RESTORES, STACKS, Body, Resource
from gym_operator.plugin.cluster import Cluster
from gym_operator.plugin.exits import NoAnswer, PluginError, Unusable
from gym_operator.plugin.screen import Screen
from gym_operator.plugin.sources import opened
from gym_operator.plugin.views.scratch import is_of, place_of, scratch_restore, taken_by
from gym_servers.stack.render import stack_root
from gym_servers.stack.spec import StorageSpec
from gym_servers.storage.ownership import owner_of
from gym_servers.storage.parallel import side_by_side
from gym_servers.storage.store import ObjectStore, StorageError

LOOK_SECONDS: Final = 1.0
AWAY_SECONDS: Final = 600.0
"""How long an API server that is away is waited for, to delete what was made."""
LATE_SECONDS: Final = 30.0
"""How long after a request without an answer an object may still come up that it has made."""
PODS_SECONDS: Final = 900.0
"""How long the pods are waited for: longer than any has to end, unless its node is lost."""
SETTLE_SECONDS: Final = 3.0
SWEEPS: Final = 10
"""How often its folder is emptied until nothing is there any more: the operator may be at writing still, since it
hears of the deletion a moment later."""

T = TypeVar("T")


class Scratch:
    """One drill's. `begin` makes it, `end` takes it away: always call it, also where `begin` has failed."""

    def __init__(self, cluster: Cluster, screen: Screen, wanted: Body, checkpoint: str, drill_id: str) -> None:
        self._cluster, self._screen, self._wanted = cluster, screen, wanted
        self._checkpoint, self._id = checkpoint, drill_id
        self._name: str = wanted["metadata"]["name"]
        self._made: Body | None = None
        self._unsure = False

    async def check(self) -> None:
        """That the name is free, and that what is made can be deleted again: before anything is made. Raises
        PluginError."""
        if (there := await self._cluster.find(STACKS, self._name)) is not None:
            raise Unusable(taken_by(there, self._cluster.namespace))
        for resource in (STACKS, RESTORES):
            # No object has this UID: the answer says whether the user may.
            await self._cluster.delete(resource, self._name, self._id)

    async def begin(self) -> Body:
        """The GymRestore that was made. Raises PluginError."""
        stack = await self._make(STACKS, names.STACK_KIND, self._wanted)
        self._made = stack
        restore = scratch_restore(stack, self._checkpoint, self._id)
        return await self._make(RESTORES, names.RESTORE_KIND, restore)

    async def end(self) -> None:
        """Delete what was made and wait until nothing of it is left. Interruptions are told, and do not end it. What
        could not be taken away is told, with what to do, and raised as a PluginError."""
        await self._surely(self._end())

    # ---- making -------------------------------------------------------------------------------------------

    async def _make(self, resource: Resource, kind: str, body: Body) -> Body:
        try:
            # A request that has gone out may land: whoever is interrupted meanwhile has to know.
            return await self._surely(self._cluster.create(resource, kind, body))
        except NoAnswer:
            self._unsure = True
            raise

    async def _surely(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is not broken off; an interruption comes after it."""
        task, interrupted = asyncio.ensure_future(work), False
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                interrupted = True
                self._screen.tell(
                    f"interrupted: GymStack {self._name} is deleted first, which takes until its pods end"
                )
        result = task.result()  # what went wrong is worth more than that somebody was impatient
        if interrupted:
            raise asyncio.CancelledError
        return result

    # ---- taking away --------------------------------------------------------------------------------------

    async def _end(self) -> None:
        clock = asyncio.get_running_loop().time
        since, stack = clock(), self._made
        while True:
            deleted = False
            try:
                stack = await self._delete(STACKS) or stack
                await self._delete(RESTORES)
                deleted = True
            except NoAnswer as error:
                if clock() - since > AWAY_SECONDS:
                    raise self._left(str(error)) from error
                self._screen.tell(f"{error}; it is asked again")
            except PluginError as error:
                raise self._left(str(error)) from error
            if deleted and not (self._unsure and clock() - since < LATE_SECONDS):
                break
            await asyncio.sleep(LOOK_SECONDS)
        if stack is None:
            return  # none was made
        self._screen.tell(f"GymStack {self._name} is deleted; its pods end")
        spec, identity = place_of(stack)
        root = stack_root(spec, identity)
        if await self._pods_are_gone(identity.uid):
            await self._sweep(spec, root, identity.uid)
        else:
            self._screen.tell(f"a few small files stay in {root}, which may be removed once its pods are gone")

    async def _delete(self, resource: Resource) -> Body | None:
        """What was there of this drill, and is deleted now; None where there is nothing."""
        found = await self._cluster.find(resource, self._name)
        if found is None or not is_of(found, self._id):
            return None
        await self._cluster.delete(resource, self._name, found["metadata"]["uid"])
        return found

    def _left(self, why: str) -> PluginError:
        return Unusable(
            f"GymStack {self._name} could not be deleted, delete it by hand: kubectl delete gymstack {self._name} -n "
            f"{self._cluster.namespace}; {why}"
        )

    async def _pods_are_gone(self, uid: str) -> bool:
        """Whether they are, in the end."""
        clock = asyncio.get_running_loop().time
        until, selector = clock() + PODS_SECONDS, f"{names.STACK_UID_LABEL}={uid}"
        while clock() < until:
            try:
                if not await self._cluster.list(PODS, selector):
                    return True
            except NoAnswer as error:
                self._screen.tell(f"{error}; it is asked again")
            except PluginError as error:
                self._screen.tell(f"{error}; Kubernetes ends the pods of {self._name} all the same")
                return False
            await asyncio.sleep(LOOK_SECONDS)
        self._screen.tell(f"pods of {self._name} are there still, as on a node that is lost; Kubernetes ends them")
        return False

    async def _sweep(self, spec: StorageSpec, root: str, uid: str) -> None:
        """Remove the folder that the operator has made for it in the bucket: whose it is, and used-up attempts."""
        try:
            storage = await opened(self._cluster, spec)
            for _ in range(SWEEPS):
                if not await asyncio.to_thread(lambda: empty(storage.open(root), uid)):
                    return
                await asyncio.sleep(SETTLE_SECONDS)
        except (PluginError, StorageError) as error:
            self._screen.tell(f"a few small files stay in {root}, which may be removed: {error}")


def empty(store: ObjectStore, uid: str) -> int:
    """Remove all that is in the folder of the stack with this UID; how many objects that was. Blocks. Raises
    StorageError, also where the folder says that it is another's."""
    owner = owner_of(store)
    if not uid or not store.uri.rstrip("/").endswith(f"/{uid}") or (owner is not None and owner.stack_uid != uid):
        raise StorageError(f"{store.uri} is not the folder of the stack with UID {uid}: nothing of it is removed")
    return len(side_by_side(store.delete, list(store.list(""))))
