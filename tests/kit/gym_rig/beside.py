"""Another stack beside `local/rig` in the same fake cluster: its kubelet, and the garbage collection that takes away
what belonged to it.

    async with beside(rig, "rig-drill") as other:
        ... somebody creates GymStack rig-drill, and deletes it ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gym_operator.api import names
from gym_operator.effects.kube import CHILDREN, PODS, SECRETS, STACKS, Body, Resource
from gym_operator.rules.workloads import StackContext, build_control_secret
from gym_rig.cell import COOKIES, IDENTITY, TOKEN, Rig, Running, rig_settings
from gym_rig.operated import LOOK_SECONDS, OperatedRig
from gym_servers.stack.settings import StackIdentity
from gym_servers.stack.spec import parse_spec

NAMESPACE = IDENTITY.namespace


class StackBeside:
    """`uids`: of the stacks of this name that there were. `objects_last`, `pods_last`: for how long, in seconds, what
    belonged to a stack is still there when it is gone, and its pods are; they go last."""

    def __init__(self, rig: OperatedRig, name: str) -> None:
        self._rig, self.kube, self.name = rig, rig.kube, name
        self.uids: list[str] = []
        self.pods_may_start, self.objects_last, self.pods_last = True, 0.0, 0.0
        self.cells: dict[int, Rig] = {}
        self._spec: Body = {}
        self._running: dict[str, tuple[Running, str]] = {}
        told = self.kube.watch

        def watch(resource: Resource, deleted: bool, body: Body) -> None:
            if resource == STACKS and body["metadata"]["name"] == name:
                self._changed(deleted, body)
            told(resource, deleted, body)

        self.kube.watch = watch

    def pods(self) -> dict[str, Body]:
        return {
            name: body
            for (resource, _, name), body in self.kube.objects.items()
            if resource == PODS and body["metadata"]["labels"].get(names.STACK_LABEL) == self.name
        }

    async def run(self) -> None:
        while True:
            self._see_to_pods()
            await asyncio.sleep(LOOK_SECONDS)

    def kill(self) -> None:
        for process, _ in self._running.values():
            process.kill()

    def _changed(self, deleted: bool, body: Body) -> None:
        uid, loop = body["metadata"]["uid"], asyncio.get_running_loop()
        if deleted:
            loop.call_later(self.objects_last, self._collect, uid)
            loop.call_later(max(self.objects_last, self.pods_last), self._collect_pods, uid)
        elif uid not in self.uids:
            self.uids.append(uid)
            self.cells, self._spec = {}, body["spec"]
            if (SECRETS, NAMESPACE, names.control_secret(self.name)) not in self.kube.objects:
                self._give_tokens()

    def _give_tokens(self) -> None:
        """Those that the processes know, before the operator makes others."""
        identity = StackIdentity(namespace=NAMESPACE, name=self.name, uid=self.uids[-1])
        context = StackContext(identity, parse_spec(self._spec), "gym-system")
        self.kube.put(SECRETS, NAMESPACE, build_control_secret(context, TOKEN, COOKIES))

    def _collect(self, uid: str) -> None:
        """What belongs to a stack that is gone goes too."""
        for resource, namespace, name in list(self.kube.objects):
            body = self.kube.objects[resource, namespace, name]
            if any(owner["uid"] == uid for owner in body["metadata"].get("ownerReferences", ())):
                assert namespace is not None
                self.kube.remove(resource, namespace, name)
        if uid != self.uids[-1]:
            self._give_tokens()

    def _collect_pods(self, uid: str) -> None:
        for name, body in self.pods().items():
            if body["metadata"]["labels"][names.STACK_UID_LABEL] == uid:
                self.kube.remove(PODS, NAMESPACE, name)

    def _see_to_pods(self) -> None:
        present = self.pods()
        for name in set(self._running) - set(present):
            self._running.pop(name)[0].kill()
        for (resource, _, name), body in list(self.kube.objects.items()):
            if resource != CHILDREN["StatefulSet"] or body["metadata"]["labels"][names.STACK_LABEL] != self.name:
                continue
            for index in range(body["spec"]["replicas"]):
                pod = f"{name}-{index}"
                if pod in present:
                    self._see_to_process(pod, index, present[pod])
                elif self.pods_may_start:
                    template = body["spec"]["template"]
                    metadata = {"name": pod, **template["metadata"]}
                    self.kube.put(PODS, NAMESPACE, {"metadata": metadata, "spec": template["spec"]})

    def _see_to_process(self, name: str, index: int, pod: Body) -> None:
        uid, server = pod["metadata"]["uid"], pod["metadata"]["labels"][names.SERVER_LABEL]
        if pod["metadata"]["labels"][names.STACK_UID_LABEL] != self.uids[-1]:
            return  # of one that is gone
        if name in self._running and self._running[name][1] == uid:
            return
        cell = self._cell(index)
        started = cell.start(server)
        self._running[name] = (started, uid)
        status = {
            "phase": "Running",
            "podIP": cell.control_host(server),
            "containerStatuses": [{"name": "server", "containerID": started.incarnation, "state": {"running": {}}}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        self.kube.set(PODS, NAMESPACE, name, status=status)

    def _cell(self, index: int) -> Rig:
        if index not in self.cells:
            suffix = f"-{self.name}-{index}"
            settings, root = rig_settings(
                self._rig.folder,
                self._rig._rows,
                index=index,
                suffix=suffix,
                cells_file=self._rig._cells_file,
                identity=StackIdentity(namespace=NAMESPACE, name=self.name, uid=self.uids[-1]),
                collection=self._spec.get("collection"),
            )
            self.cells[index] = Rig(
                self._rig.folder, settings, root, rate=self._rig._rate, beside=self._rig.cell, suffix=suffix
            )
        return self.cells[index]


@asynccontextmanager
async def beside(rig: OperatedRig, name: str) -> AsyncIterator[StackBeside]:
    """A cluster that looks after a stack of this name, once there is one."""
    other = StackBeside(rig, name)
    kubelet = asyncio.create_task(other.run())
    try:
        yield other
        if kubelet.done():
            kubelet.result()
    finally:
        kubelet.cancel()
        other.kill()
