"""What a pod says about the server process in it. Everything later is decided from this, not from the pod.

A process is named by its pod's UID and its container's id: a container that the kubelet restarts in place is
another process, although name, UID and address stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gym_operator.api import names
from gym_operator.rules.workloads.pods import CONTAINER

OVERDUE_SECONDS: Final = 20.0
"""A pod that is still there so long after its deletion was due is on a node that does not answer."""

NO_CELL: Final = -1
"""The cell of a pod that belongs to none, such as an engine."""


@dataclass(frozen=True)
class PodState:
    """The pod of a server in a cell. `incarnation` is None while no process was started; `grace`, in seconds, is what
    a pod that is being deleted has to end, None for any other. `leaving`: it is being deleted, and its process still
    runs. `detail` says why it is not alive, or is about not to be; `template` is the digest of what the pod was made
    from."""

    uid: str
    name: str
    namespace: str
    stack: str
    stack_uid: str
    server: str
    cell: int
    version: int
    created: str
    incarnation: str | None
    alive: bool
    ready: bool
    address: str | None
    node: str | None
    detail: str
    grace: float | None
    leaving: bool = False
    kind: str = ""
    template: str | None = None

    def overdue(self, since: float) -> bool:
        """Whether nobody seems to confirm its end, so that it has to be forced. `since`: for how many seconds it was
        seen being deleted. The time in the pod is not compared with ours: two clocks that are a minute apart would
        have pods forced whose processes are about to end."""
        return self.grace is not None and since > self.grace + OVERDUE_SECONDS


def observe(pod: Mapping[str, Any]) -> PodState:
    """Read a pod as the API server holds it."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    labels = metadata.get("labels") or {}
    container = _container(status)
    container_id = container.get("containerID")
    deleted = metadata.get("deletionTimestamp")
    alive = status.get("phase") == "Running" and "running" in (container.get("state") or {})
    leaving = alive and deleted is not None
    return PodState(
        uid=metadata["uid"],
        name=metadata["name"],
        namespace=metadata["namespace"],
        stack=labels.get(names.STACK_LABEL, ""),
        stack_uid=labels.get(names.STACK_UID_LABEL, ""),
        server=labels.get(names.SERVER_LABEL, ""),
        cell=NO_CELL if labels.get(names.COMPONENT_LABEL) == names.ENGINE_COMPONENT else _ordinal(metadata["name"]),
        version=int(metadata.get("resourceVersion") or 0),
        created=metadata.get("creationTimestamp") or "",
        incarnation=f"{metadata['uid']}/{container_id}" if container_id else None,
        alive=alive,
        ready=alive and _is_ready(status),
        address=status.get("podIP"),
        node=(pod.get("spec") or {}).get("nodeName"),
        detail="" if alive and not leaving else _detail(status, container, deleted is not None),
        grace=float(metadata.get("deletionGracePeriodSeconds") or 0) if deleted else None,
        leaving=leaving,
        kind=labels.get(names.COMPONENT_LABEL, ""),
        template=(metadata.get("annotations") or {}).get(names.TEMPLATE_DIGEST),
    )


def by_server(pods: Iterable[PodState]) -> dict[str, PodState]:
    """The pod that counts for each server: the youngest, since a watch may tell of the end of the one before late."""
    chosen: dict[str, PodState] = {}
    for pod in sorted(pods, key=lambda pod: (pod.created, pod.version)):
        chosen[pod.server] = pod
    return chosen


HOPELESS: Final = (
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
)
"""Why a container does not start that no patience mends: what its pod was made from is wrong."""


def is_hopeless(pod: PodState) -> bool:
    """Whether it does not come up because of what it was made from."""
    return not pod.alive and pod.grace is None and pod.detail.startswith(HOPELESS)


def is_cordoned(node: Mapping[str, Any]) -> bool:
    """Whether nothing new is to come to a node: it is drained, or is about to be."""
    return bool((node.get("spec") or {}).get("unschedulable"))


def node_is_lost(node: Mapping[str, Any]) -> bool:
    """Whether a node has stopped to answer the control plane. One that says itself that it is not ready still ends
    pods in order."""
    return _condition(node.get("status") or {}, "Ready", "Unknown") is not None


def pod_uid(incarnation: str) -> str:
    """The UID of the pod an incarnation lives in."""
    return incarnation.partition("/")[0]


def _ordinal(name: str) -> int:
    """The number that its StatefulSet has put behind the pod's name: the cell."""
    number = name.rpartition("-")[2]
    return int(number) if number.isdecimal() else NO_CELL


def _container(status: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Iterable[Mapping[str, Any]] = status.get("containerStatuses") or ()
    return next((each for each in found if each.get("name") == CONTAINER), {})


def _is_ready(status: Mapping[str, Any]) -> bool:
    conditions: Iterable[Mapping[str, Any]] = status.get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def _detail(status: Mapping[str, Any], container: Mapping[str, Any], deleted: bool) -> str:
    state = container.get("state") or {}
    terminated = state.get("terminated")
    if status.get("reason"):  # the pod as a whole: Evicted, NodeLost, Preempting
        return _sentence(status["reason"], status.get("message"))
    if deleted:
        disrupted = _condition(status, "DisruptionTarget", "True")
        return _sentence(f"deleted by {disrupted['reason']}", disrupted.get("message")) if disrupted else "deleted"
    if terminated:
        return f"{terminated.get('reason') or 'ended'}, exit code {terminated.get('exitCode')}"
    if waiting := state.get("waiting"):
        last = (container.get("lastState") or {}).get("terminated")
        code = f", last exit code {last.get('exitCode')}" if last else ""
        return _sentence(f"{waiting.get('reason') or 'waiting'}{code}", waiting.get("message"))
    if unscheduled := _condition(status, "PodScheduled", "False"):
        return _sentence(unscheduled.get("reason") or "Unschedulable", unscheduled.get("message"))
    return str(status.get("phase") or "Pending").lower()


def _condition(status: Mapping[str, Any], type: str, value: str) -> Mapping[str, Any] | None:
    conditions: Iterable[Mapping[str, Any]] = status.get("conditions") or ()
    return next((each for each in conditions if each.get("type") == type and each.get("status") == value), None)


def _sentence(reason: str, message: str | None) -> str:
    return f"{reason}: {message[:200]}" if message else reason
