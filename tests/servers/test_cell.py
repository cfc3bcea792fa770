"""A whole cell on virtual time: checkpoints, deaths at every point, and what survives - proved from the journals."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig, cell
from gym_servers.agent.simple_agent import SimpleAgent
from gym_servers.collection.output import DirectoryOutput
from gym_servers.control import plane
from gym_servers.coordination.checkpoint import Progress
from gym_servers.coordination.record import Stage, tried_again
from gym_servers.engine.rows import counter_rows
from gym_servers.participants.agent import AgentParticipant
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.resources.counter import CounterServer

NAMES = ("env", "policy", "agent", "counter", "collection")


async def test_without_a_death_every_rollout_ends_and_is_proved(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(4, 1)) as rig:
        await rig.until(rig.complete)
        counted = rig.account(4)
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean, counted.continued) == (4, 1.0, 0)
        assert counted.tokens_generated == counted.tokens_needed


@pytest.mark.parametrize("victim", [*NAMES, "all"])
async def test_a_death_after_a_checkpoint_continues_from_it(tmp_path: Path, victim: str) -> None:
    async with cell(tmp_path, counter_rows(4, 1)) as rig:
        await rig.until(lambda: rig.effects() >= 5)
        await rig.checkpoint("one")
        await rig.until(lambda: rig.effects() >= 7)
        rig.kill(*(NAMES if victim == "all" else (victim,)))
        await rig.until(rig.complete)
        counted = rig.account(4)
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean, counted.restarted) == (4, 1.0, 0)
        assert counted.continued == 4
        assert rig.controller.record.attempt == 1


@pytest.mark.parametrize(
    ("phase", "victim"),
    [("Preparing", "agent"), ("Committing", "counter"), ("Committing", "collection"), ("Publishing", "env")],
)
async def test_a_death_while_a_checkpoint_is_open_is_settled_before_anything_is_chosen(
    tmp_path: Path, phase: str, victim: str
) -> None:
    async with cell(tmp_path, counter_rows(3, 2)) as rig:
        await rig.until(lambda: rig.effects() >= 3)
        await rig.checkpoint("good")
        await rig.until(lambda: rig.effects() >= 6)

        async def tell(progress: Progress) -> None:
            if progress.phase == phase:
                rig.kill(victim)

        taken = asyncio.ensure_future(rig.controller.take("open-id", "open", tell))
        await rig.until(lambda: taken.done() and rig.running(1))
        published = phase == "Publishing"
        assert (taken.exception() is None) == published
        choice = rig.controller.record.recoveries[-1].checkpoint
        assert choice is not None
        assert choice.name == ("open" if published else "good")
        assert rig.controller.record.open is None
        await rig.until(rig.complete)
        counted = rig.account(3)
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean, counted.continued) == (3, 1.0, 3)


@pytest.mark.parametrize("victim", ["env", "agent", "collection"])
async def test_a_second_death_during_the_recovery_restores_the_same_checkpoint(tmp_path: Path, victim: str) -> None:
    async with cell(tmp_path, counter_rows(3, 2)) as rig:
        await rig.until(lambda: rig.effects() >= 3)
        await rig.checkpoint("good")
        rig.kill("agent")
        await rig.until(lambda: rig.controller.record.stage is Stage.STARTING and rig.controller.record.pins)
        rig.kill(victim)
        await rig.until(lambda: rig.running(2))
        sources = {one.checkpoint and one.checkpoint.name for one in rig.controller.record.recoveries}
        assert sources == {"good"}
        await rig.until(rig.complete)
        counted = rig.account(3)
        assert counted.problems == []
        assert (counted.rows, counted.continued) == (3, 3)


@pytest.mark.parametrize("moment", [0.0, 0.05, 0.3])
async def test_a_coordinator_that_dies_at_any_moment_is_taken_over_from(tmp_path: Path, moment: float) -> None:
    """Its successor knows only the record: the checkpoint is settled, everybody is reopened, the run ends."""
    async with cell(tmp_path, counter_rows(3, 2)) as rig:
        await rig.until(lambda: rig.effects() >= 3)
        before = rig.controller

        async def tell(_: Progress) -> None:
            await asyncio.sleep(0.02)

        taken = asyncio.ensure_future(before.take("open-id", "open", tell))
        await asyncio.sleep(moment)
        lost = before._checkpoint
        assert lost is not None
        for task in (taken, lost):
            task.cancel()
        # What a dead coordinator had still done in its last breath is undone: nobody was resumed by it.
        rig.controller = rig.coordinator(rig.saved[-1])
        await rig.until(lambda: rig.controller.record.open is None)
        await rig.checkpoint("next")
        rig.kill("counter")
        await rig.until(rig.complete)
        counted = rig.account(3)
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean) == (3, 1.0)
        await asyncio.gather(taken, lost, return_exceptions=True)


async def test_a_cell_that_makes_no_progress_gives_up_and_says_so(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(1, 1, (30, 30)), recovery={"backoffLimit": 2}) as rig:
        for attempt in (1, 2):
            await rig.until(rig.running)
            rig.kill("env")
            await rig.until(lambda attempt=attempt: rig.running(attempt))
        rig.kill("env")
        await rig.until(lambda: rig.controller.record.stage is Stage.STALLED)
        assert rig.said[-1][1] == "RecoveryStalled"
        assert rig.controller.record.attempt == 2


def one_short_and_one_long() -> list[dict[str, Any]]:
    """A row that is soon done, and one that keeps the cell at work."""
    return [*counter_rows(1, 1, (1, 1)), *counter_rows(1, 2, (200, 200))]


async def test_a_finished_row_is_progress_and_the_first_one_too(tmp_path: Path) -> None:
    async with cell(tmp_path, one_short_and_one_long(), rate=20, recovery={"backoffLimit": 1}) as rig:
        await rig.until(rig.running)
        rig.kill("env")
        await rig.until(lambda: rig.running(1))
        assert (rig.progress()["rows"], rig.controller.record.failures) == (0, 1)
        await rig.until(lambda: rig.progress()["rows"])
        await rig.until(lambda: not rig.controller.record.failures)
        rig.kill("env")
        await rig.until(lambda: rig.running(2))
        rig.kill("env")
        await rig.until(lambda: rig.controller.record.stage is Stage.STALLED)
        assert rig.controller.record.attempt == 2, "no row since"


async def test_a_row_that_is_finished_just_before_a_death_is_found_to_be_progress(tmp_path: Path) -> None:
    """Nobody has looked meanwhile."""
    async with cell(tmp_path, one_short_and_one_long(), rate=20) as rig:
        await rig.until(rig.effects)
        rig.kill("env")
        await rig.until(lambda: rig.running(1) and rig.progress())
        output = tmp_path / "output/rollouts.jsonl"
        for _ in range(200):
            if output.exists() and output.read_text():
                break
            await asyncio.sleep(0.1)
        assert (rig.progress()["rows"], rig.controller.record.failures) == (0, 1)
        rig.kill("env", "collection")
        await rig.until(lambda: rig.running(2))
        assert rig.controller.record.failures == 2
        await rig.until(lambda: not rig.controller.record.failures)


async def test_rows_that_a_driver_finds_when_it_comes_up_are_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, seconds = DirectoryOutput.done, 0.0

    async def slowly(self: DirectoryOutput) -> set[str]:
        await asyncio.sleep(seconds)
        return await done(self)

    monkeypatch.setattr(DirectoryOutput, "done", slowly)
    async with cell(tmp_path, one_short_and_one_long(), rate=20, recovery={"backoffLimit": 1}) as rig:
        await rig.until(lambda: rig.progress().get("rows"))
        seconds = 5.0
        rig.kill("collection")
        await rig.until(lambda: rig.running(1))
        rig.controller = rig.coordinator(rig.saved[-1])  # another one, which has seen nothing yet
        await rig.until(lambda: rig.progress().get("rows"))
        await rig.until(lambda: rig.controller.record.failures == 1)
        rig.kill("env")
        await rig.until(lambda: rig.controller.record.stage is Stage.STALLED)


def damage(checkpoint: Path, what: str) -> None:
    for path in checkpoint.rglob(what):
        path.unlink()
        path.write_bytes(b"{}")


@pytest.mark.parametrize("what", ["checkpoint.json", "manifest.json"])
async def test_records_that_are_damaged_after_they_were_chosen_fall_back_to_the_older_ones(
    tmp_path: Path, what: str
) -> None:
    """Also `checkpoint.json` itself: the choice names it by digest."""
    async with cell(tmp_path, counter_rows(2, 2)) as rig:
        await rig.until(lambda: rig.effects() >= 2)
        await rig.checkpoint("older")
        await rig.until(lambda: rig.effects() >= 4)
        newer = await rig.checkpoint("newer")
        rig.kill("agent")
        await rig.until(lambda: rig.controller.record.stage is Stage.REPLACING)
        damage(Path(newer.uri), what)
        await rig.until(lambda: rig.running(1) or rig.running(2))
        choice = rig.controller.record.recoveries[-1].checkpoint
        assert choice is not None
        assert choice.name == "older"
        assert any(reason == "RecordsRefused" for _, reason, _ in rig.said)
        await rig.until(rig.complete)
        assert rig.account(2).problems == []


HOOKS = [(CounterServer, "restore_session_states"), (SimpleAgent, "restore_agent_sessions")]


@asynccontextmanager
async def two_checkpoints(folder: Path) -> AsyncIterator[Rig]:
    """A cell with an older and a newer one."""
    async with cell(folder, counter_rows(2, 2)) as rig:
        for effects, name in ((2, "older"), (4, "newer")):
            await rig.until(lambda effects=effects: rig.effects() >= effects)
            await rig.checkpoint(name)
        yield rig


def sources(rig: Rig) -> list[str | None]:
    return [one.checkpoint and one.checkpoint.name for one in rig.controller.record.recoveries]


@pytest.mark.parametrize(("server", "hook"), HOOKS)
@pytest.mark.parametrize("times", [1, 100])
async def test_records_that_cannot_be_installed_again_fall_back_to_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Any, hook: str, times: int
) -> None:
    """Once may be chance: then the newer ones are tried again."""
    async with two_checkpoints(tmp_path) as rig:
        original, failed = getattr(server, hook), 0

        async def fails(self: Any, states: Any) -> None:
            nonlocal failed
            choice = rig.controller.record.restore
            if choice is not None and choice.name == "newer" and failed < times:
                failed += 1
                raise OSError("no room")
            await original(self, states)

        monkeypatch.setattr(server, hook, fails)
        rig.kill("policy")
        await rig.until(lambda: rig.running(2 if times == 1 else 3))
        assert sources(rig) == ["newer", "newer", *(["older"] if times > 1 else [])]
        said = [message for _, reason, message in rig.said if reason == "RecordsRefused"]
        assert [message.partition(":")[0] for message in said] == ([] if times == 1 else ["newer"])
        assert rig.controller.record.refusals == {}
        await rig.until(rig.complete)
        assert rig.account(2).problems == []


async def test_records_that_cannot_be_reached_for_a_while_are_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often: an outage of storage must not cost the work since the older checkpoint."""
    async with two_checkpoints(tmp_path) as rig:
        original, asked = plane.read_back, 0

        def away(*arguments: Any, **options: Any) -> Any:
            nonlocal asked
            asked += 1
            if rig.controller.record.attempt < 4:
                raise ProtocolError("checkpoint_error", "the bucket does not answer")
            return original(*arguments, **options)

        monkeypatch.setattr(plane, "read_back", away)
        rig.kill("policy")
        await rig.until(lambda: rig.running(4))
        assert asked > 3
        assert sources(rig) == ["newer"] * 4
        await rig.until(rig.complete)
        assert rig.account(2).problems == []


