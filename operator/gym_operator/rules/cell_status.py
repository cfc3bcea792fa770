"""Where one cell stands, and its part of the stack's status."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gym_operator.api.conditions import ConditionReason, ConditionStatus
from gym_operator.api.objects import clip, format_time
from gym_operator.api.stack import (
    CellPhase,
    CellStatus,
    CollectionProgress,
    RestartedRollout,
    StackParticipant,
    StackPhase,
)
from gym_operator.api.stack import Drain as DrainStatus
from gym_operator.api.stack import Recovery as RecoveryStatus
from gym_operator.rules.cell_record import how_to_go_on, stopped_by
from gym_operator.rules.continuations import continuation_of
from gym_operator.rules.drain import Drain
from gym_operator.rules.observed import CellSeen, Observed
from gym_operator.rules.pod_state import pod_uid
from gym_servers.coordination.record import Hold, Recovery, Restarted, Stage
from gym_servers.protocol.messages import ProblemReason
from gym_servers.stack.spec import Participant

_HELD: Final = {
    Hold.CODE: (
        ConditionReason.CODE_MISMATCH,
        "put the servers back into the spec that wrote it, or set spec.recovery.codeMismatch to Accept: what the new "
        "ones do not take starts over then",
    ),
    Hold.POLICY: (
        ConditionReason.RECOVERY_HELD,
        "spec.recovery.policy is Manual: set it to Restore or Restart, or apply a GymRestore",
    ),
}
"""What a cell that is held is waiting for: in a word, and what helps."""


@dataclass(frozen=True)
class Verdict:
    """Where something stands, in the words of its phases and of Ready; `phase` is the one of a stack that has no
    other cell."""

    phase: StackPhase
    cell: CellPhase
    ready: ConditionStatus
    reason: str
    message: str


def common_verdict(seen: Observed) -> Verdict | None:
    """What holds for the stack with all its cells, whatever they do; None where they are to be asked."""
    if seen.problem is not None:
        return Verdict("Failed", "Failed", "False", seen.problem.reason, seen.problem.message)
    if seen.suspended:
        return Verdict("Suspended", "Suspended", "False", "Suspended", "spec.suspend is set")
    return None


def cell_verdict(before: CellStatus | None, cell: CellSeen, seen: Observed) -> Verdict:
    """Where a cell stands."""
    if (common := common_verdict(seen)) is not None:
        return common
    record = cell.record
    if not seen.checkpoints_enabled:
        return _plain(cell, seen)
    if (checkpoint := stopped_by(record)) is not None:
        why = how_to_go_on(checkpoint)
        return Verdict("Stopped", "Stopped", "False", ConditionReason.STOPPED_BY_CHECKPOINT, why)
    if record is None:
        waits = "; ".join(each for each in (cell.waits, seen.waits) if each)
        return Verdict("Pending", "Pending", "False", "PodsStarting", waits or "the servers are being created")
    last = record.recoveries[-1] if record.recoveries else None
    if record.held:
        held, what_helps = _HELD[record.held_for]
        return Verdict("Failed", "Failed", "False", held, f"{record.held}; {what_helps}")
    if record.stage is Stage.STALLED:
        why = f"; the last began because {last.reason}" if last else ""
        return Verdict(
            "Failed",
            "Failed",
            "False",
            "BackoffLimitExceeded",
            f"{record.failures - 1} recoveries in a row brought no progress{why}. Look at the servers' logs, then "
            "raise spec.recovery.backoffLimit, or suspend the stack and turn it on again",
        )
    if last is not None and last.seconds is None:
        if record.stage is Stage.STARTING and record.restore is not None:
            return Verdict("Recovering", "Restoring", "False", "Restoring", _waiting(cell, seen, last.reason))
        begun = ConditionReason.GOING_ON if last.planned else ConditionReason.PARTICIPANT_DIED
        return Verdict("Recovering", "Recovering", "False", begun, _waiting(cell, seen, last.reason))
    if record.stage is not Stage.RUNNING:
        message = _waiting(cell, seen, "the servers are starting")
        return Verdict("Starting", "Starting", "False", "PodsStarting", message)
    for reason, message in problems(cell, seen):
        return Verdict("Running", "Running", "False", reason, message)
    progress = cell_progress(before, cell, seen)
    if progress is not None and progress.complete:
        message = f"all {progress.expected} rollouts have their row"
        return Verdict("Completed", "Running", "True", "CollectionComplete", message)
    return Verdict("Running", "Running", "True", "Running", "all servers are in service")


def cell_status(before: CellStatus | None, cell: CellSeen, verdict: Verdict, seen: Observed) -> CellStatus:
    """The cell's part of the status, without its record: who writes the status adds it."""
    record = cell.record
    return CellStatus(
        index=cell.index,
        phase=_going(cell) if cell.stopping else verdict.cell,
        attempt=record.attempt if record else 0,
        participants=tuple(_participant(each, cell) for each in seen.participants),
        collection=cell_progress(before, cell, seen),
        drain=_drain(cell.drain) if cell.drain is not None else None,
        last_checkpoint=seen.last_of.get(cell.index, before.last_checkpoint if before else None),
        recoveries=tuple(_recovery(each) for each in record.recoveries) if record else (),
        continuation=continuation_of(
            cell.continuation, before.continuation if before else None, record.attempt if record else 0
        ),
        restarted=tuple(_restarted(each) for each in record.restarted) if record else (),
    )


