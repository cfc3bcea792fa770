"""The status of a stack, from one look at everything that belongs to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gym_operator.api.conditions import Condition, ConditionReason, ConditionStatus, ConditionType
from gym_operator.api.objects import clip, format_time
from gym_operator.api.stack import (
    CellPhase,
    CellStatus,
    CollectionProgress,
    LastCheckpoint,
    StackParticipant,
    StackPhase,
    StackStatus,
)
from gym_operator.api.stack import Recovery as RecoveryStatus
from gym_operator.rules.conditions import put
from gym_operator.rules.pod_state import PodState, pod_uid
from gym_operator.rules.spec_check import Problem
from gym_servers.coordination.record import CellRecord, Recovery, Stage
from gym_servers.protocol.messages import Status
from gym_servers.stack.spec import Participant

_PROBLEM_REASONS: Final = {"collection": "TasksInvalid"}
"""What a participant's problem is called; the driver has only its tasks to be unhappy with."""


@dataclass(frozen=True)
class Storage:
    """Whether the stack's storage can be used; `ok` is None where nobody has looked or there is none to look at."""

    ok: bool | None
    reason: ConditionReason
    message: str


@dataclass(frozen=True)
class Observed:
    """All that a stack's status says, as seen in one pass. `waits` is what the cell's controller waits for."""

    generation: int
    participants: Sequence[Participant]
    pods: Mapping[str, PodState] = field(default_factory=dict)
    statuses: Mapping[str, Status] = field(default_factory=dict)
    record: CellRecord | None = None
    waits: str = ""
    problem: Problem | None = None
    suspended: bool = False
    checkpoints_enabled: bool = True
    storage: Storage | None = None
    checkpoint: str | None = None
    last_checkpoint: LastCheckpoint | None = None


@dataclass(frozen=True)
class _Verdict:
    """Where the stack stands, in the words of its phases and of Ready."""

    phase: StackPhase
    cell: CellPhase
    ready: ConditionStatus
    reason: str
    message: str


def stack_status(before: StackStatus, seen: Observed, now: float) -> StackStatus:
    """The status to write. The cell's record is not part of it: who writes the status adds it."""
    progress = _progress(before, seen)
    verdict = _verdict(seen, progress)
    attempt = seen.record.attempt if seen.record else 0
    cell = CellStatus(
        index=0,
        phase=verdict.cell,
        attempt=attempt,
        participants=tuple(_participant(each, seen) for each in seen.participants),
        collection=progress,
        recoveries=tuple(_recovery(each) for each in seen.record.recoveries) if seen.record else (),
    )
    conditions = before.conditions
    for type, (value, reason, message) in _conditions(seen, verdict).items():
        conditions = put(conditions, type, value, reason, message, seen.generation, now)
    return StackStatus(
        observed_generation=seen.generation,
        phase=verdict.phase,
        attempt=attempt,
        last_checkpoint=seen.last_checkpoint or before.last_checkpoint,
        cells=(cell,),
        conditions=_in_use(conditions, seen),
    )


def differs_in_progress_only(one: StackStatus, other: StackStatus) -> bool:
    """Whether nothing but the driver's counters changed: that can wait a moment to be written."""

    def without(status: StackStatus) -> StackStatus:
        cells = tuple(cell.model_copy(update={"collection": None, "record": None}) for cell in status.cells)
        return status.model_copy(update={"cells": cells})

    return without(one) == without(other)


def warnings(seen: Observed) -> list[tuple[str, str]]:
    """What somebody has to mend: (reason, message), for events."""
    found = [(seen.problem.reason.value, seen.problem.message)] if seen.problem is not None else []
    if seen.storage is not None and seen.storage.ok is False:
        found.append((seen.storage.reason.value, seen.storage.message))
    return [*found, *problems(seen)]


def problems(seen: Observed) -> list[tuple[str, str]]:
    """What keeps participants from their work: (reason, message)."""
    kinds = {each.name: each.kind for each in seen.participants}
    return [
        (_PROBLEM_REASONS.get(kinds.get(name, ""), "ServerProblem"), f"{name}: {status.problem}")
        for name, status in sorted(seen.statuses.items())
        if status.problem
    ]


def _verdict(seen: Observed, progress: CollectionProgress | None) -> _Verdict:
    if seen.problem is not None:
        return _Verdict("Failed", "Failed", "False", seen.problem.reason, seen.problem.message)
    if seen.suspended:
        return _Verdict("Suspended", "Suspended", "False", "Suspended", "spec.suspend is set")
    record = seen.record
    if not seen.checkpoints_enabled:
        return _plain(seen)
    if record is None:
        return _Verdict("Pending", "Pending", "False", "PodsStarting", seen.waits or "the servers are being created")
    last = record.recoveries[-1] if record.recoveries else None
    if record.stage is Stage.STALLED:
        why = f"; the last began because {last.reason}" if last else ""
        return _Verdict(
            "Failed",
            "Failed",
            "False",
            "BackoffLimitExceeded",
            f"{record.failures - 1} recoveries in a row brought no progress{why}. Look at the servers' logs, then "
            "raise spec.recovery.backoffLimit, or suspend the stack and turn it on again",
        )
    if last is not None and last.seconds is None:
        if record.stage is Stage.STARTING and record.restore is not None:
            return _Verdict("Recovering", "Restoring", "False", "Restoring", _waiting(seen, last.reason))
        return _Verdict("Recovering", "Recovering", "False", "ParticipantDied", _waiting(seen, last.reason))
    if record.stage is not Stage.RUNNING:
        return _Verdict("Starting", "Starting", "False", "PodsStarting", _waiting(seen, "the servers are starting"))
    for reason, message in problems(seen):
        return _Verdict("Running", "Running", "False", reason, message)
    if progress is not None and progress.complete:
        message = f"all {progress.expected} rollouts have their row"
        return _Verdict("Completed", "Running", "True", "CollectionComplete", message)
    return _Verdict("Running", "Running", "True", "Running", "all servers are in service")


