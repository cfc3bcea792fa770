"""What the documents show is what the code does."""

from __future__ import annotations

from pathlib import Path

from gym_servers.protocol.diagram import mermaid

ROOT = Path(__file__).parents[3]


def test_the_diagram_of_the_phases_is_drawn_from_the_table() -> None:
    assert f"```mermaid\n{mermaid()}\n```" in (ROOT / "docs" / "protocol.md").read_text()
