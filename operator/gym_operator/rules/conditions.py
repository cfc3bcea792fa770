"""Conditions whose reason is somebody else's word, such as the one a checkpoint failed with."""

from __future__ import annotations

import re
from collections.abc import Sequence

from gym_operator.api.conditions import Condition, ConditionReason, ConditionStatus, ConditionType, set_condition


def put(
    conditions: Sequence[Condition],
    type: ConditionType,
    status: ConditionStatus,
    reason: str,
    message: str,
    generation: int,
    now: float,
) -> tuple[Condition, ...]:
    """As `set_condition`, with any CamelCase word as the reason."""
    word = reason if re.fullmatch(r"[A-Z][A-Za-z0-9]{0,127}", reason) else "Unknown"
    new = set_condition(conditions, type, status, ConditionReason.IDLE, message, generation, now)
    return tuple(each.model_copy(update={"reason": word}) if each.type == type else each for each in new)
