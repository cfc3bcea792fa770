"""What goes wrong while a cell is put into service again: slow restores, deaths in between, two who count attempts.
The rollouts continue all the same, and the journals prove it."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import GRACE, Rig, cell
from gym_servers.agent.simple_agent import SimpleAgent
from gym_servers.control.plane import ControlPlane
from gym_servers.coordination import into_service
from gym_servers.coordination.client import ParticipantClient, Unreachable
from gym_servers.coordination.record import CellRecord, Stage
from gym_servers.engine.rows import counter_rows
from gym_servers.participants.collection import CollectionParticipant
from gym_servers.participants.resources import ResourcesParticipant
from gym_servers.protocol.phases import Phase

SLOW_SECONDS = GRACE * 1.5  # longer than a lease, shorter than an installation may take


async def checkpointed(rig: Rig) -> None:
    await rig.until(lambda: rig.effects() >= 5)
    await rig.checkpoint("one")


async def all_continued(rig: Rig, rollouts: int = 4) -> None:
    await rig.until(rig.complete)
    counted = rig.account(rollouts)
    assert counted.problems == []
    assert (counted.rows, counted.reward_mean, counted.restarted, counted.continued) == (rollouts, 1.0, 0, rollouts)


# ---- installation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["restore", "retire", "resume"])
async def test_a_participant_that_is_slower_than_a_lease_costs_the_others_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    async with cell(tmp_path, counter_rows(4, 1)) as rig:
        await checkpointed(rig)
        original, slowed = getattr(ControlPlane, verb), 0

        async def slow(self: ControlPlane, request: Any) -> Any:
            nonlocal slowed
            if self.author.instance == "collection" and self.gate.phase is not Phase.IDLE:
                slowed += 1
                await asyncio.sleep(SLOW_SECONDS)
            return await original(self, request)

        monkeypatch.setattr(ControlPlane, verb, slow)
        if verb == "retire":
            # The output is ahead of the checkpoint, so that something is to be retired.
            await rig.until(lambda: rig.progress().get("rows", 0) >= 1)
        rig.kill("agent")
        await rig.until(lambda: slowed)
        await asyncio.sleep(SLOW_SECONDS - 1)  # no look is needed meanwhile
        assert not rig.running(1)
        await rig.until(lambda: rig.running(1))
        assert (slowed, rig.controller.record.attempt) == (1, 1)
        if verb == "retire":
            await rig.until(rig.complete)
            assert rig.account(4).problems == []
        else:
            await all_continued(rig)


async def test_a_participant_that_lost_what_it_restored_is_never_left_in_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease ran out, and somebody else opened it, empty, under the right attempt: the cell recovers again."""
    async with cell(tmp_path, counter_rows(4, 1)) as rig:
        await checkpointed(rig)
        original, lost = ControlPlane.resume, False

        async def loses(self: ControlPlane, request: Any) -> Any:
            nonlocal lost
            if self.author.instance == "agent" and self.gate.phase is Phase.RESTORED and not lost:
                lost = True
                self._expired()
                request = request.model_copy(update={"checkpoint_id": "somebody-else"})
            return await original(self, request)

        monkeypatch.setattr(ControlPlane, "resume", loses)
        rig.kill("agent")
        await rig.until(lambda: rig.running(2))
        assert "agent did not keep what was restored" in rig.controller.record.recoveries[-1].reason
        await all_continued(rig)


