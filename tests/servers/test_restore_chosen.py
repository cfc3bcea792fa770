"""A cell brought to a checkpoint that somebody chose: as a recovery, and chosen until there is a newer one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig, cell
from gym_servers.coordination.cell_host import Wish
from gym_servers.coordination.checkpoint import Outcome
from gym_servers.coordination.record import CellRecord, Choice, Stage
from gym_servers.engine.rows import counter_rows
from gym_servers.storage.cells import use_attempt_up
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import StorageError

ROLLOUTS = 4


def rows() -> Any:
    return counter_rows(ROLLOUTS, 1)


def wish(outcome: Outcome, by: str = "someone", above: int = 0) -> Wish:
    publication = outcome.publication
    choice = Choice(
        uri=outcome.uri, digest=outcome.digest, checkpoint_id=publication.checkpoint_id, name=publication.name
    )
    return Wish(choice, by, above)


async def taken(rig: Rig, name: str, more: int = 3) -> Outcome:
    """A checkpoint, after that many more tool effects."""
    before = rig.effects()
    await rig.until(lambda: rig.running() and rig.effects() >= before + more)
    return await rig.checkpoint(name)


def spoil(outcome: Outcome) -> None:
    next(Path(outcome.uri).rglob("counter/pack*")).write_bytes(b"damaged")


def sources(record: CellRecord) -> list[str | None]:
    return [recovery.checkpoint.name if recovery.checkpoint else None for recovery in record.recoveries]


async def to_the_end(rig: Rig) -> None:
    await rig.until(rig.complete)
    counted = rig.account(ROLLOUTS)
    assert counted.problems == []
    assert (counted.rows, counted.reward_mean) == (ROLLOUTS, 1.0)


async def test_k12_what_was_chosen_is_restored_although_there_is_a_newer_one_and_stays_chosen(tmp_path: Path) -> None:
    async with cell(tmp_path, rows(), rate=20) as rig:
        first = await taken(rig, "first")
        await taken(rig, "second")
        await rig.controller.restore_chosen(wish(first))
        await rig.until(lambda: rig.running(1))
        rig.kill("agent")
        await rig.until(lambda: rig.running(2))
        assert sources(rig.controller.record) == ["first", "first"], "the second is of a history that was left"
        await taken(rig, "third")
        rig.kill("agent")
        await rig.until(lambda: rig.running(3))
        assert sources(rig.controller.record) == ["first", "first", "third"]
        await to_the_end(rig)


async def test_a_wish_is_granted_once(tmp_path: Path) -> None:
    async with cell(tmp_path, rows(), rate=20) as rig:
        first = await taken(rig, "first")
        for _ in range(3):
            await rig.controller.restore_chosen(wish(first))
        await rig.until(lambda: rig.running(1))
        await rig.controller.restore_chosen(wish(first))
        assert rig.controller.record.attempt == 1
        await rig.controller.restore_chosen(wish(first, by="another"))
        await rig.until(lambda: rig.running(2))
        assert sources(rig.controller.record) == ["first", "first"]
        await to_the_end(rig)


@pytest.mark.parametrize("landed", [True, False])
@pytest.mark.parametrize("save", range(1, 5))
async def test_a_coordinator_killed_at_any_save_is_followed_by_one_that_goes_on(
    tmp_path: Path, save: int, landed: bool
) -> None:
    async with cell(tmp_path, rows(), rate=20) as rig:
        first = await taken(rig, "first")
        await taken(rig, "second")
        left = save

        def die(_: CellRecord) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                raise ConnectionError("the coordinator is dead")

        rig.on_save = die
        with pytest.raises(ConnectionError):
            await rig.controller.restore_chosen(wish(first))
            await rig.until(lambda: rig.running(1))
        rig.on_save = lambda _: None
        rig.controller = rig.coordinator(rig.saved[-1 if landed else -2])
        await rig.until(lambda: True)
        await rig.controller.restore_chosen(wish(first))
        await rig.until(lambda: rig.running(1))
        record = rig.controller.record
        assert record.chosen is not None
        assert (record.chosen.by, record.chosen.choice.name) == ("someone", "first")
        assert set(sources(record)) == {"first"}
        await to_the_end(rig)


async def test_a_death_on_the_way_is_another_recovery_of_what_was_chosen(tmp_path: Path) -> None:
    async with cell(tmp_path, rows(), rate=20) as rig:
        first = await taken(rig, "first")
        await taken(rig, "second")
        await rig.controller.restore_chosen(wish(first))
        await rig.until(lambda: rig.controller.record.pins)
        rig.kill("env")
        await rig.until(lambda: rig.running(2))
        assert sources(rig.controller.record) == ["first", "first"]
        await to_the_end(rig)


async def test_k11_all_or_nothing_records_that_are_refused_lead_back_to_the_cells_own(tmp_path: Path) -> None:
    async with cell(tmp_path, rows(), rate=20) as rig:
        first = await taken(rig, "first")
        await taken(rig, "second")
        spoil(first)
        await rig.controller.restore_chosen(wish(first))
        await rig.until(lambda: rig.running(2))
        assert sources(rig.controller.record) == ["first", "second"]
        assert rig.controller.record.chosen is None
        rig.kill("agent")
        await rig.until(lambda: rig.running(3))
        assert sources(rig.controller.record)[-1] == "second"
        await to_the_end(rig)


async def test_k10_a_cell_that_has_given_up_can_be_brought_to_a_checkpoint(tmp_path: Path) -> None:
    async with cell(tmp_path, rows(), rate=20, recovery={"backoffLimit": 0}) as rig:
        first = await taken(rig, "first")
        rig.kill("agent")
        await rig.until(lambda: rig.controller.record.stage is Stage.STALLED)
        await rig.controller.restore_chosen(wish(first))
        await rig.until(lambda: rig.running(1))
        assert rig.controller.record.failures == 0
        await to_the_end(rig)


@pytest.mark.parametrize("stage", ["on the way", "in service"])
async def test_what_is_given_up_leads_back_to_the_cells_own(tmp_path: Path, stage: str) -> None:
    async with cell(tmp_path, rows(), rate=20) as rig:
        first = await taken(rig, "first")
        await taken(rig, "second")
        await rig.controller.restore_chosen(wish(first))
        if stage == "in service":
            await rig.until(lambda: rig.running(1))
        await rig.controller.give_up_chosen("another", "not its wish")
        assert rig.controller.record.attempt == 1
        await rig.controller.give_up_chosen("someone", "given up")
        await rig.until(lambda: rig.running(2))
        assert sources(rig.controller.record) == ["first", "second"]
        assert rig.controller.record.chosen is None
        await to_the_end(rig)


async def test_what_was_restored_here_and_is_given_up_for_another_cell_is_as_good_as_before(tmp_path: Path) -> None:
    """It may be the newest that the cell has: nothing older is continued in its place."""
    async with cell(tmp_path, rows(), rate=20) as rig:
        await taken(rig, "first")
        second = await taken(rig, "second")
        await rig.controller.restore_chosen(wish(second))
        await rig.until(lambda: rig.running(1))
        await rig.controller.give_up_chosen("someone", "another cell does not come up with it")
        await rig.until(lambda: rig.running(2))
        assert sources(rig.controller.record) == ["second", "second"]
        await to_the_end(rig)


async def test_a_policy_that_restarts_is_about_deaths_and_not_about_wishes(tmp_path: Path) -> None:
    async with cell(tmp_path, rows(), rate=20) as rig:
        first = await taken(rig, "first")
        rig.controller.settings = rig.cell_settings(policy="Restart")
        await rig.controller.restore_chosen(wish(first))
        await rig.until(lambda: rig.controller.record.pins)
        rig.kill("env")
        await rig.until(lambda: rig.running(2))
        assert sources(rig.controller.record) == ["first", "first"]
        rig.kill("env")
        await rig.until(lambda: rig.running(3))
        assert sources(rig.controller.record)[-1] is None
        await to_the_end(rig)


async def test_the_attempt_is_above_all_that_its_rollouts_have_used(tmp_path: Path) -> None:
    async with cell(tmp_path, rows(), rate=20) as rig:
        first = await taken(rig, "first")
        use_attempt_up(DirectoryStore(Path(rig.root)), 8, "somebody")
        await rig.controller.restore_chosen(wish(first, above=7))
        assert rig.controller.record.attempt == 9
        await rig.until(lambda: rig.running(9))
        await to_the_end(rig)


async def test_storage_that_is_away_leaves_the_cell_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cell(tmp_path, rows(), rate=20) as rig:
        first = await taken(rig, "first")
        original = DirectoryStore.create

        def create(store: DirectoryStore, key: str, data: bytes) -> None:
            if key.startswith("attempts/"):
                raise StorageError("the bucket does not answer")
            original(store, key, data)

        monkeypatch.setattr(DirectoryStore, "create", create)
        with pytest.raises(StorageError):
            await rig.controller.restore_chosen(wish(first))
        assert (rig.controller.record.attempt, rig.controller.record.chosen) == (0, None)
        monkeypatch.undo()
        await rig.controller.restore_chosen(wish(first))
        await rig.until(lambda: rig.running(1))
        await to_the_end(rig)