async def test_a_checkpoint_that_vanished_after_it_was_chosen_is_no_reason_to_wait_for_ever(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(2, 2)) as rig:
        await rig.until(lambda: rig.effects() >= 2)
        only = await rig.checkpoint("only")
        rig.kill("agent")
        await rig.until(lambda: rig.controller.record.stage is Stage.REPLACING)
        shutil.rmtree(only.uri)
        await rig.until(rig.complete)
        assert rig.controller.record.recoveries[-1].checkpoint is None
        counted = rig.account(2)
        assert counted.problems == []
        assert counted.restarted == 2


async def test_an_episode_whose_seed_fails_half_way_leaves_no_tool_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tools are seeded first, then the agent refuses: whatever a seed got to is closed again."""
    async with cell(tmp_path, counter_rows(2, 1)) as rig:
        seed, refused = AgentParticipant.seed, 0

        async def refuses(self: AgentParticipant, session: str, episode: Episode, accesses: Any, **kw: Any) -> Any:
            nonlocal refused
            if episode.attempt == 0:
                refused += 1
                raise ProtocolError("invalid_request", "the agent cannot")
            return await seed(self, session, episode, accesses, **kw)

        monkeypatch.setattr(AgentParticipant, "seed", refuses)
        await rig.until(rig.complete)
        assert refused == 2
        assert rig.participant("counter").survey().counts == {"sessions": 0, "busy": 0}
        assert rig.participant("agent").survey().counts == {"sessions": 0, "busy": 0}


async def test_a_row_that_is_ahead_of_the_checkpoint_is_kept_and_its_episode_is_retired_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the output answers only after the cell is in service again."""
    async with cell(tmp_path, counter_rows(3, 2)) as rig:
        await rig.until(lambda: rig.effects() >= 3)
        await rig.checkpoint("early")
        await rig.until(lambda: rig.progress().get("rows", 0) >= 1)
        rows = rig.progress()["rows"]
        original = DirectoryOutput.done

        async def slow(self: DirectoryOutput) -> set[str]:
            await asyncio.sleep(30)
            return await original(self)

        monkeypatch.setattr(DirectoryOutput, "done", slow)
        rig.kill("collection")
        await rig.until(lambda: rig.running(1))
        await rig.until(rig.complete)
        for name in ("env", "agent", "counter", "policy"):
            counts = rig.participant(name).survey().counts
            assert not any(counts.values()), (name, counts)
        lines = (tmp_path / "output/rollouts.jsonl").read_text().splitlines()
        attempts = [json.loads(line)["_ng_attempt_index"] for line in lines]
        assert (len(attempts), attempts.count(0)) == (3, rows)


