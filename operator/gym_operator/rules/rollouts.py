"""Planned replacement of a cell's pods: why one is due, whose turn it is, and what to do next. Pure.

A pod that somebody else ends cannot wait: its kubelet gives it the grace period and no more. Another image, other
settings and a cordoned node can, so cells are moved one after the other, and none while another is out of service:
what does not come up stops there. A cell that waits for people may do so for days, and a node cannot: sisters that
get nothing but another place are moved past it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from gym_operator.rules.pod_state import PodState
from gym_servers.coordination.record import CellRecord, Stage

TRIES: Final = 4
"""Last checkpoints of a cell that can wait: by default, rollouts that hold three up are restarted by the fourth."""
URGENT_TRIES: Final = 1
EVICTION_SECONDS: Final = 9.0
"""For so long pods that are to leave their node may be evicted by who drains it: kubectl asks every five seconds."""
BUDGET_SECONDS: Final = 60.0
"""The budget has so long to be changed for that. A cell whose budget cannot be is not held up any longer."""


@dataclass(frozen=True)
class Cause:
    """Why a cell is to get other pods, for people. `urgent`: it loses them whatever is done; `unchanged`: they are to
    be what the old ones are, in another place."""

    reason: str
    urgent: bool
    unchanged: bool = False


@dataclass(frozen=True)
class Take:
    """Take a last checkpoint that stops the cell; fresh pods continue from it."""

    reason: str


@dataclass(frozen=True)
class Replace:
    """Replace the pods now: fresh ones continue from the newest checkpoint that there is."""

    reason: str


@dataclass(frozen=True)
class Discard:
    """Delete the pods of these servers: nothing was ever begun in them."""

    servers: frozenset[str]


Move = Take | Replace | Discard | None


@dataclass(frozen=True)
class Situation:
    """A cell, as far as its replacement depends on it. `free`: it is in service and nothing goes on in it; `busy`: it
    is being put into service, or a checkpoint is being taken; `turn`: no other cell is to be waited for; `failed`:
    how many last checkpoints did; `storage_ok`: checkpoints can be written and read, as far as is known."""

    record: CellRecord | None
    pods: Mapping[str, PodState]
    templates: Mapping[str, str]
    cordoned: Collection[str] = ()
    free: bool = False
    busy: bool = False
    turn: bool = True
    failed: int = 0
    storage_ok: bool = True


def outdated(pods: Mapping[str, PodState], templates: Mapping[str, str]) -> list[str]:
    """Servers whose pods were not made from the templates that stand now."""
    return sorted(
        server
        for server, template in templates.items()
        if server in pods and pods[server].grace is None and pods[server].template != template
    )


def cause_of(situation: Situation) -> Cause | None:
    """Why a cell that is in service is to get other pods; None where it is not."""
    record, pods, templates = situation.record, situation.pods, situation.templates
    pins = record.pins if record is not None else {}
    for server in sorted(pods):
        if pods[server].leaving and server in (pins or pods):
            return Cause(f"{server} is being ended: its pod was {pods[server].detail}", urgent=True)
    if templates and pins and (others := sorted(pins.keys() ^ templates.keys())):
        return Cause(f"the spec has other servers: {', '.join(others)}", urgent=False)
    if names := outdated(pods, templates):
        return Cause(f"the spec has another image or other settings for {', '.join(names)}", urgent=False)
    for server, pod in sorted(pods.items()):
        if pod.node is not None and pod.node in situation.cordoned:
            # Before anything was applied nobody knows what fresh pods would be made from.
            return Cause(f"node {pod.node} of {server} is cordoned", urgent=False, unchanged=bool(templates))
    return None


def next_move(situation: Situation) -> Move:
    """What to do about a cell's pods, beside what its controller does."""
    record = situation.record
    if record is None or situation.busy:
        return None
    old = outdated(situation.pods, situation.templates)
    match record.stage:
        case Stage.RUNNING:
            return _in_service(situation)
        case Stage.STARTING if old and not record.pins:
            # Whatever keeps them from coming up, what the spec says now may mend it.
            return Discard(frozenset(old))
        case Stage.STARTING | Stage.STALLED if old and (record.held or record.stage is Stage.STALLED):
            return Replace(f"the spec has another image or other settings for {', '.join(old)}")
        case _:
            return None


