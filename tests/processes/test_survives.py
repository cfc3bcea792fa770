"""Real processes, real S3, SIGKILL: whatever dies and whenever, every rollout ends once, as if nothing had died."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gym_servers.coordination.checkpoint import CheckpointFailed
from gym_servers.coordination.record import Stage
from gym_servers.proof.account import Account

pytestmark = pytest.mark.timeout(300)


def proved(counted: Account, rollouts: int) -> None:
    assert counted.problems == []
    assert (counted.rows, counted.reward_mean, counted.restarted) == (rollouts, 1.0, 0)
    assert counted.calls_effective == counted.calls_expected
    assert counted.continued == rollouts


async def test_each_kind_of_server_dies_in_turn_and_then_all_at_once(collecting: Callable[..., Any]) -> None:
    victims = ("env", "policy", "agent", "counter", "collection", "all")
    async with collecting(steps=30) as run:
        await run.progress()
        for number, victim in enumerate(victims, 1):
            await run.take(f"before-{victim}")
            await run.progress()
            run.kill(victim)
            await run.in_service(number)
        proved(await run.end(), run.rollouts)
        assert run.sources() == [f"before-{victim}" for victim in victims]


async def test_a_death_while_a_checkpoint_is_open_and_again_during_the_recovery(
    collecting: Callable[..., Any],
) -> None:
    async with collecting(steps=24) as run:
        await run.progress()
        await run.take("good")
        for attempt, (phase, victim) in enumerate((("Preparing", "agent"), ("Committing", "counter")), 1):
            await run.progress()
            with pytest.raises(CheckpointFailed):
                await run.take(f"at-{phase}", phase, lambda victim=victim: run.kill(victim))
            await run.in_service(attempt)
            assert run.sources()[-1] == "good"
        await run.progress()

        # The publication is proposed and durable when this is announced: it stands, whoever dies now.
        await run.take("at-Publishing", "Publishing", lambda: run.kill("policy"))
        await run.until("a recovery", lambda: run.runner.controller.record.stage is not Stage.RUNNING)
        await run.until("fresh processes", lambda: run.runner.controller.record.stage is Stage.STARTING)
        run.kill("env")
        await run.in_service(3)
        await run.until("service", lambda: run.runner.controller.record.stage is Stage.RUNNING)
        assert set(run.sources()[2:]) == {"at-Publishing"}
        proved(await run.end(), run.rollouts)


async def test_without_a_checkpoint_a_death_starts_over_and_is_proved_too(collecting: Callable[..., Any]) -> None:
    async with collecting(rollouts=2, steps=4) as run:
        await run.progress()
        run.kill("counter")
        await run.in_service(1)
        counted = await run.end()
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean, counted.continued) == (2, 1.0, 0)
        assert counted.restarted == 2
        assert run.sources() == [None]


async def test_a_storage_that_dies_in_the_middle_costs_a_checkpoint_and_no_rollout(
    collecting: Callable[..., Any], s3: Any
) -> None:
    async with collecting(steps=8) as run:
        await run.progress()
        s3.kill()
        try:
            with pytest.raises(CheckpointFailed, match=r"endpoint \S+ cannot be reached|was stopped|did not write"):
                await run.take("lost")
            await run.progress()  # the rollouts go on meanwhile
        finally:
            await asyncio.to_thread(s3.start)
        await run.settled()
        await run.take("found")
        counted = await run.end()
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean) == (4, 1.0)
