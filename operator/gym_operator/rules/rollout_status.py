"""What a stack's condition UpToDate says: whether its pods are as the spec wants them, and if not, why not."""

from __future__ import annotations

from gym_operator.api.conditions import ConditionReason, ConditionStatus
from gym_operator.api.objects import clip
from gym_operator.rules.observed import CellSeen, Observed
from gym_operator.rules.pod_state import is_hopeless
from gym_operator.rules.rollouts import Standing, standing_of


def roll_out(seen: Observed) -> tuple[ConditionStatus, str, str]:
    """Status, reason and message. Pods that do not come up are named first: they keep the other cells where they
    are."""
    if seen.problem is not None:
        return "Unknown", seen.problem.reason, "what the spec wants is not known"
    for cell in seen.cells:
        if found := _hopeless(cell):
            message = (
                f"{seen.name_of(cell)}{found}{_others(cell, seen)}: put the image or the settings in the spec right"
            )
            return "False", ConditionReason.PODS_NOT_STARTING, clip(message)
    due = [cell for cell in seen.cells if cell.cause is not None]
    if not due:
        return "True", ConditionReason.UP_TO_DATE, ""
    told = [f"{seen.name_of(cell)}{cell.cause.reason}{_trouble(cell)}" for cell in due if cell.cause is not None]
    if seen.after:
        cells = (
            f"cells {', '.join(map(str, seen.after))} have" if len(seen.after) > 1 else f"cell {seen.after[0]} has"
        )
        told.insert(0, f"{cells} to be in service first")
    return "False", ConditionReason.ROLLING_OUT, clip("; ".join(told))


def _hopeless(cell: CellSeen) -> str:
    return "; ".join(f"{server}: {pod.detail}" for server, pod in sorted(cell.pods.items()) if is_hopeless(pod))


def _others(cell: CellSeen, seen: Observed) -> str:
    """What a cell that does not come up keeps from the others."""
    if len(seen.cells) == 1:
        return ""
    if standing_of(cell.record) is Standing.WAITS:
        return "; no other cell gets another image or other settings before it is in service"
    return "; no other cell is replaced before it is in service"


def _trouble(cell: CellSeen) -> str:
    return f" (its last checkpoint failed: {cell.trouble})" if cell.trouble else ""
