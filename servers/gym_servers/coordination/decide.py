"""What to do about a cell next, from its record and one look at its processes. Pure; any step can be lost, and the
next look decides again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gym_servers.coordination.record import CellRecord, Pin, Stage, Stopped
from gym_servers.protocol.messages import Status
from gym_servers.protocol.phases import Phase


@dataclass(frozen=True)
class Seen:
    """One expected participant: `incarnation` is None where it has no process, `alive` False where the process has
    ended, `status` None where its control port did not answer. `leaving`: it is about to be ended by somebody else,
    which costs a cell in service nothing until it has happened."""

    incarnation: str | None
    alive: bool
    status: Status | None = None
    detail: str = ""
    leaving: bool = False


@dataclass(frozen=True)
class Wait:
    """Nothing to do until something changes."""

    reason: str


@dataclass(frozen=True)
class End:
    """End these processes: name -> incarnation."""

    processes: Mapping[str, str]


@dataclass(frozen=True)
class Start:
    """The old processes are gone: go on to starting."""


@dataclass(frozen=True)
class Install:
    """All are fresh: restore or resume them, pinned as given."""

    pins: Mapping[str, Pin]


@dataclass(frozen=True)
class Open:
    """All were restored from one restore: resume them."""


@dataclass(frozen=True)
class Recover:
    """A new attempt of the cell: a participant died or, `planned`, a stopped cell is to go on with fresh
    processes."""

    reason: str
    planned: bool = False


@dataclass(frozen=True)
class Settle:
    """A checkpoint was left open by a coordinator that is gone."""


@dataclass(frozen=True)
class Reopen:
    """These are closed though no checkpoint is open: checkpoint id -> names."""

    names: Mapping[str, str]


@dataclass(frozen=True)
class Hold:
    """The cell stands stopped: keep these closed, under the checkpoint that stopped it."""

    names: frozenset[str]


@dataclass(frozen=True)
class GoOn:
    """A stopped cell is to go on, and all its processes are still there: resume them."""


@dataclass(frozen=True)
class Tend:
    """In service: pass on what the driver asks for."""


Step = Wait | End | Start | Install | Open | Recover | Settle | Reopen | Hold | GoOn | Tend


def next_step(record: CellRecord, seen: Mapping[str, Seen], *, busy: bool) -> Step:
    """The next step. `busy`: this coordinator is installing the cell, or taking its checkpoint, right now; then only
    a death matters."""
    match record.stage:
        case Stage.STALLED:
            return Wait("recovery was tried too often; see the conditions")
        case Stage.REPLACING:
            return _replacing(record, seen)
        case Stage.STARTING:
            return _starting(record, seen, busy)
        case Stage.RUNNING:
            return _running(record, seen, busy)
        case Stage.STOPPED:
            return _stopped(record, seen, busy)


def _replacing(record: CellRecord, seen: Mapping[str, Seen]) -> Step:
    ended = record.ended.items()
    left = {name: old for name, old in ended if name in seen and seen[name].incarnation == old}
    return End(left) if left else Start()


def _starting(record: CellRecord, seen: Mapping[str, Seen], busy: bool) -> Step:
    if (died := _died(record, seen)) is not None:
        return Recover(died)
    if leaving := _leaving(record, seen):
        return Recover(f"{leaving} is being ended", planned=True)  # what it was to restore is there all the same
    if busy:
        return Wait("the cell is being put into service")
    if record.held:
        return Wait(record.held)
    absent = sorted(name for name, one in seen.items() if one.incarnation is None or not one.alive or one.leaving)
    if absent:
        return Wait(f"waiting for {', '.join(absent)} to start")
    silent = sorted(name for name, one in seen.items() if one.status is None)
    if silent:
        return Wait(f"waiting for {', '.join(silent)} to answer")
    statuses = {name: one.status for name, one in seen.items() if one.status is not None}
    phases = {status.phase for status in statuses.values()}
    if phases == {Phase.STARTING}:
        return Install(
            {
                name: Pin(incarnation=seen[name].incarnation or "", session=status.session)
                for name, status in statuses.items()
            }
        )
    # Somebody coordinated these before. One restore may be finished; anything else is a new recovery.
    sources = {status.restored_from for status in statuses.values()}
    attempts = {status.cell_attempt for status in statuses.values()}
    finished = phases <= {Phase.RESTORED, Phase.IDLE} and len(sources) == 1 and attempts == {record.attempt}
    if record.pins and finished and (record.restore is None) == (sources == {None}):
        return Open()
    return Recover("the participants do not all come from one restore")


def _running(record: CellRecord, seen: Mapping[str, Seen], busy: bool) -> Step:
    if (died := _died(record, seen)) is not None:
        return Recover(died)
    silent = sorted(name for name, one in seen.items() if one.status is None)
    if silent:
        return Wait(f"no answer on control from {', '.join(silent)}")
    closed = {}
    for name, one in seen.items():
        assert one.status is not None
        if one.status.phase == Phase.STARTING:
            return Recover(f"{name} went back to starting")
        if one.status.phase != Phase.IDLE and one.status.checkpoint_id is not None:
            closed[name] = one.status.checkpoint_id
    if busy:
        return Wait("a checkpoint is being taken")
    if record.open is not None:
        return Settle()
    return Reopen(closed) if closed else Tend()


def _stopped(record: CellRecord, seen: Mapping[str, Seen], busy: bool) -> Step:
    """No end of a process is a death here: all that counts is in the checkpoint."""
    stopped = record.stopped
    if stopped is None or busy:
        return Wait("the cell has just been stopped")
    if stopped.replacing:
        return Recover(stopped.replacing, planned=True)
    if stopped.stays:
        return Hold(frozenset(name for name, one in seen.items() if _holds(one, stopped)))
    if _died(record, seen) is None and not _leaving(record, seen):
        silent = sorted(name for name, one in seen.items() if one.status is None)
        if silent:
            return Wait(f"no answer on control from {', '.join(silent)}")
        # Whoever's lease ended while nobody looked is at work already.
        if all(one.status and (one.status.phase == Phase.IDLE or _holds(one, stopped)) for one in seen.values()):
            return GoOn()
    return Recover(f"it was stopped by checkpoint {stopped.name}", planned=True)


def _holds(one: Seen, stopped: Stopped) -> bool:
    """Whether this process is closed by the checkpoint that stopped the cell."""
    return one.alive and one.status is not None and one.status.checkpoint_id == stopped.checkpoint_id


def _leaving(record: CellRecord, seen: Mapping[str, Seen]) -> str:
    """A pinned process that is about to be ended; empty where there is none."""
    return next((name for name in sorted(record.pins) if name in seen and seen[name].leaving), "")


def _died(record: CellRecord, seen: Mapping[str, Seen]) -> str | None:
    """Which pinned process is not there any more, and how that shows."""
    for name, pin in sorted(record.pins.items()):
        one = seen.get(name)
        if one is None:
            continue
        if one.incarnation is None:
            return f"{name} is gone"
        if one.incarnation != pin.incarnation:
            return f"{name} was replaced by another process"
        if not one.alive:
            return f"{name} has ended{f': {one.detail}' if one.detail else ''}"
        if one.status is not None and one.status.session != pin.session:
            return f"{name} was started again"
    return None
