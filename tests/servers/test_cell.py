"""A whole cell on virtual time: checkpoints, deaths at every point, and what survives - proved from the journals."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_rig.cell import cell
from gym_servers.engine.rows import counter_rows

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
