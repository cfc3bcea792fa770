"""The pods of one stack: as the watch tells of them, mended by lists, which of their nodes are lost, and which pods
may be evicted.

One for all cells of the stack: what one cell has found out by asking, the others need not ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import Final

from gym_operator.api.names import STACK_UID_LABEL
from gym_operator.effects.events import Subject
from gym_operator.effects.kube import NODES, PODS, KubeError, NotFound
from gym_operator.effects.services import Services
from gym_operator.effects.waits import Waits
from gym_operator.rules.pod_state import PodState, node_is_lost

REFRESH_SECONDS: Final = 2.0
"""Between lists of the pods while something does not answer."""


class StackPods:
    """`of` is what is known now; `mend` asks the API server."""

    def __init__(self, services: Services, subject: Subject) -> None:
        self._kube, self._cache, self._monotonic = services.kube, services.cache, services.monotonic
        self._subject = subject
        self._silent: dict[int, frozenset[str]] = {}
        self._lost_nodes: frozenset[str] = frozenset()
        self._refreshed = float("-inf")
        self._refreshing = asyncio.Lock()
        self._ending = Waits(services.monotonic)
        self._evictable: dict[int, float] = {}

    def of(self, cell: int) -> dict[str, PodState]:
        """The pod that counts for each server of a cell; on a lost node nothing is alive, whatever was heard of it
        last."""

        def known(pod: PodState) -> PodState:
            if not self.is_lost(pod):
                return pod
            return replace(pod, alive=False, leaving=False, detail=f"node {pod.node} is lost")

        return {server: known(pod) for server, pod in self._cache.pods_of(self._subject.uid, cell).items()}

    def cells_at_work(self) -> int:
        """So many cells as may still do something: up to the highest that has a process. What should be gone for long
        is on a node that does not answer, and is waited for no more than in a recovery."""
        pods = self._cache.all_of(self._subject.uid)
        self._ending.keep({pod.uid for pod in pods if pod.grace is not None})

        def works(pod: PodState) -> bool:
            overdue = pod.grace is not None and pod.overdue(self._ending.seconds(pod.uid))
            return pod.alive and not overdue and not self.is_lost(pod)

        return max((pod.cell + 1 for pod in pods if works(pod)), default=0)

    def engines(self) -> list[PodState]:
        """The pods of the stack's engine."""
        return [
            replace(pod, alive=False, ready=False, detail=f"node {pod.node} is lost") if self.is_lost(pod) else pod
            for pod in self._cache.engines_of(self._subject.uid)
        ]

    def is_lost(self, pod: PodState) -> bool:
        return pod.node in self._lost_nodes

    @property
    def has_lost_nodes(self) -> bool:
        """Whether a node was lost at the last list: it may be back by now."""
        return bool(self._lost_nodes)

    def dropped(self, pod: PodState) -> None:
        """It is known to be gone, whatever the watch has told."""
        self._cache.drop_pod(pod.stack_uid, pod.uid)

    def silent(self, cell: int, servers: Collection[str]) -> None:
        """These servers of a cell do not answer: how their nodes are is asked with the next list."""
        self._silent[cell] = frozenset(servers)

    def let_through(self, cells: Collection[int]) -> None:
        """Only these cells' pods are let through by the budget when they are evicted, as was written or seen now."""
        now = self._monotonic()
        self._evictable = {cell: self._evictable.get(cell, now) for cell in cells}

    def evictable_for(self, cell: int) -> float | None:
        """For how many seconds the budget has let the pods of a cell through; None where it is not known to."""
        since = self._evictable.get(cell)
        return None if since is None else self._monotonic() - since

    async def mend(self) -> None:
        """List the pods, unless that was done a moment ago. Raises KubeError."""
        async with self._refreshing:
            if self._monotonic() - self._refreshed >= REFRESH_SECONDS:
                await self._refresh()

    async def refresh(self) -> None:
        """Ask the API server which pods there are, since a watch can fall silent, and how the nodes of those servers
        are that do not answer. Raises KubeError."""
        async with self._refreshing:
            await self._refresh()

    async def _refresh(self) -> None:
        self._refreshed = self._monotonic()
        selector = f"{STACK_UID_LABEL}={self._subject.uid}"
        listing = await self._kube.list_all(PODS, self._subject.namespace, selector)
        self._cache.replace_pods(self._subject.uid, listing)
        silent = {
            pod.node
            for cell, servers in self._silent.items()
            for server, pod in self._cache.pods_of(self._subject.uid, cell).items()
            if server in servers and pod.node
        }
        lost = {node for node in silent | self._lost_nodes if await self._node_is_lost(node)}
        self._lost_nodes = frozenset(lost & self._cache.nodes_of(self._subject.uid))

    async def _node_is_lost(self, name: str) -> bool:
        """Whether the node does not answer; an operator that may not look at nodes takes them for healthy."""
        try:
            return node_is_lost(await self._kube.get(NODES, None, name))
        except NotFound:
            return True
        except KubeError as error:
            if error.status == 403:
                return False
            raise
