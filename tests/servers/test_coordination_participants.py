"""A checkpoint whose participants are not ready, not those that were meant, or not to be reached."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_rig.taking import checkpoint, collecting, phases, quiet, stored, to_the_end
from gym_rig.virtual import now
from gym_servers.coordination.checkpoint import CheckpointFailed, Progress
from gym_servers.coordination.client import ParticipantClient, Unreachable
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.phases import Phase


@pytest.mark.parametrize("moment", ["Preparing", "Committing"])
async def test_c16_a_participant_that_is_another_process_by_now_aborts_the_checkpoint_by_name(
    tmp_path: Path, moment: str
) -> None:
    """Before it is prepared, and between its prepare and its freeze."""
    async with collecting(tmp_path) as rig:

        async def tell(progress: Progress) -> None:
            if progress.phase == moment:
                rig.kill("counter")
                rig.start("counter")

        with pytest.raises(CheckpointFailed, match="counter") as failed:
            await checkpoint(rig, tell=tell).take()
        assert failed.value.reason == "SessionChanged"
        assert phases(rig) == {Phase.IDLE, Phase.STARTING}
        await to_the_end(rig)


async def test_a_checkpoint_that_is_not_ready_names_the_participant_the_step_and_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(tmp_path) as rig:
        freed = asyncio.Event()
        plane = rig.processes_by_name["counter"].plane
        assert plane is not None
        monkeypatch.setattr(plane._retires, "_retire", lambda episodes: freed.wait())
        retiring = asyncio.create_task(
            plane.retire(m.RetireRequest(checkpoint_id="v", deadline_ts=now() + 100, episode_ids=["gone"]))
        )
        await asyncio.sleep(7)
        with pytest.raises(
            CheckpointFailed, match=r"counter was not ready in 2 s: gone is in retire for 9\."
        ) as failed:
            await checkpoint(rig, prepare_timeout=2).take()
        assert failed.value.reason == "PrepareTimeout"
        assert phases(rig) == {Phase.IDLE}
        freed.set()
        await retiring
        await rig.checkpoint("now")


@pytest.mark.parametrize("victim", ["collection", "env", "policy", "agent", "counter"])
@pytest.mark.parametrize("report", [None, m.Report(ready=False)])
async def test_a_participant_that_is_not_ready_and_does_not_say_why_is_not_taken_for_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, report: m.Report | None
) -> None:
    async with collecting(tmp_path) as rig:
        once, asked = ParticipantClient._once, list[str]()

        async def silent(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            asked.append(verb)
            answer = await once(self, method, verb, *arguments)
            return (
                m.PhaseReply(phase="preparing", report=report) if (self.name, verb) == (victim, "prepare") else answer
            )

        monkeypatch.setattr(ParticipantClient, "_once", silent)
        with pytest.raises(CheckpointFailed, match=f"{victim} was not ready in .* does not say why") as failed:
            await checkpoint(rig).take()
        assert failed.value.reason == "PrepareTimeout"
        assert "commit" not in asked
        assert phases(rig) == {Phase.IDLE}


async def test_c21_a_participant_that_moved_away_is_named_within_the_deadline_and_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(tmp_path) as rig:
        once, asked = ParticipantClient._once, 0

        async def gone(self: ParticipantClient, *arguments: Any) -> Any:
            nonlocal asked
            if self.name == "agent":
                asked += 1
                raise Unreachable("agent does not answer on control: ConnectError")
            return await once(self, *arguments)

        began = now()
        with monkeypatch.context() as patched:
            patched.setattr(ParticipantClient, "_once", gone)
            with pytest.raises(CheckpointFailed, match="agent does not answer") as failed:
                await checkpoint(rig, prepare_timeout=5).take()
            assert failed.value.reason == "ParticipantUnreachable"
            assert now() - began < 16
            tries = asked
            await asyncio.sleep(60)
            assert asked == tries
        assert phases(rig) == {Phase.IDLE}
        await to_the_end(rig)


async def test_c7_connections_that_break_off_at_the_very_end_discard_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is written, and the question whether it is gets lost: several times, from everybody."""
    async with collecting(tmp_path) as rig:
        once, lost = ParticipantClient._once, 0

        async def flaky(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            nonlocal lost
            resumed = phases(rig) == {Phase.IDLE}
            if verb == "status" and resumed and began and lost < 20:
                lost += 1
                raise Unreachable(f"{self.name} does not answer on control: ReadError")
            return await once(self, method, verb, *arguments)

        began = False

        async def tell(progress: Progress) -> None:
            nonlocal began
            began = progress.phase == "Committing"

        monkeypatch.setattr(ParticipantClient, "_once", flaky)
        assert (await checkpoint(rig, tell=tell).take()).publication.state == "published"
        assert lost == 20


async def test_c7_a_refusal_is_an_answer_and_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(tmp_path) as rig:
        once, asked = ParticipantClient._once, 0

        async def refuses(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            nonlocal asked
            if (self.name, verb) == ("policy", "prepare"):
                asked += 1
                raise ProtocolError("checkpoint_conflict", "policy: another one is open")
            return await once(self, method, verb, *arguments)

        monkeypatch.setattr(ParticipantClient, "_once", refuses)
        with pytest.raises(CheckpointFailed, match="another one is open"):
            await checkpoint(rig).take()
        assert asked == 1


async def test_c6_of_two_checkpoints_at_once_one_is_taken_and_one_is_refused(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        both = [asyncio.ensure_future(rig.controller.take(f"{name}-id", name, quiet)) for name in ("one", "two")]
        await rig.until(lambda: all(task.done() for task in both))
        errors = [task.exception() for task in both]
        assert [type(error) for error in errors if error is not None] == [CheckpointFailed]
        assert stored(rig) == ["published"]
        # And two coordinators that know nothing of each other: whoever closed a participant first keeps it.
        outcomes = await asyncio.gather(
            checkpoint(rig, "a").take(), checkpoint(rig, "b").take(), return_exceptions=True
        )
        assert sum(isinstance(one, CheckpointFailed) for one in outcomes) >= 1
        assert phases(rig) == {Phase.IDLE}
        await to_the_end(rig)
