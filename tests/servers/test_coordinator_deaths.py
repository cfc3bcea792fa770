"""A coordinator or a participant that is gone in the middle of a checkpoint: it ends one way or the other, and the
cell goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import GRACE, Rig
from gym_rig.network import Alive
from gym_rig.taking import collecting, phases, quiet, stored, to_the_end
from gym_rig.virtual import now
from gym_servers.control.writes import RecordWrite
from gym_servers.coordination.checkpoint import CheckpointFailed, Progress
from gym_servers.coordination.client import ParticipantClient
from gym_servers.coordination.order import PREPARE
from gym_servers.protocol.phases import Phase
from gym_servers.storage.cells import published
from gym_servers.storage.locate import open_store


class Coordinator:
    """A rig's coordinator in a process of its own, which can be killed: what it asks then never arrives."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.alive = rig, Alive()
        rig.http = rig.network.client(self.alive)
        rig.controller = rig.coordinator(rig.saved[-1])
        self.tasks: list[asyncio.Task[Any]] = []

    async def take(self, tell: Any = quiet) -> None:
        """Returns when the checkpoint has ended or its coordinator was killed."""
        await self.rig.controller.look()
        task = asyncio.ensure_future(self.rig.controller.take("open-id", "open", tell))
        self.tasks.append(task)
        died = asyncio.ensure_future(self.alive.died.wait())
        await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()

    def replace(self) -> None:
        """Another one takes over: it knows the record and nothing else."""
        self.left = self.rig.controller
        self.rig.http = self.rig.network.client()
        self.rig.controller = self.rig.coordinator(self.rig.saved[-1])

    async def end(self) -> None:
        for task in (*self.tasks, self.left._checkpoint):
            if task is not None:
                task.cancel()
                await asyncio.wait([task], timeout=1)


async def never(coordinator: Coordinator) -> None:
    coordinator.alive.kill()
    await asyncio.get_running_loop().create_future()


def running(rig: Rig) -> list[Any]:
    return list(rig.processes_by_name.values())