async def test_restored_work_of_tasks_that_are_gone_is_freed_and_nothing_of_what_is_over_is_kept(
    tmp_path: Path,
) -> None:
    """The tasks were cut short between two processes of the driver: no session or watermark of theirs is kept."""
    async with cell(tmp_path, counter_rows(4, 2)) as rig:
        await rig.until(lambda: rig.effects() >= 4)
        await rig.checkpoint("one")
        tasks = tmp_path / "tasks.jsonl"
        tasks.write_text("".join(tasks.read_text().splitlines(keepends=True)[:2]))
        rig.kill("collection")
        await rig.until(lambda: rig.running(1))
        await rig.until(rig.complete)
        await rig.until(lambda: not rig.participant("collection").to_forget())
        for name in NAMES:
            assert rig.participant(name).gate.fence.marks == {}, name
        for name in ("env", "agent", "counter", "policy"):
            counts = rig.participant(name).survey().counts
            assert not any(counts.values()), (name, counts)
        assert len((tmp_path / "output/rollouts.jsonl").read_text().splitlines()) == 2


async def test_a_recovery_that_was_asked_for_is_no_failure_and_one_after_it_is(tmp_path: Path) -> None:
    """All processes were ended by whoever runs the cell again: with no failure allowed it goes on all the same."""
    async with cell(tmp_path, counter_rows(2, 2), recovery={"backoffLimit": 0}) as rig:
        await rig.until(lambda: rig.effects() >= 2)
        await rig.checkpoint("one")
        for attempt in (1, 2):
            rig.kill()
            await rig.controller.close()
            rig.controller = rig.coordinator(tried_again(rig.saved[-1], 0, suspended=True))
            await rig.until(lambda attempt=attempt: rig.running(attempt))
        rig.kill("agent")
        await rig.until(lambda: rig.controller.record.stage is Stage.STALLED)
        rig.controller = rig.coordinator(tried_again(rig.saved[-1], 0, suspended=True))
        await rig.until(rig.complete)
        assert rig.account(2).problems == []
