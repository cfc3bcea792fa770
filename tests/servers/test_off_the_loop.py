"""What takes long while a cell is paused is not done on the event loop: it answers its coordinator meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig, cell
from gym_servers.capture import store
from gym_servers.engine.rows import counter_rows
from gym_servers.participants import model, records
from gym_servers.participants.model import ModelParticipant

PATIENCE_SECONDS = 10.0  # real time: that long an encoding waits for the answer to somebody who asks meanwhile


class Slow:
    """Encodes as `original` does, once its process has answered somebody else."""

    def __init__(self, original: Callable[..., bytes]) -> None:
        self.original, self._loop, self._thread = original, asyncio.get_running_loop(), threading.get_ident()
        self._begun, self._answered = asyncio.Event(), threading.Event()
        self.on_the_loop: set[bool] = set()

    def __call__(self, *given: Any) -> bytes:
        on_the_loop = threading.get_ident() == self._thread
        self.on_the_loop.add(on_the_loop)
        self._loop.call_soon_threadsafe(self._begun.set)
        assert on_the_loop or self._answered.wait(PATIENCE_SECONDS), "nothing else was done meanwhile"
        return self.original(*given)

    async def asked(self, rig: Rig, name: str) -> str:
        """The phase that the process tells while it encodes."""
        await self._begun.wait()
        phase = (await rig.client(name).status()).phase
        self._answered.set()
        return phase


@pytest.mark.parametrize("name", ["env", "agent", "counter", "collection", "policy"])
async def test_a_participant_answers_its_coordinator_while_its_records_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It renews its lease and says how it is; what was captured is what is encoded, whatever becomes of it then."""
    async with cell(tmp_path, counter_rows(3, 2)) as rig:
        await rig.until(lambda: rig.effects() >= 3)
        # A policy's records are of another kind than all the others'.
        module, encode = (model, "encode") if name == "policy" else (records, "to_bytes")
        slow = Slow(getattr(module, encode))
        plane = rig.processes_by_name[name].plane
        assert plane is not None
        exporting = plane.participant.export

        async def exported(scope: Any) -> dict[str, bytes]:
            monkeypatch.setattr(module, encode, slow)
            found = await exporting(scope)
            monkeypatch.setattr(module, encode, slow.original)
            return found

        monkeypatch.setattr(plane.participant, "export", exported)
        asking = asyncio.create_task(slow.asked(rig, name))
        outcome = await rig.checkpoint("one")
        assert slow.on_the_loop == {False}
        assert await asking == "prepared"
        assert len(outcome.publication.episodes) == 3
        rig.kill("policy")
        await rig.until(rig.complete)
        assert rig.account(3).problems == []


async def test_a_policy_answers_its_coordinator_while_restored_calls_are_encoded_for_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cell(tmp_path, counter_rows(3, 2)) as rig:
        await rig.until(lambda: rig.effects() >= 3)
        await rig.checkpoint("one")
        rig.kill("policy")
        slow, installing = Slow(store.encode), ModelParticipant.install

        def installed(participant: ModelParticipant, staged: Any) -> list[str]:
            restored = installing(participant, staged)
            monkeypatch.setattr(store, "encode", slow.original)
            return restored

        monkeypatch.setattr(store, "encode", slow)
        monkeypatch.setattr(ModelParticipant, "install", installed)
        asking = asyncio.create_task(slow.asked(rig, "policy"))
        await rig.until(lambda: rig.running(1))
        assert slow.on_the_loop == {False}
        assert await asking == "starting"
        await rig.until(rig.complete)
        assert rig.account(3).problems == []
