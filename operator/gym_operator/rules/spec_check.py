"""Whether a stack's spec can be worked with, beyond what its schema says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gym_operator.api.conditions import ConditionReason
from gym_operator.api.stack import GymStack
from gym_operator.rules.workloads.config import settings_text
from gym_servers.registry import check_server
from gym_servers.stack.settings import SettingsError
from gym_servers.stack.spec import ServerSpec, SpecError

LARGEST_CONFIGS: Final = 960 * 1024
"""Bytes that the `config` of all servers may come to as they are given it: all settings are in one ConfigMap, which
holds 1 MiB. The rest is for what is not theirs."""


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
    if large := _too_large(stack.spec.servers):
        wrong.append(large)
    return Problem(ConditionReason.INVALID_SPEC, "; ".join(wrong)) if wrong else stack


def _too_large(servers: Sequence[ServerSpec]) -> str:
    """Which servers have more `config` than there is room for, the largest first, and what to do; empty where it
    fits."""
    sizes = {server.name: len(settings_text({"config": server.config})) for server in servers}
    total = left = sum(sizes.values())
    named = []
    for name, size in sorted(sizes.items(), key=lambda each: -each[1]):
        if left <= LARGEST_CONFIGS:
            break
        named.append(f"{name} ({size // 1024} KiB)")
        left -= size
    if not named:
        return ""
    return (
        f"the config of all servers is {total // 1024} KiB, and {LARGEST_CONFIGS // 1024} KiB fit: keep less of it "
        f"in server {', '.join(named)}, such as the name of a file in its image or in a bucket"
    )
