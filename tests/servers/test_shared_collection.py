"""Several drivers over one output: which rollouts are whose, what happens when cells come and go, and who ends it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from gym_rig.verbs import restore, resume, start
from gym_rig.virtual import now
from gym_servers.collection.output import BucketOutput
from gym_servers.collection.shares import SHARES, Claim, Shares
from gym_servers.participants.collection import RECORD, CollectionParticipant, Job, Rollout, RunResult
from gym_servers.participants.gate import Gate
from gym_servers.participants.records import to_bytes
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.stack.cells import Cells, counted_in
from gym_servers.stack.settings import SettingsError
from gym_servers.storage.cells import reserve_attempt, use_attempt_up
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import StorageError

UID = "stack-uid"


class Stack:
    """`count` rollouts, and a driver for each cell that a test starts. `cells` is how many there are to be now,
    `present` how many are there, where those are more."""

    def __init__(self, folder: Path, count: int, cells: int) -> None:
        self.folder, self.cells, self.present = folder, cells, 0
        self.rollouts = [Rollout(f"{n}-0", {"n": n}, n, 0) for n in range(count)]
        self.store = DirectoryStore(folder / "output")

    def root(self, cell: int) -> DirectoryStore:
        return DirectoryStore(self.folder / f"cell-{cell}")

    def shares(self, cell: int) -> Shares:
        def unused(other: int) -> int:
            return reserve_attempt(self.root(other), 0, f"driver-{cell}")

        def count() -> Cells:
            return Cells(self.cells, max(self.cells, self.present))

        return Shares(self.store, UID, self.rollouts, cell, count, unused)

    def claims(self) -> dict[int, list[Claim]]:
        found: dict[int, list[Claim]] = {}
        for key in sorted(self.store.list(f"cells/{UID}")):
            *_, share, number = key.split("/")
            if number.isdecimal():
                found.setdefault(int(share), []).append(Claim.model_validate_json(self.store.get(key)))
        return found

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(self.store.get(key)) for key in sorted(self.store.list("rows"))]


class Driver:
    """The driver of one cell; its environment answers at once, or, if `silent`, not before `speak` and only for what
    is `fast`, or never admits anything. The first `failures` answers are failures."""

    def __init__(
        self,
        stack: Stack,
        cell: int,
        *,
        open: bool = True,
        silent: bool = False,
        fast: Collection[str] = (),
        failures: int = 0,
        admitted: bool = True,
        **options: Any,
    ) -> None:
        self.stack, self.cell, self._admitted = stack, cell, admitted
        self._speaks, self._fast, self._failures = asyncio.Event(), fast, failures
        if not silent:
            self._speaks.set()
        self.sent: list[Episode] = []
        self.participant = CollectionParticipant(
            Gate(clock=now),
            self._find,
            self._run,
            self._persist,
            **{"concurrency": 8, "max_failures": 3, **options},
        )
        if open:
            start(self.participant)
        self.driving = asyncio.ensure_future(self.participant.drive())

    async def _find(self) -> Job:
        output = BucketOutput(self.stack.store, self.stack.rollouts)
        return Job(self.stack.rollouts, output, self.stack.shares(self.cell))

    async def _run(self, episode: Episode, rollout: Rollout) -> RunResult:
        self.sent.append(episode)
        if not self._admitted:
            raise ProtocolError("admission_closed", "not now")
        if rollout.id not in self._fast:
            await self._speaks.wait()
        await asyncio.sleep(0.1)
        if self._failures > 0:
            self._failures -= 1
            return RunResult(None, {"failure_reason": "it is ill"})
        return RunResult({"reward": 1.0, "cell": self.cell})

    async def _persist(self, attempt: int) -> None:
        use_attempt_up(self.stack.root(self.cell), attempt, f"driver-{self.cell}")

    async def begun(self, count: int) -> None:
        async with asyncio.timeout(1000):
            while len(self.sent) < count:  # noqa: ASYNC110 - the output is read in a thread first
                await asyncio.sleep(0.01)

    def speak(self) -> None:
        self._speaks.set()

    def stop(self) -> None:
        self.driving.cancel()


async def test_the_tasks_are_dealt_out_and_every_rollout_has_one_row(tmp_path: Path) -> None:
    stack = Stack(tmp_path, 150, cells=3)
    drivers = [Driver(stack, cell) for cell in range(3)]
    await asyncio.gather(*(driver.driving for driver in drivers))
    assert Counter(row["_ng_rollout_id"] for row in stack.rows()) == {f"{n}-0": 1 for n in range(150)}
    assert all(row["cell"] == row["_ng_task_index"] % SHARES % 3 for row in stack.rows())
    assert sum(len(driver.sent) for driver in drivers) == 150, "no rollout was sent twice"
    progress = [driver.participant.progress() for driver in drivers]
    assert [each["expected"] for each in progress] == [each["rows"] for each in progress] == [52, 49, 49]
    assert [each["complete"] for each in progress] == [1, 1, 1]
    metrics = json.loads(stack.store.get("rollouts_aggregate_metrics.json"))
    assert (metrics["count"], metrics["expected"], metrics["complete"]) == (150, 150, True)
    assert len(stack.store.get("rollouts.jsonl").splitlines()) == 150


async def test_repeats_of_a_task_are_one_cells(tmp_path: Path) -> None:
    stack = Stack(tmp_path, 0, cells=2)
    stack.rollouts = [Rollout(f"{task}-{repeat}", {}, task, repeat) for task in range(4) for repeat in range(3)]
    drivers = [Driver(stack, cell) for cell in range(2)]
    await asyncio.gather(*(driver.driving for driver in drivers))
    assert {(row["_ng_task_index"], row["cell"]) for row in stack.rows()} == {(0, 0), (1, 1), (2, 0), (3, 1)}


async def test_nobody_is_complete_before_all_are(tmp_path: Path) -> None:
    stack = Stack(tmp_path, 4, cells=2)
    fast, slow = Driver(stack, 0), Driver(stack, 1, silent=True)
    await asyncio.sleep(100)
    assert fast.participant.progress() == {"expected": 2, "rows": 2, "failed": 0, "ended": 0, "complete": 0}
    assert not fast.driving.done()
    assert stack.store.list("").keys() & {"rollouts.jsonl"} == set()
    slow.speak()
    await asyncio.gather(fast.driving, slow.driving)
    assert fast.participant.progress()["complete"] == slow.participant.progress()["complete"] == 1


async def test_cells_that_join_take_what_nobody_has_begun(tmp_path: Path) -> None:
    stack = Stack(tmp_path, 12, cells=2)
    old = [Driver(stack, cell, concurrency=1, silent=True) for cell in range(2)]
    for driver in old:
        await driver.begun(1)
    stack.cells = 4
    new = [Driver(stack, cell, concurrency=1) for cell in (2, 3)]
    await asyncio.sleep(60)
    assert [sorted(e.rollout_id for e in driver.sent) for driver in new] == [
        ["10-0", "2-0", "6-0"],
        ["11-0", "3-0", "7-0"],
    ]
    for driver in old:
        driver.speak()
    await asyncio.gather(*(driver.driving for driver in [*old, *new]))
    assert Counter(row["_ng_rollout_id"] for row in stack.rows()) == {f"{n}-0": 1 for n in range(12)}
    assert all(len(claims) == 1 for claims in stack.claims().values()), "nothing moved"


async def test_what_is_claimed_next_follows_the_number_of_cells_as_it_is_then(tmp_path: Path) -> None:
    stack = Stack(tmp_path, 6, cells=1)
    first = Driver(stack, 0, concurrency=1, silent=True)
    await first.begun(1)
    stack.cells = 2
    first.speak()
    await asyncio.sleep(20)
    assert [episode.rollout_id for episode in first.sent] == ["0-0", "2-0", "4-0"]
    second = Driver(stack, 1)
    await asyncio.gather(first.driving, second.driving)
    assert {(row["_ng_task_index"], row["cell"]) for row in stack.rows()} == {(n, n % 2) for n in range(6)}


async def test_a_driver_that_waits_to_be_admitted_lets_go_of_what_is_anothers_by_now(tmp_path: Path) -> None:
    stack = Stack(tmp_path, 3, cells=3)
    refused = Driver(stack, 2, admitted=False)
    await refused.begun(1)
    stack.cells = 2
    others = [Driver(stack, cell) for cell in range(2)]
    async with asyncio.timeout(200):
        await asyncio.gather(refused.driving, *(driver.driving for driver in others))
    assert {row["_ng_rollout_id"]: row["cell"] for row in stack.rows()} == {"0-0": 0, "1-0": 1, "2-0": 0}
    assert refused.participant.progress()["expected"] == 0


async def test_rollouts_of_a_cell_that_is_gone_start_over_elsewhere_above_its_attempts(tmp_path: Path) -> None:
    stack = Stack(tmp_path, 6, cells=3)
    use_attempt_up(stack.root(2), 5, "a recovery")  # the cell that goes was recovered before
    going = Driver(stack, 2, silent=True)
    await going.begun(2)
    stay = [Driver(stack, cell) for cell in range(2)]
    await asyncio.sleep(60)
    assert {row["_ng_rollout_id"] for row in stack.rows()} == {"0-0", "1-0", "3-0", "4-0"}
    assert all(driver.participant.progress()["complete"] == 0 for driver in stay)
    going.stop()
    stack.cells = 2
    await asyncio.gather(*(driver.driving for driver in stay))
    moved = {row["_ng_rollout_id"]: (row["cell"], row["_ng_attempt_index"]) for row in stack.rows()}
    assert moved["2-0"][0] == 0 and moved["5-0"][0] == 1  # share modulo cells
    assert all(moved[rollout][1] > 5 for rollout in ("2-0", "5-0"))
    assert [claim.cell for claim in stack.claims()[2]] == [2, 0]
    assert sum(driver.participant.progress()["expected"] for driver in stay) == 6


# ---- a cell that is to go ---------------------------------------------------------------------------------


def repeated(folder: Path, *, tasks: int = 12, repeats: int = 3) -> Stack:
    """Three cells; the last has claimed the shares it has room for, and each share has more than one rollout."""
    stack = Stack(folder, 0, cells=3)
    stack.rollouts = [
        Rollout(f"{task}-{repeat}", {}, task, repeat) for task in range(tasks) for repeat in range(repeats)
    ]
    return stack


def leaves(stack: Stack, cell: int = 2) -> None:
    stack.cells, stack.present = cell, cell + 1


def sent(*drivers: Driver) -> Counter[str]:
    return Counter(episode.rollout_id for driver in drivers for episode in driver.sent)


async def test_a_cell_that_is_to_go_ends_what_it_has_begun_and_begins_nothing(tmp_path: Path) -> None:
    """What nobody has claimed is the others' at once; what it has claimed is theirs when it is gone, and not before:
    no rollout runs in two cells."""
    stack = repeated(tmp_path)
    going = Driver(stack, 2, silent=True, concurrency=2)
    await going.begun(2)
    leaves(stack)
    stay = [Driver(stack, cell) for cell in range(2)]
    await asyncio.sleep(100)
    unclaimed = {rollout.id for rollout in stack.rollouts if rollout.task_index != 2}
    assert set(sent(*stay)) == unclaimed
    assert [driver.participant.survey().counts["outstanding"] for driver in stay] == [0, 0]
    going.speak()
    await asyncio.sleep(100)
    assert set(sent(going)) == {"2-0", "2-1"}
    assert {row["_ng_rollout_id"] for row in stack.rows()} == {*unclaimed, "2-0", "2-1"}
    assert going.participant.survey().counts["outstanding"] == 0, "its last checkpoint need not wait"
    assert set(sent(*stay)) == unclaimed
    going.stop()
    stack.present = 0
    await asyncio.gather(*(driver.driving for driver in stay))
    assert sent(going, *stay) == {rollout.id: 1 for rollout in stack.rollouts}
    progress = [driver.participant.progress() for driver in stay]
    assert sum(each["expected"] for each in progress) == sum(each["rows"] for each in progress) == len(stack.rollouts)
    assert [each["complete"] for each in progress] == [1, 1]


async def test_what_a_cell_has_ended_before_it_went_is_counted_by_those_that_stay(tmp_path: Path) -> None:
    stack = Stack(tmp_path, 12, cells=3)
    going = Driver(stack, 2)
    await going.begun(4)
    stay = [Driver(stack, cell, silent=True) for cell in range(2)]
    await stay[0].begun(4)
    await asyncio.sleep(10)  # it has said that its shares have ended
    leaves(stack)
    await asyncio.sleep(60)
    assert [driver.participant.progress()["expected"] for driver in [*stay, going]] == [4, 4, 4]
    going.stop()
    stack.present = 0
    await asyncio.sleep(60)
    assert [driver.participant.progress()["expected"] for driver in stay] == [6, 6]
    assert [driver.participant.progress()["rows"] for driver in stay] == [2, 2]
    for driver in stay:
        driver.speak()
    await asyncio.gather(*(driver.driving for driver in stay))
    assert [driver.participant.progress()["complete"] for driver in stay] == [1, 1]
    assert sent(going, *stay) == {rollout.id: 1 for rollout in stack.rollouts}


async def test_when_all_is_over_those_that_stay_count_it_all(tmp_path: Path) -> None:
    """A driver that has come to its end looks no more, so it would not see that the others went."""
    stack = Stack(tmp_path, 12, cells=3)
    drivers = [Driver(stack, cell, silent=True) for cell in range(3)]
    for driver in drivers:
        await driver.begun(4)
    leaves(stack, 1)
    stack.present = 3
    for driver in drivers:
        driver.speak()
    await asyncio.gather(*(driver.driving for driver in drivers))
    progress = [driver.participant.progress() for driver in drivers]
    assert [(each["expected"], each["rows"], each["complete"]) for each in progress] == [
        (12, 12, 1),
        (0, 0, 1),
        (0, 0, 1),
    ]


async def test_a_cell_that_is_to_stay_after_all_goes_on_with_as_many_at_once(tmp_path: Path) -> None:
    stack = repeated(tmp_path)
    going = Driver(stack, 2, silent=True, fast=("2-1", "2-2"), concurrency=3)
    await going.begun(3)
    leaves(stack)
    await asyncio.sleep(100)
    assert list(sent(going)) == ["2-0", "2-1", "2-2"], "two have ended, and no other has begun"
    stack.cells = 3
    await asyncio.sleep(20)
    assert list(sent(going)) == ["2-0", "2-1", "2-2", "5-0", "5-1"]
    leaves(stack)
    going.speak()
    await asyncio.sleep(100)
    assert len(sent(going)) == 5
    stack.cells = 3
    others = [Driver(stack, cell) for cell in range(2)]
    await asyncio.gather(going.driving, *(driver.driving for driver in others))
    assert sent(going, *others) == {rollout.id: 1 for rollout in stack.rollouts}
    assert all(row["cell"] == row["_ng_task_index"] % 3 for row in stack.rows()), "nothing has moved"


async def test_what_was_restored_has_begun_and_is_ended_by_a_cell_that_is_to_go(tmp_path: Path) -> None:
    stack = repeated(tmp_path)
    before = Driver(stack, 2, silent=True, concurrency=2)
    await before.begun(2)
    before.stop()
    leaves(stack)
    going = Driver(stack, 2, open=False)
    records = {RECORD: to_bytes({"attempts": {"2-1": 0}, "failed": []})}
    assert restore(going.participant, records, "2-1", cell_attempt=1) == ["2-1-a1"]
    resume(going.participant, "restore")
    await asyncio.sleep(60)
    assert going.sent == [Episode("2-1", 1)]
    assert [row["_ng_rollout_id"] for row in stack.rows()] == ["2-1"]
    going.stop()


async def test_a_cell_that_is_to_go_tries_again_what_has_failed(tmp_path: Path) -> None:
    """It has begun: elsewhere it would have all its tries again."""
    stack = repeated(tmp_path)
    going = Driver(stack, 2, silent=True, failures=2, concurrency=1)
    await going.begun(1)
    leaves(stack)
    await asyncio.sleep(60)
    going.speak()
    await asyncio.sleep(60)
    assert sent(going) == {"2-0": 3}
    assert [row["_ng_rollout_id"] for row in stack.rows()] == ["2-0"]
    going.stop()


# -----------------------------------------------------------------------------------------------------------


async def test_a_cell_that_comes_back_lets_go_of_what_is_anothers_by_now(tmp_path: Path) -> None:
    stack = Stack(tmp_path, 6, cells=3)
    gone = Driver(stack, 2, silent=True, concurrency=1)
    await gone.begun(1)
    gone.stop()
    stack.cells = 2
    stay = [Driver(stack, cell, silent=True) for cell in range(2)]
    await stay[0].begun(3)  # 0-0, 3-0 of its own, and 2-0
    stack.cells = 3
    back = Driver(stack, 2, open=False)
    records = {RECORD: to_bytes({"attempts": {"2-0": 0}, "failed": []})}
    assert restore(back.participant, records, "2-0", cell_attempt=6) == ["2-0-a6"]
    resume(back.participant, "restore")
    await asyncio.sleep(40)
    assert back.participant.to_retire() == ["2-0-a6"]
    assert Episode("2-0", 6) not in back.sent
    for driver in stay:
        driver.speak()
    await asyncio.gather(*(driver.driving for driver in [*stay, back]))
    assert Counter(row["_ng_rollout_id"] for row in stack.rows()) == {f"{n}-0": 1 for n in range(6)}


@pytest.mark.parametrize("cells", [1, 2])
async def test_what_is_restored_into_a_stack_that_has_not_run_yet_continues(tmp_path: Path, cells: int) -> None:
    """Nobody has claimed anything there. A checkpoint of fewer cells may hold what would be another's otherwise."""
    stack = Stack(tmp_path, 4, cells)
    drivers = [Driver(stack, cell, open=False, silent=True) for cell in range(cells)]
    records = {RECORD: to_bytes({"attempts": {"0-0": 0, "1-0": 0}, "failed": []})}
    first = drivers[0]
    assert restore(first.participant, records, "0-0", "1-0", cell_attempt=3) == ["0-0-a3", "1-0-a3"]
    await asyncio.sleep(10)
    assert first.participant.to_retire() == []
    resume(first.participant, "restore")
    await first.begun(2)
    assert first.sent[:2] == [Episode("0-0", 3), Episode("1-0", 3)]
    for driver in drivers[1:]:
        start(driver.participant)
    for driver in drivers:
        assert driver.participant.to_retire() == []
        driver.speak()
    await asyncio.gather(*(driver.driving for driver in drivers))
    assert Counter(row["_ng_rollout_id"] for row in stack.rows()) == {f"{n}-0": 1 for n in range(4)}
    found = {row["_ng_rollout_id"]: (row["cell"], row["_ng_attempt_index"]) for row in stack.rows()}
    assert (found["0-0"], found["1-0"]) == ((0, 3), (0, 3))
    assert [each.participant.progress()["complete"] for each in drivers] == [1] * cells