@pytest.mark.parametrize("taken_over", [False, True])
async def test_c7_a_status_that_is_lost_during_an_installation_costs_no_other_recovery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken_over: bool
) -> None:
    """Also where another coordinator resumes what one that is gone had restored."""
    async with cell(tmp_path, counter_rows(4, 1)) as rig:
        await checkpointed(rig)
        once, lost = ParticipantClient._once, 0

        async def flaky(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            nonlocal lost
            answer = await once(self, method, verb, *arguments)
            installation = rig.controller._install
            begun = (
                installation is not None and not installation.done() and taken_over == (rig.controller is not first)
            )
            if (
                (self.name, verb) == ("collection", "status")
                and answer.phase == Phase.RESTORED
                and begun
                and lost < 3
            ):
                lost += 1
                raise Unreachable(f"{self.name} does not answer on control: ReadError")
            return answer

        async def hangs(*_: Any) -> None:
            await asyncio.Event().wait()

        first = rig.controller
        monkeypatch.setattr(ParticipantClient, "_once", flaky)
        rig.kill("agent")
        if taken_over:
            with monkeypatch.context() as patched:
                patched.setattr(into_service, "open_all", hangs)
                await rig.until(lambda: phases(rig) == {Phase.RESTORED})
            left = first._install
            assert left is not None
            left.cancel()
            rig.controller = rig.coordinator(rig.saved[-1])
        await rig.until(lambda: rig.running(1))
        assert (lost, rig.controller.record.attempt) == (3, 1)
        await all_continued(rig)


def phases(rig: Rig) -> set[Phase]:
    return {one.server.participant.gate.phase for one in rig.processes_by_name.values()}


@pytest.mark.parametrize(
    ("commit_timeout", "seconds", "attempts"),
    [(120.0, 200.0, 1), (600.0, 1000.0, 1), (60.0, 200.0, 2), (60.0, 400.0, 3)],
)
async def test_what_could_be_written_can_be_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit_timeout: float, seconds: float, attempts: int
) -> None:
    """A restore that takes as long as the records took to be written; also where a checkpoint had more time of its
    own than the stack gives."""
    async with cell(tmp_path, counter_rows(4, 1)) as rig:
        await checkpointed(rig)
        rig.controller.settings = rig.cell_settings(commit_timeout=commit_timeout)
        original = ResourcesParticipant.build

        async def slow(self: ResourcesParticipant, staged: Any) -> Any:
            await asyncio.sleep(seconds)
            return await original(self, staged)

        monkeypatch.setattr(ResourcesParticipant, "build", slow)
        rig.kill("agent")
        while not rig.running(attempts):
            assert rig.controller.record.stage is not Stage.STALLED
            await rig.controller.look()
            await asyncio.sleep(1)
        assert rig.controller.record.attempt == attempts
        assert {one.checkpoint and one.checkpoint.name for one in rig.controller.record.recoveries} == {"one"}
        await all_continued(rig)


async def test_looks_go_on_after_an_installation_that_was_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A participant dies while one restores, and the look that saw it is broken off in turn."""
    async with cell(tmp_path, counter_rows(4, 1)) as rig:
        await checkpointed(rig)
        original, restoring = ControlPlane.restore, asyncio.Event()

        async def slow(self: ControlPlane, request: Any) -> Any:
            if not restoring.is_set() and self.author.instance == "counter":
                restoring.set()
                await asyncio.sleep(SLOW_SECONDS)
            return await original(self, request)

        monkeypatch.setattr(ControlPlane, "restore", slow)
        rig.kill("agent")
        await rig.until(restoring.is_set)
        installation = rig.controller._install
        assert installation is not None
        rig.kill("env")
        looking = asyncio.ensure_future(rig.controller.look())
        while not installation.cancelling():  # noqa: ASYNC110 - the very turn of the loop in which it is cancelled
            await asyncio.sleep(0)
        looking.cancel()
        await asyncio.wait([looking, installation])
        assert looking.cancelled()
        assert installation.cancelled()
        await rig.until(lambda: rig.running(2))
        await all_continued(rig)


# ---- attempt numbers --------------------------------------------------------------------------------------


async def test_a_driver_and_a_recovery_never_run_under_the_same_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's process is taken for dead while it goes on, the record takes 6 s to write, and meanwhile all
    rollouts fail for reasons of their own and start over."""
    async with cell(tmp_path, counter_rows(2, 1, (6, 8))) as rig:
        await rig.until(lambda: rig.effects() >= 3)
        await rig.checkpoint("one")
        processes, save = rig.processes, rig.save
        taken_for_dead = rig.processes_by_name["agent"].incarnation
        used: Counter[int] = Counter()
        persist = CollectionParticipant._use_up

        async def seen() -> Any:
            return [replace(p, alive=p.incarnation != taken_for_dead) for p in await processes()]

        async def slow(record: CellRecord) -> None:
            if record.stage is Stage.REPLACING:
                for live in list(rig.participant("env")._live.values()):
                    live.task.cancel()
                await asyncio.sleep(6)
            await save(record)

        async def noted(self: CollectionParticipant, attempt: int) -> int:
            used[attempt] += rig.controller.record.attempt < attempt
            return await persist(self, attempt)

        monkeypatch.setattr(rig, "processes", seen)
        monkeypatch.setattr(rig, "save", slow)
        monkeypatch.setattr(CollectionParticipant, "_use_up", noted)
        await rig.until(lambda: rig.running(1))
        assert used[1] >= 1, "the driver did not try"
        await rig.until(rig.complete)
        counted = rig.account(2)
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean) == (2, 1.0)