def stopped(before: CellStatus, seen: Observed) -> CellStatus:
    """The part of a cell that was taken away. What it would continue from, were it to come back, stays."""
    last = seen.last_of.get(before.index, before.last_checkpoint)
    update = {"phase": "Stopped", "participants": (), "drain": None, "last_checkpoint": last}
    return before.model_copy(update=update)


def cell_progress(before: CellStatus | None, cell: CellSeen, seen: Observed) -> CollectionProgress | None:
    """The driver's counters; what it said last while it does not answer."""
    for each in seen.participants:
        if each.kind == "collection" and (status := cell.statuses.get(each.name)) is not None and status.progress:
            counts = status.progress
            return CollectionProgress(
                expected=counts.get("expected", 0),
                rows=counts.get("rows", 0),
                failed=counts.get("failed", 0),
                complete=bool(counts.get("complete", 0)),
            )
    return before.collection if before is not None else None


def problems(cell: CellSeen, seen: Observed) -> list[tuple[str, str]]:
    """What keeps participants from their work: (reason, message)."""
    return [
        (_reason(status.problem_reason), f"{name}: {status.problem}")
        for name, status in sorted(cell.statuses.items())
        if status.problem
    ]


def _reason(said: str) -> str:
    """A word of ours, whatever a participant says: conditions take no other."""
    return said if said in set(ProblemReason) else ProblemReason.SERVER_PROBLEM


def _plain(cell: CellSeen, seen: Observed) -> Verdict:
    """Without checkpoints nobody coordinates: the pods' own readiness is all there is."""
    ready = {server for server, pod in cell.pods.items() if pod.ready}
    missing = ", ".join(each.name for each in seen.participants if each.name not in ready)
    if not missing:
        return Verdict("Running", "Running", "True", "Running", "all servers are ready")
    return Verdict("Starting", "Starting", "False", "PodsStarting", _waiting(cell, seen, f"not ready: {missing}"))


def _waiting(cell: CellSeen, seen: Observed, what: str) -> str:
    """What is waited for, with what the cluster says about pods that do not come up."""
    stuck = [
        f"{each.name}: {pod.detail}"
        for each in seen.participants
        if (pod := cell.pods.get(each.name)) is not None and pod.detail not in ("", "deleted", "pending")
    ]
    storage = [seen.storage.message] if seen.storage is not None and seen.storage.ok is False else []
    waits = [each for each in (cell.waits, seen.waits) if each]
    return clip("; ".join([what, *waits, *storage, *stuck]))


def _participant(participant: Participant, cell: CellSeen) -> StackParticipant:
    pod = cell.pods.get(participant.name)
    status = cell.statuses.get(participant.name)
    pin = cell.record.pins.get(participant.name) if cell.record else None
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


def _going(cell: CellSeen) -> CellPhase:
    return "Draining" if cell.drain is not None and not cell.drain.over else "Stopping"


def _drain(drain: Drain) -> DrainStatus:
    return DrainStatus(started_at=format_time(drain.since), until=format_time(drain.until), running=drain.running)


def _recovery(recovery: Recovery) -> RecoveryStatus:
    return RecoveryStatus(
        attempt=recovery.attempt,
        checkpoint=recovery.checkpoint.checkpoint_id if recovery.checkpoint else None,
        reason=recovery.reason[:128],
        started_at=format_time(recovery.started_at),
        seconds=recovery.seconds,
    )


def _restarted(one: Restarted) -> RestartedRollout:
    return RestartedRollout(
        rollout=one.rollout,
        attempt=one.attempt,
        checkpoints=one.times,
        participant=one.participant,
        where=one.where,
        age_seconds=one.age_seconds,
        time=format_time(one.at),
    )