def _plain(seen: Observed) -> _Verdict:
    """Without checkpoints nobody coordinates: the pods' own readiness is all there is."""
    ready = {server for server, pod in seen.pods.items() if pod.ready}
    missing = ", ".join(each.name for each in seen.participants if each.name not in ready)
    if not missing:
        return _Verdict("Running", "Running", "True", "Running", "all servers are ready")
    return _Verdict("Starting", "Starting", "False", "PodsStarting", _waiting(seen, f"not ready: {missing}"))


def _waiting(seen: Observed, what: str) -> str:
    """What is waited for, with what the cluster says about pods that do not come up."""
    stuck = [
        f"{each.name}: {pod.detail}"
        for each in seen.participants
        if (pod := seen.pods.get(each.name)) is not None and pod.detail not in ("", "deleted", "pending")
    ]
    storage = [seen.storage.message] if seen.storage is not None and seen.storage.ok is False else []
    return clip("; ".join([what, *([seen.waits] if seen.waits else []), *storage, *stuck]))


def _conditions(seen: Observed, verdict: _Verdict) -> dict[ConditionType, tuple[ConditionStatus, str, str]]:
    record = seen.record
    found: dict[ConditionType, tuple[ConditionStatus, str, str]] = {
        ConditionType.READY: (verdict.ready, verdict.reason, verdict.message)
    }
    stalled = verdict.phase == "Failed"
    found[ConditionType.STALLED] = (
        ("True", verdict.reason, verdict.message) if stalled else ("False", ConditionReason.RUNNING, "")
    )
    last = record.recoveries[-1] if record is not None and record.recoveries else None
    if last is None:
        found[ConditionType.RECOVERING] = ("False", ConditionReason.RUNNING, "nothing has died")
    elif last.seconds is None and verdict.phase == "Recovering":
        found[ConditionType.RECOVERING] = ("True", verdict.reason, last.reason)
    else:
        source = f"checkpoint {last.checkpoint.name}" if last.checkpoint else "the input"
        reason = ConditionReason.RECOVERED if last.checkpoint else ConditionReason.RESTARTED_FROM_INPUT
        text = f"attempt {last.attempt} continues from {source}"
        found[ConditionType.RECOVERING] = ("False", reason, text)
    if seen.checkpoints_enabled:
        found[ConditionType.CHECKPOINTING] = (
            ("True", ConditionReason.CHECKPOINT_RUNNING, f"checkpoint {seen.checkpoint} is being taken")
            if seen.checkpoint
            else ("False", ConditionReason.IDLE, "")
        )
    if seen.storage is not None:
        value: ConditionStatus = "Unknown" if seen.storage.ok is None else "True" if seen.storage.ok else "False"
        found[ConditionType.STORAGE_READY] = (value, seen.storage.reason, seen.storage.message)
    return found


def _in_use(conditions: Sequence[Condition], seen: Observed) -> tuple[Condition, ...]:
    """Without those that say nothing about the stack as it is now."""
    gone: set[str] = set()
    if not seen.checkpoints_enabled:
        gone.add(ConditionType.CHECKPOINTING)
    if seen.storage is None:
        gone.add(ConditionType.STORAGE_READY)
    return tuple(each for each in conditions if each.type not in gone)


def _participant(participant: Participant, seen: Observed) -> StackParticipant:
    pod = seen.pods.get(participant.name)
    status = seen.statuses.get(participant.name)
    pin = seen.record.pins.get(participant.name) if seen.record else None
    # The pinned process is what a person looks for; the pod alone is all there is before anything was pinned.
    uid = pod_uid(pin.incarnation) if pin else pod.uid if pod else None
    return StackParticipant(
        name=participant.name,
        kind=participant.kind,
        pod=pod.name if pod else None,
        pod_uid=uid,
        session=status.session if status else pin.session if pin else None,
        phase=status.phase if status else None,
    )


def _progress(before: StackStatus, seen: Observed) -> CollectionProgress | None:
    """The driver's counters; what it said last while it does not answer."""
    for each in seen.participants:
        if each.kind == "collection" and (status := seen.statuses.get(each.name)) is not None and status.progress:
            counts = status.progress
            return CollectionProgress(
                expected=counts.get("expected", 0),
                rows=counts.get("rows", 0),
                failed=counts.get("failed", 0),
                complete=bool(counts.get("complete", 0)),
            )
    return before.cells[0].collection if before.cells else None


def _recovery(recovery: Recovery) -> RecoveryStatus:
    return RecoveryStatus(
        attempt=recovery.attempt,
        checkpoint=recovery.checkpoint.checkpoint_id if recovery.checkpoint else None,
        reason=recovery.reason[:128],
        started_at=format_time(recovery.started_at),
        seconds=recovery.seconds,
    )