async def test_a_number_that_an_abandoned_recovery_reserved_does_not_hold_the_driver_up(tmp_path: Path) -> None:
    """The recovery's record was never saved, and the process that seemed dead answers again: the cell goes on."""
    async with cell(tmp_path, counter_rows(2, 1, (6, 8))) as rig:
        await rig.until(lambda: rig.effects() >= 3)
        processes, save, dead = rig.processes, rig.save, True

        async def seen() -> Any:
            return [replace(p, alive=p.alive and not (dead and p.name == "agent")) for p in await processes()]

        async def refuse(record: CellRecord) -> None:
            if record.stage is Stage.REPLACING:
                raise ConnectionError("the record cannot be saved")
            await save(record)

        rig.processes, rig.save = seen, refuse  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            await rig.until(lambda: False)
        dead = False
        rig.save = save  # type: ignore[method-assign]
        for live in list(rig.participant("env")._live.values()):
            live.task.cancel()  # they start over, for reasons of their own
        await rig.until(rig.complete)
        counted = rig.account(2)
        assert counted.problems == []
        assert set(counted.attempts) == {"2"}  # 1 is the recovery's, whatever became of it


async def test_a_restored_session_that_cannot_be_ended_costs_neither_the_recovery_nor_later_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is ahead of the checkpoint, and the agent's own end of such a session fails for ever."""
    async with cell(tmp_path, counter_rows(4, 1)) as rig:
        await checkpointed(rig)
        await rig.until(lambda: rig.progress().get("rows", 0) >= 1)
        failed: list[str] = []

        async def fails(_: SimpleAgent, key: str) -> None:
            failed.append(key)
            raise OSError("the sandbox does not answer")

        with monkeypatch.context() as patched:
            patched.setattr(SimpleAgent, "retire_agent_session", fails)
            rig.kill("policy")
            await rig.until(lambda: rig.running(1))
            await rig.until(lambda: failed and not rig.participant("collection").to_retire())
            await rig.checkpoint("two")
        await rig.until(rig.complete)
        assert rig.controller.record.attempt == 1
        assert rig.account(4).problems == []
        await rig.until(lambda: not rig.participant("collection").to_forget())
        for name in ("env", "agent", "counter", "policy"):
            counts = rig.participant(name).survey().counts
            assert not any(counts.values()), (name, counts)


async def test_sessions_that_cannot_be_ended_hold_up_no_checkpoint_after_their_rollouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_: SimpleAgent, key: str) -> None:
        raise OSError("the sandbox does not answer")

    monkeypatch.setattr(SimpleAgent, "retire_agent_session", fails)
    async with cell(tmp_path, counter_rows(4, 1)) as rig:
        await rig.until(lambda: rig.progress().get("failed", 0) >= 1)
        assert rig.progress()["failed"] < 4, "nothing is left to be continued"
        await rig.until(lambda: not rig.participant("collection").to_forget())
        await rig.checkpoint("late")
