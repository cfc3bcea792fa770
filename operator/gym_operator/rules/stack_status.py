"""The status of a stack, from one look at everything that belongs to it: its cells, and what they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gym_operator.api.conditions import Condition, ConditionReason, ConditionStatus, ConditionType
from gym_operator.api.driver import RestoredCheckpoint
from gym_operator.api.objects import clip
from gym_operator.api.stack import CellStatus, CollectionProgress, LastCheckpoint, StackPhase, StackStatus
from gym_operator.rules import cell_status as cells
from gym_operator.rules.cell_record import stopped_by
from gym_operator.rules.cell_status import Verdict
from gym_operator.rules.conditions import put
from gym_operator.rules.continuations import restored_of
from gym_operator.rules.engine_state import Told, engine_told, with_engine
from gym_operator.rules.observed import CellSeen, Observed
from gym_operator.rules.rollout_status import roll_out
from gym_servers.coordination.record import Recovery

_URGENCY: Final[Mapping[StackPhase, int]] = {"Failed": 0, "Recovering": 1, "Pending": 2, "Starting": 3, "Running": 4}
"""Which of several cells that are not ready speaks for the stack: the one that needs people first."""


def stack_status(before: StackStatus, seen: Observed, now: float) -> StackStatus:
    """The status to write. The cells' records are not part of it: who writes the status adds them."""
    known = {cell.index: cell for cell in before.cells}
    # Where the spec was never readable, nobody knows which cells there are to be.
    parts = {index: cells.stopped(cell, seen) if seen.cells else cell for index, cell in known.items()}
    verdicts = {}
    for cell in seen.cells:
        verdict = verdicts[cell.index] = cells.cell_verdict(known.get(cell.index), cell, seen)
        parts[cell.index] = cells.cell_status(known.get(cell.index), cell, verdict, seen)
    staying = [cell for cell in seen.cells if not cell.stopping]
    summary = _summary([verdicts[cell.index] for cell in staying], staying)
    verdict = cells.common_verdict(seen) or with_engine(summary, seen.engine)
    conditions = before.conditions
    for type, (value, reason, message) in _conditions(seen, verdict, verdicts).items():
        conditions = put(conditions, type, value, reason, message, seen.generation, now)
    return StackStatus(
        observed_generation=seen.generation,
        phase=verdict.phase,
        attempt=max((cell.attempt for cell in parts.values()), default=0),
        stopped_by=_stopped_by(staying),
        last_checkpoint=_last([parts[cell.index] for cell in staying]) if staying else before.last_checkpoint,
        restored=_restored(before, staying, parts),
        collection=_total([parts[cell.index].collection for cell in seen.cells]),
        cells=tuple(parts[index] for index in sorted(parts)),
        conditions=_in_use(conditions, seen),
    )


def differs_in_progress_only(one: StackStatus, other: StackStatus) -> bool:
    """Whether nothing but counters of rollouts changed: that can wait a moment to be written."""

    def without(status: StackStatus) -> StackStatus:
        def bare(cell: CellStatus) -> CellStatus:
            return cell.model_copy(update={"collection": None, "drain": None, "record": None})

        return status.model_copy(update={"cells": tuple(bare(cell) for cell in status.cells), "collection": None})

    return without(one) == without(other)


def warnings(seen: Observed) -> list[tuple[str, str]]:
    """What somebody has to mend: (reason, message), for events."""
    found = [(seen.problem.reason.value, seen.problem.message)] if seen.problem is not None else []
    if seen.storage is not None and seen.storage.ok is False:
        found.append((seen.storage.reason.value, seen.storage.message))
    _, reason, message = roll_out(seen)
    if reason == ConditionReason.PODS_NOT_STARTING:
        found.append((reason, message))
    for cell in seen.cells:
        found += [(reason, f"{seen.name_of(cell)}{message}") for reason, message in cells.problems(cell, seen)]
    return found


def _last(parts: Sequence[CellStatus]) -> LastCheckpoint | None:
    """What the stack as a whole would continue from: the oldest of what its cells would; None where one has
    nothing."""
    found = [part.last_checkpoint for part in parts if part.last_checkpoint is not None]
    if len(found) < len(parts):
        return None
    oldest = min(found, key=lambda last: last.time)
    return oldest if len(parts) == 1 else oldest.model_copy(update={"uri": None, "digest": None})


def _restored(
    before: StackStatus, cells: Sequence[CellSeen], parts: Mapping[int, CellStatus]
) -> RestoredCheckpoint | None:
    """What came with the checkpoint of the last recovery that is done; as it was written, where an operator before
    this one has seen it."""
    done = [
        (cell.record.recoveries[-1].started_at, cell.index, cell)
        for cell in cells
        if cell.record is not None and cell.record.recoveries and parts[cell.index].continuation is not None
    ]
    if not done:
        return None
    _, index, newest = max(done, key=lambda each: each[:2])
    return restored_of(newest.continuation, before.restored, parts[index].continuation)


