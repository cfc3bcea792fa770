"""The phases of a participant as a Mermaid diagram, drawn from the table; `docs/protocol.md` contains it."""

from __future__ import annotations

from gym_servers.protocol.phases import TABLE


def mermaid() -> str:
    """The state diagram, one line per transition, in the table's order."""
    lines = [f"    {phase} --> {target}: {verb}" for (phase, verb), target in TABLE.items()]
    return "\n".join(["stateDiagram-v2", "    [*] --> starting", *lines])
