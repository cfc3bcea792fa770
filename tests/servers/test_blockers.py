"""A rollout that keeps checkpoints from being taken is restarted after so many in a row, whoever coordinates by then;
its driver starts it over, and the next checkpoint is taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_operator.effects.kube import CHECKPOINTS, EVENTS
from gym_rig.cell import Rig, cell
from gym_rig.operated import operated
from gym_rig.virtual import now
from gym_servers.coordination import restarts
from gym_servers.coordination.checkpoint import CheckpointFailed, Progress
from gym_servers.coordination.client import Unreachable
from gym_servers.engine.rows import counter_rows
from gym_servers.environment.single_agent_turn import SingleAgentTurn
from gym_servers.participants.environment import Live

ROLLOUTS = 3
STUCK = "0-0"


async def quiet(_: Progress) -> None:
    return None


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Callable[..., asyncio.Event]:
    """Makes the verify stage of a rollout's first attempts hang until it is set free, or ended."""

    def hang(attempts: int = 1, rollout: str = STUCK) -> asyncio.Event:
        verify, free = SingleAgentTurn._verify, asyncio.Event()

        async def hangs(self: SingleAgentTurn, live: Live, *arguments: Any) -> Any:
            if live.episode.rollout_id == rollout and live.episode.attempt < attempts:
                await free.wait()
            return await verify(self, live, *arguments)

        monkeypatch.setattr(SingleAgentTurn, "_verify", hangs)
        return free

    return hang


@asynccontextmanager
async def collecting(folder: Path, limit: int, **spec: Any) -> AsyncIterator[Rig]:
    async with cell(folder, counter_rows(ROLLOUTS, 2), **spec) as rig:
        rig.controller.settings = rig.cell_settings(prepare_timeout=2.0, restart_blockers_after=limit)
        yield rig


async def until_stuck(rig: Rig) -> None:
    def hangs() -> bool:
        live = rig.participant("env")._live.get(STUCK)
        return live is not None and live.where == "verify"

    await rig.until(lambda: rig.running() and hangs())


async def fails_to_take(rig: Rig, name: str) -> None:
    """A checkpoint that is held up."""
    taken = asyncio.ensure_future(rig.controller.take(f"{name}-id", name, quiet))
    await rig.until(taken.done)
    with pytest.raises(CheckpointFailed, match=f"{STUCK} is in verify"):
        taken.result()


async def test_a_rollout_is_restarted_after_as_many_checkpoints_as_it_may_block(
    tmp_path: Path, stuck: Callable[..., asyncio.Event]
) -> None:
    stuck()
    async with collecting(tmp_path, 3) as rig:
        await until_stuck(rig)
        for number in (1, 2):
            await fails_to_take(rig, f"cp{number}")
            (count,) = rig.controller.record.blocked
            assert (count.rollout, count.attempt, count.times, count.where) == (STUCK, 0, number, "verify")
            assert rig.controller.record.restarted == []
        rig.controller = rig.coordinator(rig.saved[-1])  # the count is durable
        rig.controller.settings = rig.cell_settings(prepare_timeout=2.0, restart_blockers_after=3)
        await rig.controller.look()
        await fails_to_take(rig, "cp3")
        await rig.until(lambda: rig.controller.record.restarted)
        (one,) = rig.controller.record.restarted
        assert (one.rollout, one.attempt, one.times, one.participant) == (STUCK, 0, 3, "env")
        assert rig.controller.record.blocked == []
        assert [text for _, reason, text in rig.said if reason == "BlockersRestarted"] == [
            f"restarted under their next attempt: {STUCK} blocked 3 checkpoints in a row, last in verify at env "
            f"for {one.age_seconds:g} s"
        ]
        await rig.until(lambda: f"{STUCK}-a1" in rig.participant("env")._live)
        await rig.checkpoint("now")
        await rig.until(rig.complete)
        counted = rig.account(ROLLOUTS)
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean) == (ROLLOUTS, 1.0)


async def test_a_checkpoint_that_is_taken_ends_the_row(tmp_path: Path, stuck: Callable[..., asyncio.Event]) -> None:
    free = stuck()
    async with collecting(tmp_path, 2) as rig:
        await until_stuck(rig)
        await fails_to_take(rig, "cp1")
        assert len(rig.controller.record.blocked) == 1
        free.set()
        await rig.checkpoint("good")
        assert (rig.controller.record.blocked, rig.controller.record.restarted) == ([], [])


@pytest.mark.parametrize("limit", [0, 4])
async def test_below_the_limit_nothing_is_restarted(
    tmp_path: Path, stuck: Callable[..., asyncio.Event], limit: int
) -> None:
    free = stuck()
    async with collecting(tmp_path, limit) as rig:
        await until_stuck(rig)
        for number in range(3):
            await fails_to_take(rig, f"cp{number}")
        began = now()
        await rig.until(lambda: now() - began > 20)
        assert rig.controller.record.restarted == []
        assert STUCK in rig.participant("env")._live
        free.set()
        await rig.until(rig.complete)


async def test_what_has_come_to_rest_by_itself_meanwhile_is_left_alone(
    tmp_path: Path, stuck: Callable[..., asyncio.Event]
) -> None:
    free = stuck()
    async with collecting(tmp_path, 1) as rig:
        await until_stuck(rig)
        taken = asyncio.ensure_future(rig.controller.take("cp-id", "cp", quiet))
        await asyncio.wait([taken])  # no look comes between
        free.set()
        await asyncio.sleep(1)
        assert taken.exception() is not None
        await rig.until(rig.complete)
        assert (rig.controller.record.restarted, rig.account(ROLLOUTS).problems) == ([], [])


