"""Server names to code: the project's own servers by name, a user's by `package.module:Class`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from gym_servers.stack.settings import SettingsError

KNOWN: Mapping[str, frozenset[str]] = {
    "environment": frozenset({"single-agent-turn", "legacy-agent"}),
    "agent": frozenset({"simple-agent", "scratch-agent"}),
    "model": frozenset({"scripted", "vllm"}),
    "resources": frozenset({"counter", "multiple-choice", "sandbox"}),
    "collection": frozenset({"collection"}),
}
_CLASSES = {
    "simple-agent": "gym_servers.agent.simple_agent:SimpleAgent",
    "scratch-agent": "gym_servers.agent.scratch_agent:ScratchAgent",
    "counter": "gym_servers.resources.counter:CounterServer",
    "multiple-choice": "gym_servers.resources.multiple_choice:MultipleChoiceServer",
    "sandbox": "gym_servers.resources.sandbox:SandboxServer",
}
OWN_CLASSES = frozenset({"agent", "resources"})  # kinds that a user may write


def is_own_class(server: str) -> bool:
    """Whether this names a class of the user's image, and no server of ours."""
    return ":" in server


def check_server(kind: str, server: str) -> None:
    """Raise SettingsError for a name that is neither ours nor a class of the user's image."""
    if server in KNOWN[kind]:
        return
    if kind in OWN_CLASSES and is_own_class(server):
        return
    known = ", ".join(sorted(KNOWN[kind]))
    own = " or package.module:Class of your image" if kind in OWN_CLASSES else ""
    raise SettingsError(f"{server!r} is not a known {kind} server; use {known}{own}")


def load_class(server: str) -> type:
    """The class behind a server's name. Raises SettingsError."""
    target = _CLASSES.get(server, server)
    module, _, name = target.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise SettingsError(f"cannot load server {server!r}: {error}") from error
    if not isinstance(found, type):
        raise SettingsError(f"{server!r} is not a class")
    return found