def _stopped_by(cells: Sequence[CellSeen]) -> str | None:
    """The checkpoint that stopped the stack: all of its cells."""
    found = [stopped_by(cell.record) for cell in cells]
    return found[0] if found and None not in found else None


def _total(counts: Sequence[CollectionProgress | None]) -> CollectionProgress | None:
    """What the drivers of all cells have done together; None where there is no driver."""
    known = [each for each in counts if each is not None]
    if not known:
        return None
    return CollectionProgress(
        expected=sum(each.expected for each in known),
        rows=sum(each.rows for each in known),
        failed=sum(each.failed for each in known),
        complete=len(known) == len(counts) and all(each.complete for each in known),
    )


def _summary(verdicts: Sequence[Verdict], among: Sequence[CellSeen]) -> Verdict:
    """What the cells come to: the stack is ready when all of them are; else the most urgent one speaks for it."""
    if len(verdicts) == 1:
        return verdicts[0]
    if not verdicts:
        return Verdict("Pending", "Pending", "False", "PodsStarting", "the servers are being created")
    troubled = [
        (_URGENCY.get(verdict.phase, len(_URGENCY)), cell.index, verdict)
        for cell, verdict in zip(among, verdicts, strict=True)
        if verdict.ready != "True"
    ]
    if troubled:
        _, index, worst = min(troubled, key=lambda each: each[:2])
        others = sorted(each for _, each, _ in troubled if each != index)
        also = f"; not ready either: cell {', '.join(map(str, others))}" if others else ""
        return Verdict(worst.phase, worst.cell, "False", worst.reason, clip(f"cell {index}: {worst.message}{also}"))
    if all(verdict.phase == "Completed" for verdict in verdicts):
        return Verdict(
            "Completed", "Running", "True", "CollectionComplete", "all rollouts of all cells have their row"
        )
    return Verdict(
        "Running", "Running", "True", "Running", f"all servers of all {len(verdicts)} cells are in service"
    )


def _conditions(seen: Observed, verdict: Verdict, verdicts: Mapping[int, Verdict]) -> dict[ConditionType, Told]:
    found: dict[ConditionType, Told] = {ConditionType.READY: (verdict.ready, verdict.reason, verdict.message)}
    stalled = verdict.phase == "Failed"
    found[ConditionType.STALLED] = (
        ("True", verdict.reason, verdict.message) if stalled else ("False", ConditionReason.RUNNING, "")
    )
    found[ConditionType.RECOVERING] = _recovering(seen, verdicts)
    found[ConditionType.UP_TO_DATE] = roll_out(seen)
    if seen.checkpoints_enabled:
        found[ConditionType.CHECKPOINTING] = (
            ("True", ConditionReason.CHECKPOINT_RUNNING, f"checkpoint {seen.checkpoint} is being taken")
            if seen.checkpoint
            else ("False", ConditionReason.IDLE, "")
        )
    if seen.storage is not None:
        value: ConditionStatus = "Unknown" if seen.storage.ok is None else "True" if seen.storage.ok else "False"
        found[ConditionType.STORAGE_READY] = (value, seen.storage.reason, seen.storage.message)
    if seen.engine is not None:
        found[ConditionType.ENGINE_READY] = engine_told(seen.engine)
    return found


def _recovering(seen: Observed, verdicts: Mapping[int, Verdict]) -> Told:
    """Which cell is being recovered; where none is, what the last recovery of all came to."""
    newest: tuple[CellSeen, Recovery] | None = None
    for cell in seen.cells:
        if cell.record is None or not cell.record.recoveries:
            continue
        last, verdict = cell.record.recoveries[-1], verdicts[cell.index]
        if last.seconds is None and verdict.phase == "Recovering":
            return ("True", verdict.reason, f"{seen.name_of(cell)}{last.reason}")
        if cell.record.held:
            return ("False", verdict.reason, f"{seen.name_of(cell)}{cell.record.held}")
        if newest is None or last.started_at > newest[1].started_at:
            newest = (cell, last)
    if newest is None:
        return ("False", ConditionReason.RUNNING, "nothing has died")
    cell, last = newest
    source = f"checkpoint {last.checkpoint.name}" if last.checkpoint else "the input"
    reason = ConditionReason.RECOVERED if last.checkpoint else ConditionReason.RESTARTED_FROM_INPUT
    told = "; ".join((f"attempt {last.attempt} continues from {source}", *last.passed_over))
    return ("False", reason, f"{seen.name_of(cell)}{told}")


def _in_use(conditions: Sequence[Condition], seen: Observed) -> tuple[Condition, ...]:
    """Without those that say nothing about the stack as it is now."""
    gone: set[str] = set()
    if not seen.checkpoints_enabled:
        gone.add(ConditionType.CHECKPOINTING)
    if seen.storage is None:
        gone.add(ConditionType.STORAGE_READY)
    if seen.engine is None:
        gone.add(ConditionType.ENGINE_READY)
    return tuple(each for each in conditions if each.type not in gone)