async def test_a_rollout_whose_end_takes_its_time_holds_no_look_up_and_is_asked_for_until_it_is_gone(
    tmp_path: Path, stuck: Callable[..., asyncio.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a coordinator that was not the one to begin it."""
    stuck()
    cleanup, slow = SingleAgentTurn._close_tool_session, asyncio.Event()

    async def hangs(self: SingleAgentTurn, live: Live, state: Any) -> None:
        if live.episode.key == STUCK:
            await slow.wait()
        await cleanup(self, live, state)

    monkeypatch.setattr(SingleAgentTurn, "_close_tool_session", hangs)
    async with collecting(tmp_path, 1) as rig:
        await until_stuck(rig)
        await fails_to_take(rig, "cp")
        await rig.until(lambda: rig.controller.record.restarted)
        began = now()
        await rig.controller.look()
        assert now() - began < 1
        await rig.controller.close()
        rig.controller = rig.coordinator(rig.saved[-1])
        await rig.until(lambda: now() - began > 60)
        assert len(rig.controller.record.restarted) == 1
        slow.set()
        await rig.until(rig.complete)
        assert rig.account(ROLLOUTS).problems == []


@pytest.mark.parametrize("by", ["the same", "another coordinator"])
async def test_a_restart_that_was_said_is_carried_out_though_it_did_not_get_through_at_first(
    tmp_path: Path, stuck: Callable[..., asyncio.Event], monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    stuck()
    retire_all, tries = restarts.retire_all, 0

    async def fails(*arguments: Any) -> None:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise Unreachable("env does not answer on control")
        await retire_all(*arguments)

    monkeypatch.setattr(restarts, "retire_all", fails)
    async with collecting(tmp_path, 1) as rig:
        await until_stuck(rig)
        await fails_to_take(rig, "cp")
        await rig.until(lambda: tries == 1)
        if by == "another coordinator":
            rig.controller = rig.coordinator(rig.saved[-1])
        await rig.until(rig.complete)
        assert (tries, len(rig.controller.record.restarted)) == (4, 1)
        assert rig.account(ROLLOUTS).problems == []


async def test_an_external_driver_is_told_by_stale_attempt(
    tmp_path: Path, stuck: Callable[..., asyncio.Event]
) -> None:
    """Its call ends, and under the next attempt the rollout starts over."""
    stuck()
    row = counter_rows(1, 2)[0]
    data = {name: value for name, value in row.items() if name != "responses_create_params"}
    task = {"task_input": {"responses_create_params": row["responses_create_params"], "task_data": data}}
    async with collecting(tmp_path, 1, collection=None) as rig, rig.network.client(timeout=None) as client:
        await rig.until(rig.running)

        async def run(attempt: int) -> httpx.Response:
            body = {"episode_id": {"rollout_id": STUCK, "attempt": attempt}, "task": task}
            return await client.post("http://env/run", json=body)

        running = asyncio.create_task(run(0))
        await until_stuck(rig)
        await fails_to_take(rig, "cp")
        await rig.until(running.done)
        assert running.result().json()["error"]["code"] == "stale_attempt"
        assert (await run(1)).json()["result"]["reward"] == 1.0


async def test_the_stack_s_status_and_events_name_blockers_and_what_was_restarted(
    tmp_path: Path, stuck: Callable[..., asyncio.Event]
) -> None:
    stuck()
    checkpoints = {
        "storage": {"directory": str(tmp_path / "checkpoints")},
        "prepareTimeout": "2s",
        "restartBlockersAfter": 2,
    }
    async with operated(tmp_path, counter_rows(ROLLOUTS, 2), checkpoints=checkpoints) as rig:
        await rig.until(rig.in_service, "in service")

        def hangs() -> bool:
            live = rig.cell.participant("env")._live.get(STUCK)
            return live is not None and live.where == "verify"

        await rig.until(hangs, "stuck")
        for name in ("one", "two"):
            rig.checkpoint(name)
            await rig.until(lambda name=name: rig.final(name), "final")
            status = rig.status(CHECKPOINTS, name)
            assert (status["phase"], status["reason"]) == ("Failed", "PrepareTimeout")
            (blocker,) = status["blockers"]
            assert (blocker["id"], blocker["where"], blocker["participant"]) == (STUCK, "verify", "env")
            assert blocker["ageSeconds"] > 2

        await rig.until(lambda: rig.status()["cells"][0].get("restarted"), "restarted")
        (one,) = rig.status()["cells"][0]["restarted"]
        assert (one["rollout"], one.get("attempt", 0), one["checkpoints"], one["where"]) == (STUCK, 0, 2, "verify")
        await rig.until(lambda: len(said(rig, "BlockersRestarted")) == 1, "said")
        assert f"{STUCK} blocked 2 checkpoints in a row" in said(rig, "BlockersRestarted")[0]
        assert [f"{STUCK} is in verify at env for " in text for text in said(rig, "Blocked")] == [True, True]
        rig.checkpoint("three")
        await rig.until(lambda: rig.final("three") or rig.complete(), "final")
        await rig.until(rig.complete, "complete")


def said(rig: Any, reason: str) -> list[str]:
    """The events of a reason."""
    return [
        body["message"]
        for (kind, _, _), body in rig.kube.objects.items()
        if kind == EVENTS and body["reason"] == reason
    ]
