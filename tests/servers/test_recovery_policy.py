"""What comes of a death is the user's to say: whether people decide first, and how old a checkpoint may be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig, cell
from gym_servers.coordination.cell_host import Wish
from gym_servers.coordination.record import CellRecord, Choice, Hold, Recovery, Stage, tried_again
from gym_servers.engine.rows import counter_rows

ROLLOUTS = 4


async def died(rig: Rig, **settings: object) -> Choice:
    """A cell with a checkpoint, whose agent dies under these settings; what it would continue from."""
    await rig.until(lambda: rig.effects() >= 5)
    await rig.checkpoint("one")
    rig.controller.settings = rig.cell_settings(**settings)
    rig.kill("agent")
    await rig.until(lambda: rig.controller.record.attempt == 1)
    found = rig.controller.record.recoveries[-1].checkpoint
    assert found is not None
    return found


async def to_the_end(rig: Rig, *, continued: int) -> None:
    await rig.until(rig.complete)
    counted = rig.account(ROLLOUTS)
    assert counted.problems == []
    assert (counted.rows, counted.continued, counted.restarted) == (ROLLOUTS, continued, ROLLOUTS - continued)


def held(rig: Rig) -> bool:
    record = rig.controller.record
    return bool(record.held) and record.held_for is Hold.POLICY and record.stage is Stage.STARTING


@pytest.mark.parametrize(("policy", "continued"), [("Restore", ROLLOUTS), ("Restart", 0)])
async def test_nothing_goes_on_until_people_have_decided(tmp_path: Path, policy: str, continued: int) -> None:
    async with cell(tmp_path, counter_rows(ROLLOUTS, 1), rate=20) as rig:
        await died(rig, policy="Manual")
        await rig.until(lambda: held(rig))
        (said,) = [message for level, reason, message in rig.said if reason == "RecoveryHeld" and level == "Warning"]
        assert "agent" in said
        assert "checkpoint one" in said
        effects = rig.effects()
        await asyncio.sleep(300)
        assert held(rig)
        assert (rig.effects(), rig.controller.record.attempt) == (effects, 1)
        rig.controller.settings = rig.cell_settings(policy=policy)
        await rig.until(lambda: rig.running(1))
        source = rig.controller.record.recoveries[-1].checkpoint
        assert (source is not None) == (policy == "Restore")
        await to_the_end(rig, continued=continued)


async def test_what_is_held_survives_its_coordinator_and_more_deaths(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(ROLLOUTS, 1), rate=20) as rig:
        await died(rig, policy="Manual")
        await rig.until(lambda: held(rig))
        rig.controller = rig.coordinator(rig.saved[-1])
        rig.controller.settings = rig.cell_settings(policy="Manual")
        rig.kill()
        await asyncio.sleep(300)
        assert held(rig)
        assert rig.controller.record.attempt == 1
        rig.controller.settings = rig.cell_settings()
        await rig.until(lambda: rig.running(1))
        await to_the_end(rig, continued=ROLLOUTS)


async def test_a_checkpoint_that_is_asked_for_is_a_decision(tmp_path: Path) -> None:
    """Also where its recovery takes more than one try."""
    async with cell(tmp_path, counter_rows(ROLLOUTS, 1), rate=20) as rig:
        choice = await died(rig, policy="Manual")
        await rig.until(lambda: held(rig))
        await rig.controller.restore_chosen(Wish(choice, "someone"))
        await rig.until(lambda: rig.controller.record.pins)
        rig.kill("env")
        await rig.until(lambda: rig.running(3))
        await to_the_end(rig, continued=ROLLOUTS)


async def test_what_is_moved_or_suspended_on_purpose_is_not_held(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(ROLLOUTS, 1), rate=20) as rig:
        await rig.until(lambda: rig.effects() >= 5)
        await rig.checkpoint("one")
        rig.controller.settings = rig.cell_settings(policy="Manual")
        await rig.controller.replace("it is moved")
        await rig.until(lambda: rig.running(1))
        again = tried_again(rig.controller.record, 5, suspended=True)
        assert again is not None
        rig.kill()
        rig.controller = rig.coordinator(again)
        rig.controller.settings = rig.cell_settings(policy="Manual")
        await rig.until(lambda: rig.running(2))
        assert not [said for said in rig.said if said[1] == "RecoveryHeld"]
        await to_the_end(rig, continued=ROLLOUTS)


@pytest.mark.parametrize("policy", ["Restart", "Manual"])
async def test_what_is_moved_on_purpose_goes_on_however_many_tries_it_takes(tmp_path: Path, policy: str) -> None:
    """A cell of many keeps its last two recoveries only."""
    async with cell(tmp_path, counter_rows(ROLLOUTS, 1), rate=20) as rig:
        await rig.until(lambda: rig.effects() >= 5)
        await rig.checkpoint("one")
        rig.controller.settings = rig.cell_settings(policy=policy, kept_recoveries=2)
        await rig.controller.replace("it is moved")
        for attempt in (1, 2, 3, 4):
            await rig.until(lambda a=attempt: rig.controller.record.attempt == a and rig.controller.record.pins)
            rig.kill("env")
        await rig.until(lambda: rig.running(5))
        assert [one.attempt for one in rig.controller.record.recoveries] == [1, 5]
        assert not [said for said in rig.said if said[1] == "RecoveryHeld"]
        await to_the_end(rig, continued=ROLLOUTS)


def test_of_what_was_tried_the_newest_are_kept_and_the_one_that_was_asked_for() -> None:
    def recovery(attempt: int, **parts: Any) -> Recovery:
        return Recovery(attempt=attempt, reason="", checkpoint=None, started_at=0.0, **parts)

    def kept(*before: Recovery) -> list[int]:
        record = CellRecord(recoveries=list(before))
        return [one.attempt for one in record.with_recovery(recovery(9), 3)]

    moved, over = {"planned": True}, {"seconds": 1.0}
    assert kept(recovery(1), recovery(2)) == [1, 2, 9]
    assert kept(recovery(1), recovery(2), recovery(3)) == [2, 3, 9]
    assert kept(recovery(1, **moved), recovery(2), recovery(3)) == [1, 3, 9]
    assert kept(recovery(1), recovery(2, **moved), recovery(3)) == [2, 3, 9]
    assert kept(recovery(1, **moved, **over), recovery(2), recovery(3)) == [2, 3, 9], "it was in service since"


def test_a_suspension_ends_what_people_are_waited_for_and_not_what_other_code_has_written() -> None:
    waiting = CellRecord(held="agent is gone", held_for=Hold.POLICY)
    other = CellRecord(held="written by other code", held_for=Hold.CODE)
    after = [tried_again(record, 5, suspended=True) for record in (waiting, other)]
    assert [record.held for record in after if record is not None] == ["", "written by other code"]


@pytest.mark.parametrize(("limit", "continued"), [(600, ROLLOUTS), (10, 0)])
async def test_nothing_older_than_its_limit_is_restored_after_a_death(
    tmp_path: Path, limit: int, continued: int
) -> None:
    async with cell(tmp_path, counter_rows(ROLLOUTS, 3), rate=5) as rig:
        rig.controller.settings = rig.cell_settings(max_checkpoint_age=limit)
        await rig.until(lambda: rig.effects() >= 1)
        await rig.checkpoint("one")
        await asyncio.sleep(20)
        rig.kill("agent")
        await rig.until(lambda: rig.running(1))
        found = [message for _, reason, message in rig.said if reason == "CheckpointUnusable"]
        assert (rig.controller.record.recoveries[-1].checkpoint is not None) == bool(continued)
        assert len(found) == (0 if continued else 1)
        assert all("checkpoint one is 2" in said and "spec.recovery.maxCheckpointAge" in said for said in found)
        await to_the_end(rig, continued=continued)


async def test_what_was_asked_for_may_be_of_any_age(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(ROLLOUTS, 3), rate=5) as rig:
        rig.controller.settings = rig.cell_settings(max_checkpoint_age=10)
        await rig.until(lambda: rig.effects() >= 1)
        await rig.checkpoint("one")
        await asyncio.sleep(20)
        await rig.controller.replace("it is moved")
        await rig.until(lambda: rig.controller.record.pins)
        rig.kill("env")
        await rig.until(lambda: rig.running(2))
        await to_the_end(rig, continued=ROLLOUTS)
