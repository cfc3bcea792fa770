"""`logs`: what the servers of a stack say, also those that come in place of others."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from gym_operator.api.names import STACK_UID_LABEL
from gym_operator.effects.kube import PODS, STACKS, KubeError, NotFound
from gym_operator.plugin.cluster import Cluster, refusal
from gym_operator.plugin.exits import NoAnswer, OutOfReach, Unusable
from gym_operator.plugin.screen import Screen
from gym_operator.plugin.views.logs import chosen, line_of, options_of
from gym_operator.rules.pod_state import PodState
from gym_operator.rules.workloads.pods import CONTAINER

LOOK_SECONDS: Final = 2.0
"""Between looks which pods there are."""
LOGS: Final = PODS._replace(plural="pods/log")


@dataclass(frozen=True)
class Wanted:
    """Whose logs, and how much of each. `since` in seconds."""

    server: str | None = None
    cell: int | None = None
    tail: int | None = None
    since: float | None = None
    previous: bool = False


async def logs(cluster: Cluster, screen: Screen, stack: str, wanted: Wanted, *, follow: bool) -> None:
    """Show them; with `follow` until the user ends it, or the stack is gone. Raises PluginError."""
    uid = (await cluster.stack(stack))["metadata"]["uid"]
    pods = await _pods(cluster, uid, wanted)
    if not pods and not follow:
        raise Unusable(f"stack {stack} has no pods: kubectl gym status {stack} says why")
    if follow:
        await _Following(cluster, screen, stack, uid, wanted).run()
        return
    options = options_of(len(pods), wanted.tail, wanted.since, previous=wanted.previous)
    for pod in pods:
        await _show(cluster, screen, pod, pods, options, follow=False)


async def _pods(cluster: Cluster, uid: str, wanted: Wanted) -> list[PodState]:
    found = await cluster.list(PODS, f"{STACK_UID_LABEL}={uid}")
    return chosen(found, wanted.server, wanted.cell)


async def _show(
    cluster: Cluster,
    screen: Screen,
    pod: PodState,
    among: list[PodState],
    options: Mapping[str, str],
    *,
    follow: bool,
) -> bool:
    """Whether all of it was shown; why not is told. Raises OutOfReach for what holds of all pods."""
    try:
        async for line in cluster.kube.log(cluster.namespace, pod.name, CONTAINER, options, follow=follow):
            screen.line(line_of(pod, line, among))
    except NotFound:
        screen.tell(f"{pod.name}: it is gone")
        return True
    except KubeError as error:
        told = refusal(error, "get", LOGS, cluster.namespace)
        if isinstance(told, OutOfReach) and error.status:
            raise told from error
        screen.tell(f"{pod.name}: {error}")
        return False
    return True


class _Following:
    """One task a container; a container that is started again, or in a pod that is made again, has another."""

    def __init__(self, cluster: Cluster, screen: Screen, stack: str, uid: str, wanted: Wanted) -> None:
        self._cluster, self._screen, self._stack, self._uid, self._wanted = cluster, screen, stack, uid, wanted
        self._tasks: dict[str, asyncio.Task[bool]] = {}
        self._pods: list[PodState] = []

    async def run(self) -> None:
        try:
            self._pods = await _pods(self._cluster, self._uid, self._wanted)
            self._begin(first=True)
            while await self._goes_on():
                await asyncio.sleep(LOOK_SECONDS)
                self._begin(first=False)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _goes_on(self) -> bool:
        """Whether anything more may come; looks which pods there are."""
        try:
            found = await self._cluster.find(STACKS, self._stack)
            with suppress(Unusable):  # of a server or cell that has no pod for now
                self._pods = await _pods(self._cluster, self._uid, self._wanted)
        except NoAnswer as error:
            self._screen.tell(f"{error}; it is asked again")
            return True
        is_there = found is not None and found["metadata"]["uid"] == self._uid
        return is_there or not all(task.done() for task in self._tasks.values())

    def _begin(self, *, first: bool) -> None:
        wanted = self._wanted
        for pod in self._pods:
            name = f"{pod.uid}/{pod.incarnation}"
            before = self._tasks.get(name)
            if pod.incarnation is None or (before is not None and not before.done()):
                continue
            if before is not None and before.result():
                continue  # it has come to its end
            if before is not None:  # it broke off
                options = options_of(1, 0, None, previous=False)
            elif first:
                options = options_of(len(self._pods), wanted.tail, wanted.since, previous=wanted.previous)
            else:
                options = {}
            showing = _show(self._cluster, self._screen, pod, self._pods, options, follow=True)
            self._tasks[name] = asyncio.create_task(showing)
