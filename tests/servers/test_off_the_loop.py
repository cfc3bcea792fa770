"""What takes long while a cell is paused is not done on the event loop: it answers its coordinator meanwhile."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import cell
from gym_servers.engine.rows import counter_rows
from gym_servers.participants import records

PATIENCE_SECONDS = 10.0  # real time: a loop that does the encoding itself cannot do what the encoding waits for


@pytest.mark.parametrize("name", ["env", "agent", "counter", "collection"])
async def test_a_participant_answers_its_coordinator_while_its_records_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It renews its lease and says how it is; what was captured is what is encoded, whatever becomes of it then."""
    async with cell(tmp_path, counter_rows(3, 2)) as rig:
        await rig.until(lambda: rig.effects() >= 3)
        original, loop = records.to_bytes, threading.get_ident()
        encoding, answered, here = threading.Event(), threading.Event(), list[bool]()

        def slow(record: dict[str, Any]) -> bytes:
            here.append(threading.get_ident() == loop)
            encoding.set()
            assert answered.wait(PATIENCE_SECONDS), "nothing else was done meanwhile"
            return original(record)

        plane = rig.processes_by_name[name].plane
        assert plane is not None
        exporting = plane.participant.export

        async def exported(scope: Any) -> dict[str, bytes]:
            monkeypatch.setattr(records, "to_bytes", slow)
            found = await exporting(scope)
            monkeypatch.setattr(records, "to_bytes", original)
            return found

        async def ask() -> None:
            await asyncio.to_thread(encoding.wait, PATIENCE_SECONDS)
            assert (await rig.client(name).status()).phase == "prepared"
            answered.set()

        monkeypatch.setattr(plane.participant, "export", exported)
        asking = asyncio.create_task(ask())
        outcome = await rig.checkpoint("one")
        await asking
        assert set(here) == {False}
        assert len(outcome.publication.episodes) == 3
        rig.kill("policy")
        await rig.until(rig.complete)
        assert rig.account(3).problems == []