@pytest.mark.parametrize(
    ("step", "victim"),
    [
        ("status", "env"),
        ("prepare", "collection"),
        ("prepare", "counter"),
        ("commit", "counter"),
        ("renew", "env"),
        ("resume", "agent"),
        ("Publishing", ""),
    ],
)
async def test_c1_a_coordinator_that_is_killed_at_any_step_leaves_a_settled_checkpoint_and_an_open_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, victim: str
) -> None:
    async with collecting(tmp_path) as rig:
        first = Coordinator(rig)
        once, killed = ParticipantClient._once, False

        async def dies(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            nonlocal killed
            # With the question sent: the answer finds nobody.
            answer = await once(self, method, verb, *arguments)
            opened = rig.controller.record.open is not None
            if opened and not killed and (self.name, verb) == (victim, step):
                killed = True
                await never(first)
            return answer

        async def tell(progress: Progress) -> None:
            if progress.phase == step:
                await never(first)

        monkeypatch.setattr(ParticipantClient, "_once", dies)
        await first.take(tell)
        assert first.alive.died.is_set()
        first.replace()
        began = now()
        await rig.until(lambda: rig.controller.record.open is None)
        await rig.until(lambda: phases(rig) == {Phase.IDLE})
        assert now() - began < GRACE
        assert stored(rig) == ["published" if step == "Publishing" else "abandoned"]
        await rig.checkpoint("next")
        rig.kill("agent")
        await to_the_end(rig)
        await first.end()


async def test_c4_a_coordinator_that_was_away_when_the_work_ended_finds_it_with_its_next_look(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        first = Coordinator(rig)

        async def tell(progress: Progress) -> None:
            if progress.phase == "Publishing":
                await never(first)

        await first.take(tell)
        await asyncio.sleep(600)
        assert stored(rig) == []
        first.replace()
        await rig.controller.look()
        assert stored(rig) == ["published"]
        assert rig.controller.record.open is None
        await first.end()


async def test_c5_a_cell_whose_coordinator_never_comes_back_opens_by_itself(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        first = Coordinator(rig)

        async def tell(progress: Progress) -> None:
            if progress.phase == "Committing":
                await never(first)

        await first.take(tell)
        assert phases(rig) == {Phase.PREPARED}
        await asyncio.sleep(GRACE + 1)
        assert phases(rig) == {Phase.IDLE}
        first.replace()
        await first.end()
        await to_the_end(rig)


async def test_c2_what_is_written_after_a_checkpoint_was_declared_failed_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor gives it up at start-up; the upload of one participant ends a while later."""
    async with collecting(tmp_path) as rig:
        await rig.checkpoint("good")
        first = Coordinator(rig)
        original, gate = RecordWrite._run, asyncio.Event()

        async def hangs(self: RecordWrite, write: Any, seconds: float) -> None:
            await gate.wait()
            await original(self, write, seconds)

        monkeypatch.setattr(RecordWrite, "_run", hangs)
        taking = asyncio.ensure_future(first.take())
        while not any(one.plane and one.plane.status().write.state == "writing" for one in running(rig)):  # type: ignore[union-attr]  # noqa: ASYNC110 - as a coordinator asks
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        first.alive.kill()
        await taking
        first.replace()
        await rig.until(lambda: rig.controller.record.open is None)
        assert stored(rig) == ["abandoned", "published"]
        gate.set()
        await rig.until(lambda: all(one.plane.status().write.state == "done" for one in running(rig)))  # type: ignore[union-attr]
        assert stored(rig) == ["abandoned", "published"]
        assert [publication.name for _, publication, _ in published(open_store(rig.root))] == ["good"]
        rig.kill("agent")
        await rig.until(lambda: rig.running(1))
        choice = rig.controller.record.recoveries[-1].checkpoint
        assert choice is not None
        assert choice.name == "good"
        await to_the_end(rig)
        await first.end()


@pytest.mark.parametrize("step", ["prepare", "commit", "renew", "resume"])
@pytest.mark.parametrize("victim", ["policy", "counter"])
async def test_c3_a_death_between_two_acknowledgements_is_named_the_others_go_on_and_the_cell_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, step: str
) -> None:
    """It aborts the checkpoint, but for one that is proved and durable by then."""
    async with collecting(tmp_path) as rig:
        await rig.checkpoint("good")
        once, killed, resumed = ParticipantClient._once, False, set[str]()

        async def dies(self: ParticipantClient, method: str, verb: str, content: Any, *arguments: Any) -> Any:
            nonlocal killed
            if (self.name, verb, killed) == (victim, step, False):
                killed = True
                await asyncio.sleep(0.1)  # what can be written by now is written
                rig.kill(victim)
            answer = await once(self, method, verb, content, *arguments)
            if verb == "resume" and content["checkpoint_id"] == "open-id":
                resumed.add(self.name)
            return answer

        monkeypatch.setattr(ParticipantClient, "_once", dies)
        taken = asyncio.ensure_future(rig.controller.take("open-id", "open", quiet))
        await rig.until(lambda: taken.done() and rig.running(1))
        recovery = rig.controller.record.recoveries[-1]
        assert victim in recovery.reason
        if step == "resume":
            assert taken.result().publication.state == "published"
            assert (stored(rig), recovery.checkpoint and recovery.checkpoint.name) == (["published"] * 2, "open")
        else:
            failure = taken.exception()
            assert isinstance(failure, CheckpointFailed)
            assert victim in str(failure)
            assert stored(rig) == ([] if step == "prepare" else ["abandoned"]) + ["published"]
            assert recovery.checkpoint is not None
            assert recovery.checkpoint.name == "good"
        asked = PREPARE.index(rig.settings[victim].kind) if step == "prepare" else len(PREPARE)
        closed = {name for name, one in rig.settings.items() if one.kind in PREPARE[:asked]}
        assert closed - {victim} <= resumed
        await to_the_end(rig, continued=3)
