"""A cell on Kubernetes: its processes are pods, to end one is to delete its pod, its record is in the stack's status.

The StatefulSets bring fresh pods up by themselves, so to end a process is all there is to do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

from gym_operator.api.names import CONTROL_PORT
from gym_operator.effects.events import Subject
from gym_operator.effects.kube import PODS, Conflict, NotFound
from gym_operator.effects.services import Services
from gym_operator.effects.stack_pods import StackPods
from gym_operator.effects.status_writers import StackWriter
from gym_operator.effects.waits import Waits
from gym_operator.rules.pod_state import PodState, pod_uid
from gym_operator.rules.rollouts import left_to_the_drain, yields
from gym_servers.coordination.cell_host import Process
from gym_servers.coordination.record import CellRecord, Pin, Stage
from gym_servers.stack.spec import Participant
from gym_servers.unattended import unattended

GRACE_SECONDS: Final = 1
"""Servers that are told that no checkpoint comes end at once; what they hold is in one or it is not."""
PARKING_SECONDS: Final = 12
"""After a last checkpoint they park their sessions first, and need no longer than that takes."""
ASK_AGAIN_SECONDS: Final = 3.0
"""A deletion is asked for again after so long: the first one is under way."""


class KubeCellHost:
    """Implements gym_servers.coordination.cell_host.CellHost for one cell of a stack: other cells' pods are none of
    its business. `prefix` is how its announcements begin."""

    def __init__(
        self,
        services: Services,
        subject: Subject,
        cell: int,
        pods: StackPods,
        writer: StackWriter,
        participants: Sequence[Participant] = (),
        prefix: str = "",
    ) -> None:
        self.participants, self.prefix = participants, prefix
        self._s, self._subject, self._cell = services, subject, cell
        self._pods, self._writer = pods, writer
        self._asked: dict[str, float] = {}
        self._deleting, self._left = Waits(services.monotonic), Waits(services.monotonic)
        self.given_up: frozenset[str] = frozenset()  # servers that are about to be ended, and do not answer

    def pods(self) -> dict[str, PodState]:
        """The pod that counts for each server."""
        pods = self._pods.of(self._cell)
        lost = {name for name in self.given_up if name in pods and pods[name].leaving}
        return {name: replace(pod, alive=False, leaving=False) if name in lost else pod for name, pod in pods.items()}

    async def processes(self) -> Sequence[Process]:
        """Those that the spec wants; in service, those that it wanted when they came into it."""
        pods, record = self.pods(), self._writer.record(self._cell)
        if record is None or record.stage not in (Stage.RUNNING, Stage.STOPPED) or not record.pins:
            return [_process(each.name, each.kind, pods.get(each.name)) for each in self.participants]
        kinds: dict[str, str] = {each.name: each.kind for each in self.participants}
        names = [*(name for name in kinds if name in record.pins), *sorted(record.pins.keys() - kinds)]
        return [
            _process(name, kinds.get(name) or (pods[name].kind if name in pods else ""), pods.get(name))
            for name in names
        ]

    def any_ended(self, pins: Mapping[str, Pin]) -> bool:
        """Whether it shows already that one of these processes is not there any more."""
        pods = self.pods()
        return any(
            (pod := pods.get(name)) is None or not pod.alive or pod.incarnation != pin.incarnation
            for name, pin in pins.items()
        )

    async def end(self, processes: Mapping[str, str]) -> None:
        """Delete the pods of these processes, all at once; a pod that is another one by now is left alone, and for a
        while those that whoever drains their node may take."""
        pods = self.pods()
        self._deleting.keep({_ending(pod) for pod in pods.values()})
        self._left.keep({pod.uid for pod in pods.values()})
        cordoned = self._s.cache.cordoned if self._s.watches_nodes else frozenset()
        left = yields(self._writer.record(self._cell), pods, cordoned)
        evictable = self._pods.evictable_for(self._cell)
        doomed = []
        for name, incarnation in processes.items():
            pod = pods.get(name)
            if pod is None or pod.uid != pod_uid(incarnation):
                continue
            stays = left and pod.node in cordoned and pod.grace is None
            if stays and left_to_the_drain(self._left.seconds(pod.uid), evictable):
                continue
            if self._due(pod):
                doomed.append(pod)
        results = await asyncio.gather(*(self._delete(pod) for pod in doomed), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def discard(self, servers: Collection[str]) -> None:
        """Delete the pods of these servers, whether there is a process in them or not."""
        found = [pod for name, pod in self.pods().items() if name in servers and self._due(pod)]
        await asyncio.gather(*(self._delete(pod) for pod in found))

    async def save(self, record: CellRecord) -> None:
        # A look may be broken off; what it was writing then is written or not, but never unknown.
        await asyncio.shield(unattended(self._writer.save_record(self._cell, record)))

    async def announce(self, level: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        self._s.events.say(self._subject, level, reason, f"{self.prefix}{message}")

    def _due(self, pod: PodState) -> bool:
        now = self._s.monotonic()
        if now - self._asked.get(pod.uid, float("-inf")) < ASK_AGAIN_SECONDS:
            return False
        self._asked = {uid: at for uid, at in self._asked.items() if now - at < 600}
        self._asked[pod.uid] = now
        return True

    async def _delete(self, pod: PodState) -> None:
        forced = self._pods.is_lost(pod) or (
            pod.grace is not None and pod.overdue(self._deleting.seconds(_ending(pod)))
        )
        if forced:
            message = f"node {pod.node} does not confirm the end of {pod.name}; it is removed by force"
            await self.announce("Warning", "PodForced", message)
        record = self._writer.record(self._cell)
        parks = record is not None and bool(record.recoveries) and record.recoveries[-1].planned
        grace = PARKING_SECONDS if parks else GRACE_SECONDS
        try:
            await self._s.kube.delete(PODS, pod.namespace, pod.name, pod.uid, 0 if forced else grace)
        except (NotFound, Conflict):
            self._pods.dropped(pod)
        except BaseException:  # a look that is broken off has not asked either
            self._asked.pop(pod.uid, None)
            raise


def _process(name: str, kind: str, pod: PodState | None) -> Process:
    if pod is None:
        return Process(name, kind, None, False, None, "no pod")
    url = f"http://{_host(pod.address)}:{CONTROL_PORT}" if pod.alive and pod.address else None
    return Process(name, kind, pod.incarnation, pod.alive, url, pod.detail, pod.leaving)


def _ending(pod: PodState) -> str:
    """A pod's end as it was asked for last: one that is given less time has begun to end anew."""
    return f"{pod.uid}/{pod.grace}"


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
