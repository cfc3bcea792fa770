"""A cell on Kubernetes: its processes are pods, to end one is to delete its pod, its record is in the stack's status.

The StatefulSets bring fresh pods up by themselves, so to end a process is all there is to do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

from gym_operator.api.names import CONTROL_PORT, STACK_UID_LABEL
from gym_operator.effects.cache import Cache
from gym_operator.effects.events import Events, Subject
from gym_operator.effects.kube import NODES, PODS, Conflict, Kube, KubeError, NotFound
from gym_operator.effects.status_writers import StackWriter
from gym_operator.rules.pod_state import PodState, node_is_lost, pod_uid
from gym_servers.coordination.controller import Process
from gym_servers.coordination.record import CellRecord, Pin
from gym_servers.stack.spec import Participant

log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 1
"""Servers end at once on SIGTERM; what they hold is in a checkpoint or it is not."""
ASK_AGAIN_SECONDS: Final = 3.0
"""A deletion is asked for again after so long: the first one is under way."""


class KubeCellHost:
    """Implements gym_servers.coordination.controller.CellHost for the only cell of a stack."""

    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        writer: StackWriter,
        events: Events,
        subject: Subject,
        participants: Sequence[Participant],
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.participants = participants
        self._kube, self._cache, self._writer = kube, cache, writer
        self._events, self._subject = events, subject
        self._wall, self._monotonic = wall, monotonic
        self._asked: dict[str, float] = {}
        self._lost_nodes: frozenset[str] = frozenset()

    def pods(self) -> dict[str, PodState]:
        """The pod that counts for each server; on a lost node nothing is alive, whatever was heard of it last."""
        return {
            server: replace(pod, alive=False, detail=f"node {pod.node} is lost") if self._is_lost(pod) else pod
            for server, pod in self._cache.pods_of(self._subject.uid).items()
        }

    async def processes(self) -> Sequence[Process]:
        pods = self.pods()
        return [_process(each, pods.get(each.name)) for each in self.participants]

    def any_ended(self, pins: Mapping[str, Pin]) -> bool:
        """Whether it shows already that one of these processes is not there any more."""
        pods = self.pods()
        return any(
            (pod := pods.get(name)) is None or not pod.alive or pod.incarnation != pin.incarnation
            for name, pin in pins.items()
        )

    async def end(self, processes: Mapping[str, str]) -> None:
        """Delete the pods of these processes, all at once; a pod that is another one by now is left alone."""
        pods = self.pods()
        doomed = []
        for name, incarnation in processes.items():
            pod = pods.get(name)
            if pod is not None and pod.uid == pod_uid(incarnation) and self._due(pod):
                doomed.append(pod)
        results = await asyncio.gather(*(self._delete(pod) for pod in doomed), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def save(self, record: CellRecord) -> None:
        # A look may be broken off; what it was writing then is written or not, but never unknown.
        await asyncio.shield(self._writer.save_record(record))

    async def announce(self, level: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        self._events.say(self._subject, level, reason, message)

    async def refresh(self, silent: Collection[str] = ()) -> None:
        """Ask the API server which pods there are, since a watch can fall silent, and how the nodes of those servers
        are that do not answer. Raises KubeError."""
        selector = f"{STACK_UID_LABEL}={self._subject.uid}"
        listing = await self._kube.list_all(PODS, self._subject.namespace, selector)
        self._cache.replace_pods(self._subject.uid, listing)
        pods = self._cache.pods_of(self._subject.uid)
        asked = {pod.node for server, pod in pods.items() if server in silent and pod.node} | self._lost_nodes
        lost = {node for node in asked if await self._node_is_lost(node)}
        self._lost_nodes = frozenset(lost & {pod.node for pod in pods.values() if pod.node})

    @property
    def has_lost_nodes(self) -> bool:
        """Whether a node was lost at the last refresh: it may be back by now."""
        return bool(self._lost_nodes)

    def _is_lost(self, pod: PodState) -> bool:
        return pod.node in self._lost_nodes

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

    def _due(self, pod: PodState) -> bool:
        now = self._monotonic()
        if now - self._asked.get(pod.uid, float("-inf")) < ASK_AGAIN_SECONDS:
            return False
        self._asked = {uid: at for uid, at in self._asked.items() if now - at < 600}
        self._asked[pod.uid] = now
        return True

    async def _delete(self, pod: PodState) -> None:
        forced = self._is_lost(pod) or pod.overdue(self._wall())
        if forced:
            message = f"node {pod.node} does not confirm the end of {pod.name}; it is removed by force"
            await self.announce("Warning", "PodForced", message)
        try:
            await self._kube.delete(PODS, pod.namespace, pod.name, pod.uid, 0 if forced else GRACE_SECONDS)
        except (NotFound, Conflict):
            self._cache.drop_pod(pod.stack_uid, pod.uid)
        except BaseException:  # a look that is broken off has not asked either
            self._asked.pop(pod.uid, None)
            raise


def _process(participant: Participant, pod: PodState | None) -> Process:
    if pod is None:
        return Process(participant.name, participant.kind, None, False, None, "no pod")
    url = f"http://{_host(pod.address)}:{CONTROL_PORT}" if pod.alive and pod.address else None
    return Process(participant.name, participant.kind, pod.incarnation, pod.alive, url, pod.detail)


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
