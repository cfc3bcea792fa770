"""What the rig itself must not cost: hundreds of tests stand on it, and minutes of virtual time are thousands of its
looks."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gym_rig import cell
from gym_rig.operated import OperatedRig, operated
from gym_servers.engine.rows import counter_rows


async def served(folder: Path) -> None:
    async with operated(folder, counter_rows(1, 1)) as rig:
        await rig.until(rig.complete, "complete")


async def test_what_processes_read_is_written_when_it_changes_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    write_text = Path.write_text

    def counted(self: Path, text: str, *arguments: Any, **options: Any) -> int:
        if self == tmp_path / "cells":
            written.append(text)
        return write_text(self, text, *arguments, **options)

    async def told(rig: OperatedRig, text: str) -> None:
        await rig.until(lambda: (tmp_path / "cells").read_text() == text, "told")

    monkeypatch.setattr(Path, "write_text", counted)
    async with operated(tmp_path, counter_rows(1, 1)) as rig:
        await rig.until(rig.all_in_service, "in service")
        await asyncio.sleep(30)
        rig.change(cells=2)
        await told(rig, "2\n")
        await asyncio.sleep(30)
        rig.change(cells=1)
        await told(rig, "1\n")
    assert written[0] == "1\n"
    assert len(written) < 6
    assert all(one != next for one, next in pairwise(written))


async def test_applications_of_a_stack_that_has_ended_serve_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making them costs more than a short test does otherwise."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    await served(first)
    monkeypatch.setattr(cell, "control_app", lambda *_: pytest.fail("one more was made"))
    await served(second)