async def test_of_two_cells_that_both_restored_a_rollout_one_lets_go_of_it(tmp_path: Path) -> None:
    stack = Stack(tmp_path, 2, cells=2)
    records = {RECORD: to_bytes({"attempts": {"1-0": 0}, "failed": []})}
    drivers = [Driver(stack, cell, open=False, silent=True) for cell in range(2)]
    for driver in drivers:
        restore(driver.participant, records, "1-0", cell_attempt=2)
        resume(driver.participant, "restore")
        await asyncio.sleep(10)
    assert [driver.participant.to_retire() for driver in drivers] == [[], ["1-0-a2"]]
    for driver in drivers:
        driver.speak()
    await asyncio.gather(*(driver.driving for driver in drivers))
    assert {row["_ng_rollout_id"]: row["cell"] for row in stack.rows()} == {"0-0": 0, "1-0": 0}


async def test_two_drivers_that_both_believe_it_is_theirs_leave_one_row(tmp_path: Path) -> None:
    """One was told late that its cell is gone: what it has sent goes on, and the first row stands."""
    stack = Stack(tmp_path, 3, cells=3)
    late = Driver(stack, 2, silent=True)
    await late.begun(1)
    stack.cells = 2
    other = Driver(stack, 0)
    await other.begun(2)
    late.speak()
    await asyncio.sleep(10)
    assert [row["cell"] for row in stack.rows() if row["_ng_rollout_id"] == "2-0"] in ([0], [2])
    assert {episode.attempt for episode in late.sent}.isdisjoint(
        {episode.attempt for episode in other.sent if episode.rollout_id == "2-0"}
    )
    late.stop()
    other.stop()


