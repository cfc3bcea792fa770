"""What the documents show is what the code does."""

from __future__ import annotations

from pathlib import Path

from gym_servers.capture.reasons import Reason, What
from gym_servers.protocol.diagram import mermaid

ROOT = Path(__file__).parents[3]


def test_the_diagram_of_the_phases_is_drawn_from_the_table() -> None:
    assert f"```mermaid\n{mermaid()}\n```" in (ROOT / "docs" / "protocol.md").read_text()


def test_every_word_for_what_is_counted_is_explained() -> None:
    words = (ROOT / "docs" / "protocol.md").read_text()
    assert [what for what in What if f"`{what}`" not in words] == []


def test_every_reason_by_which_calls_are_counted_is_explained() -> None:
    words = (ROOT / "docs" / "protocol.md").read_text()
    assert [reason for reason in Reason if f"(`{reason}`)" not in words] == []
