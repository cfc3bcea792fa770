"""Whether the engine of a stack's inference block serves, and what that means for the stack."""

from __future__ import annotations

from dataclasses import replace

from gym_operator.api.conditions import ConditionReason, ConditionStatus
from gym_operator.api.objects import clip
from gym_operator.rules.cell_status import Verdict
from gym_operator.rules.observed import Engine

Told = tuple[ConditionStatus, str, str]


def engine_told(engine: Engine) -> Told:
    """The condition EngineReady: status, reason, message. One engine that serves is enough."""
    if not engine.wanted:
        return "False", ConditionReason.IDLE, "the stack has no pods now, and no engine"
    serving = sum(pod.ready for pod in engine.pods)
    count = f"{serving} of {engine.wanted} engines serve"
    if serving:
        return "True", ConditionReason.ENGINE_SERVES, count
    stuck = sorted({pod.detail for pod in engine.pods if pod.detail not in ("", "deleted", "pending")})
    words = [count, *stuck] if stuck else [f"{count}: a model is loaded before its engine does"]
    return "False", ConditionReason.ENGINE_NOT_READY, clip("; ".join(words))


def with_engine(verdict: Verdict, engine: Engine | None) -> Verdict:
    """A stack whose servers are all in service needs its engine to generate; one that is complete does not."""
    if engine is None or verdict.ready != "True" or verdict.phase == "Completed":
        return verdict
    value, reason, message = engine_told(engine)
    return verdict if value == "True" else replace(verdict, ready="False", reason=reason, message=message)