def is_due(situation: Situation) -> bool:
    """Whether a cell in service is to be replaced now, so that nothing else is to begin in it."""
    cause = cause_of(situation)
    running = situation.record is not None and situation.record.stage is Stage.RUNNING
    return running and cause is not None and (cause.urgent or (situation.turn and situation.storage_ok))


def _in_service(situation: Situation) -> Move:
    cause = cause_of(situation)
    if cause is None or not is_due(situation):
        return None
    if situation.failed >= (URGENT_TRIES if cause.urgent else TRIES):
        return Replace(cause.reason)
    return Take(cause.reason) if situation.free else None


def yields(record: CellRecord | None, pods: Mapping[str, PodState], cordoned: Collection[str]) -> bool:
    """Whether a cell's pods are for who drains their node: nothing that they do counts, and nobody moves them first.

    kubectl drain asks for an eviction that was refused every five seconds, by the pod's name, for ever where another
    pod has that name by then (kubernetes issue 138229). So it has to be let through while the old one is there,
    whatever the cell is replaced for."""
    return (
        record is not None
        and _stands_idle(record)
        and any(pod.node in cordoned and pod.grace is None for pod in pods.values())
    )


def left_to_the_drain(wanted: float, evictable: float | None) -> bool:
    """Whether a pod on a node that is drained, of a cell that yields, is still left to who drains it. `wanted`: for
    how many seconds its end has been; `evictable`: for how many the budget lets it through, None where that is not
    known to be written."""
    if evictable is None:
        return wanted < BUDGET_SECONDS
    return min(wanted, evictable) < EVICTION_SECONDS


def _stands_idle(record: CellRecord) -> bool:
    """Whether its pods are about to go, wait for people, or have begun nothing yet."""
    match record.stage:
        case Stage.REPLACING | Stage.STALLED:
            return True
        case Stage.STARTING:
            return bool(record.held) or not record.pins
        case _:
            return False


class Standing(Enum):
    """What a cell is to sisters that are to be moved. SERVES: it works, and may be moved itself; COMES: it is on its
    way into service, or did not come up again when it was replaced on purpose; WAITS: for people, however long that
    takes."""

    SERVES = auto()
    COMES = auto()
    WAITS = auto()


def standing_of(record: CellRecord | None) -> Standing:
    """Of a cell with this record."""
    match record:
        case CellRecord(stage=Stage.RUNNING):
            return Standing.SERVES
        case CellRecord(stage=Stage.STALLED, asked_for=False):
            return Standing.WAITS
        case CellRecord(stage=Stage.STARTING, held=held) if held:
            return Standing.WAITS
        case _:
            return Standing.COMES


@dataclass(frozen=True)
class Turn:
    """`cell` may be moved now, of those that can wait; None where none may. `after`: cells that others have to wait
    for."""

    cell: int | None = None
    after: tuple[int, ...] = ()


def whose_turn(cells: Mapping[int, Standing], causes: Mapping[int, Cause | None], begun: Collection[int]) -> Turn:
    """Which cell is moved next. `causes`: why each is to be; `begun`: those whose last checkpoint is being taken."""
    wishing = {i: cause for i, cause in causes.items() if cause is not None and cells[i] is Standing.SERVES}
    patient = {i for i, cause in wishing.items() if not cause.urgent}  # the others wait for nobody
    coming = tuple(i for i, standing in sorted(cells.items()) if standing is Standing.COMES)
    if not wishing or coming:
        return Turn(after=coming if patient else ())
    waiting = tuple(i for i, standing in sorted(cells.items()) if standing is Standing.WAITS)
    # Nobody knows that the spec is good while a cell that has it, or is about to, is not in service.
    held_up = {i for i in patient if waiting and not wishing[i].unchanged}
    free = wishing.keys() - held_up
    return Turn(min(free & set(begun) if begun else free, default=None), waiting if held_up else ())
