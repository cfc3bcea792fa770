"""Whether a stack's spec can be worked with, beyond what its schema says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gym_operator.api.conditions import ConditionReason
from gym_operator.api.stack import GymStack
from gym_servers.registry import check_server
from gym_servers.stack.settings import SettingsError
from gym_servers.stack.spec import SpecError


@dataclass(frozen=True)
class Problem:
    """What keeps a stack from its work until somebody changes something; the message says what to change."""

    reason: ConditionReason
    message: str


def check_stack(body: Mapping[str, Any]) -> GymStack | Problem:
    """The stack, or what is wrong with it."""
    try:
        stack = GymStack.parse(body)
    except SpecError as error:
        return Problem(ConditionReason.INVALID_SPEC, str(error))
    wrong = []
    for server in stack.spec.servers:
        try:
            check_server(server.kind, server.server)
        except SettingsError as error:
            wrong.append(f"server {server.name}: {error}")
    return Problem(ConditionReason.INVALID_SPEC, "; ".join(wrong)) if wrong else stack
