"""How long a cell that is to go finishes what it has begun. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from gym_operator.api.objects import parse_time
from gym_operator.api.stack import StackStatus
from gym_operator.rules.pod_state import PodState
from gym_servers.protocol.messages import Status

BEGUN: Final[Mapping[str, tuple[str, ...]]] = {
    "environment": ("live", "unclaimed"),
    "collection": ("outstanding",),
}
"""By kind, which counts of a report say how many rollouts have begun and not ended: at the driver one has not ended
before its row is durable."""


@dataclass(frozen=True)
class Drain:
    """`since` and `until` are Unix seconds; `running` is how many rollouts have begun and not ended, None where that
    is not known; `over` is why nobody waits for them any longer, for people, and empty while somebody does."""

    since: float
    until: float
    running: int | None = None
    over: str = ""


def drain_told(status: StackStatus, cell: int) -> Drain | None:
    """What the status says of a cell's drain; None where it says that there is none."""
    told = next((part.drain for part in status.cells if part.index == cell), None)
    return Drain(parse_time(told.started_at), parse_time(told.until), told.running) if told is not None else None


def running_in(statuses: Iterable[Status | None]) -> int | None:
    """How many rollouts have begun and not ended, by the statuses of those who know: None for one that is silent."""
    counts = []
    for status in statuses:
        if status is None:
            return None
        counts.append(sum(status.report.counts.get(name, 0) for name in BEGUN.get(status.kind, ())))
    return max(counts, default=None)


def drain(
    since: float,
    timeout: float,
    running: int | None,
    pods: Mapping[str, PodState],
    cordoned: Collection[str],
    now: float,
) -> Drain:
    """`pods` are the cell's, by server: where somebody else asks for one of them, that is not made to wait."""
    over = ""
    if running == 0:
        over = "all that it had begun had ended"
    elif asked := _asked_for(pods, cordoned):
        over = asked
    elif now >= since + timeout:
        count = "its rollouts" if running is None else f"{running} of its rollouts"
        over = f"{count} had not ended within spec.scaleDown.drainTimeout"
    return Drain(since, since + timeout, running, over)


def _asked_for(pods: Mapping[str, PodState], cordoned: Collection[str]) -> str:
    for server, pod in sorted(pods.items()):
        if pod.leaving:
            return f"the pod of {server} was {pod.detail}"
        if pod.node is not None and pod.node in cordoned:
            return f"node {pod.node} of {server} is cordoned"
    return ""