async def test_a_claim_whose_answer_was_lost_is_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original, lost = DirectoryStore.create, [1]

    def create(self: DirectoryStore, key: str, data: bytes) -> None:
        original(self, key, data)
        if key.endswith("/2/1") and lost:
            lost.pop()
            raise StorageError("no answer")

    stack = Stack(tmp_path, 3, cells=3)
    first = stack.shares(2)
    await first.look()
    assert [r.id for r in (await first.claim())[0]] == ["2-0"]
    stack.cells = 2
    monkeypatch.setattr(DirectoryStore, "create", create)
    second = stack.shares(0)
    await second.look()
    assert [r.id for r in (await second.claim())[0]] == ["0-0"]
    with pytest.raises(StorageError):
        await second.claim()
    rollouts, again = await second.claim()
    assert ([r.id for r in rollouts], again) == (["2-0"], True)
    assert len(stack.claims()[2]) == 2, "claimed once"
    assert second.lowest(rollouts[0]) == stack.claims()[2][1].attempt


async def test_the_map_is_the_stacks_own(tmp_path: Path) -> None:
    """A later stack over the same output: rows stand, but what another stack's cells have claimed means nothing."""
    stack = Stack(tmp_path, 4, cells=4)
    gone = Driver(stack, 3, silent=True)
    await gone.begun(1)
    gone.stop()
    later = Shares(stack.store, "another-uid", stack.rollouts, 0, lambda: Cells(1, 1), lambda cell: 0)
    await later.look()
    assert all(later.expects(rollout) for rollout in stack.rollouts)


async def test_a_driver_that_died_before_the_files_were_written_writes_them(tmp_path: Path) -> None:
    stack = Stack(tmp_path, 2, cells=1)
    first = Driver(stack, 0)
    await first.driving
    stack.store._path(f"cells/{UID}/merged").unlink()
    stack.store._path("rollouts.jsonl").unlink()
    again = Driver(stack, 0)
    await again.driving
    assert again.sent == []
    assert len(stack.store.get("rollouts.jsonl").splitlines()) == 2


def test_the_number_of_cells_is_read_from_a_file_that_may_change(tmp_path: Path) -> None:
    file = tmp_path / "cells"
    with pytest.raises(SettingsError, match="cannot read the number of cells"):
        counted_in(file)
    file.write_text("2\n")
    count = counted_in(file)
    assert count() == Cells(2, 2)
    file.write_text("2 3\n")
    assert count() == Cells(2, 3)
    file.write_text("")
    assert count() == Cells(2, 3)
    file.unlink()
    assert count() == Cells(2, 3)
