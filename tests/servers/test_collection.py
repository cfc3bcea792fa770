"""The driver: a rollout is durable in the output, or running in the restorable set, or it starts over."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gym_rig.verbs import prepare, restore, resume, start
from gym_rig.virtual import now, settle
from gym_servers.collection.driver import EnvironmentRun
from gym_servers.collection.output import BucketOutput, DirectoryOutput
from gym_servers.http.peers import Reply
from gym_servers.participants.base import Scope
from gym_servers.participants.collection import (
    RECORD,
    CollectionParticipant,
    Job,
    NotAnswered,
    Rollout,
    RunResult,
    TasksError,
)
from gym_servers.participants.gate import Gate
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import StorageError

Answer = RunResult | Exception


class Driver:
    """A collection of `count` rollouts whose environment answers when a test says so."""

    def __init__(
        self,
        folder: Path,
        count: int = 2,
        *,
        started: bool = True,
        bucket: bool = False,
        unreadable: Exception | None = None,
        **options: Any,
    ) -> None:
        self.folder, self.unreadable = folder, unreadable
        self.rollouts = [Rollout(f"{n}-0", {"n": n}, n, 0) for n in range(count)]
        self.output: Any = (
            BucketOutput(DirectoryStore(folder), self.rollouts) if bucket else DirectoryOutput(folder, self.rollouts)
        )
        self.sent: list[str] = []
        self.persisted: list[int] = []
        self.answers: dict[str, asyncio.Queue[Answer]] = {}
        self.participant = CollectionParticipant(
            Gate(clock=now),
            self._find,
            self._run,
            self._persist,
            **{"concurrency": 8, "max_failures": 3, **options},
        )
        if started:
            start(self.participant)
        self.driving = asyncio.ensure_future(self.participant.drive())

    async def _find(self) -> Job:
        if self.unreadable is not None:
            raise self.unreadable
        return Job(self.rollouts, self.output)

    async def _run(self, episode: Episode, rollout: Rollout) -> RunResult:
        self.sent.append(episode.key)
        answer = await self.queue(episode.key).get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def _persist(self, attempt: int) -> None:
        self.persisted.append(attempt)

    def queue(self, key: str) -> asyncio.Queue[Answer]:
        return self.answers.setdefault(key, asyncio.Queue())

    async def begun(self, count: int = 1) -> None:
        async with asyncio.timeout(1000):
            while len(self.sent) < count:  # noqa: ASYNC110 - the output is read in a thread first
                await asyncio.sleep(0.01)

    def answer(self, key: str, answer: Answer | None = None) -> None:
        self.queue(key).put_nowait(answer or RunResult({"reward": 1.0, "key": key}))

    def rows(self) -> list[dict[str, Any]]:
        path = self.folder / "rollouts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def stop(self) -> None:
        self.driving.cancel()


def refusal(code: str) -> ProtocolError:
    return ProtocolError(code, "why")  # type: ignore[arg-type]


def committing(driver: Driver, *keys: str, live: tuple[str, ...] = ()) -> asyncio.Task[dict[str, bytes]]:
    prepare(driver.participant)
    return asyncio.ensure_future(driver.participant.export(Scope(frozenset(keys), frozenset(live))))


def record(records: Mapping[str, bytes]) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(records[RECORD])
    return parsed


# ---- driving ----------------------------------------------------------------------------------------------


async def test_every_rollout_gets_one_row_and_the_files_say_so(tmp_path: Path) -> None:
    driver = Driver(tmp_path, 3)
    await driver.begun(3)
    for rollout in driver.rollouts:
        driver.answer(rollout.id)
    await driver.driving
    assert sorted(row["_ng_rollout_id"] for row in driver.rows()) == ["0-0", "1-0", "2-0"]
    assert {row["_ng_attempt_index"] for row in driver.rows()} == {0}
    metrics = json.loads((tmp_path / "rollouts_aggregate_metrics.json").read_text())
    assert (metrics["expected"], metrics["count"], metrics["complete"]) == (3, 3, True)
    assert len((tmp_path / "rollouts_materialized_inputs.jsonl").read_text().splitlines()) == 3
    progress = driver.participant.progress()
    assert (progress["expected"], progress["rows"], progress["complete"]) == (3, 3, 1)
    assert driver.participant.to_forget() == ["0-0", "1-0", "2-0"]
    driver.participant.forget(["0-0", "1-0"])
    assert driver.participant.to_forget() == ["2-0"]


@pytest.mark.parametrize("error", [TasksError("tasks.jsonl line 3 is not JSON"), StorageError("no tasks.jsonl")])
async def test_tasks_that_are_not_there_yet_are_read_again_until_they_are(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(tmp_path, 1, unreadable=error)
    await asyncio.sleep(100)
    assert (driver.participant.problem, driver.participant.problem_reason) == (str(error), "TasksInvalid")
    assert caplog.messages == [str(error)], "once, however often they are read"
    assert driver.participant.progress() == {"expected": 0, "rows": 0, "failed": 0, "ended": 0, "complete": 0}
    driver.unreadable = None
    await driver.begun()
    assert (driver.participant.problem, driver.participant.progress()["expected"]) == ("", 1)
    driver.answer("0-0")
    await driver.driving
    assert driver.participant.progress()["complete"]


async def test_concurrency_is_bounded(tmp_path: Path) -> None:
    driver = Driver(tmp_path, 5, concurrency=2)
    await driver.begun(2)
    await asyncio.sleep(100)
    assert driver.sent == ["0-0", "1-0"]
    driver.stop()


async def test_a_failure_is_tried_again_under_a_higher_attempt_and_bounded(tmp_path: Path) -> None:
    driver = Driver(tmp_path, 1, max_failures=2)
    for key in ("0-0", "0-0-a1"):
        driver.answer(key, RunResult(None, {"failure_reason": "no"}))
    await driver.driving
    assert driver.sent == ["0-0", "0-0-a1"]
    assert driver.persisted == [1]
    assert driver.rows() == []
    assert driver.participant.progress()["failed"] == 1
    assert not json.loads((tmp_path / "rollouts_aggregate_metrics.json").read_text())["complete"]
    failures = (tmp_path / "rollouts_failures.jsonl").read_text().splitlines()
    assert [json.loads(line)["_ng_attempt_index"] for line in failures] == [0, 1]


async def test_a_terminal_failure_is_not_tried_again(tmp_path: Path) -> None:
    driver = Driver(tmp_path, 1)
    driver.answer("0-0", RunResult(None, {"terminal": True}))
    await driver.driving
    assert driver.sent == ["0-0"]


@pytest.mark.parametrize("error", [NotAnswered("away"), refusal("admission_closed")])
async def test_no_answer_means_the_same_episode_again(tmp_path: Path, error: Exception) -> None:
    driver = Driver(tmp_path, 1)
    for _ in range(5):
        driver.answer("0-0", error)
    driver.answer("0-0")
    await driver.driving
    assert driver.sent == ["0-0"] * 6
    assert driver.persisted == []


@pytest.mark.parametrize("code", ["stale_attempt", "session_lost", "checkpoint_conflict"])
async def test_c12_an_attempt_that_can_never_be_answered_starts_over_and_makes_no_row(
    tmp_path: Path, code: str
) -> None:
    driver = Driver(tmp_path, 1)
    driver.answer("0-0", refusal(code))
    driver.answer("0-0-a1")
    await driver.driving
    assert [row["_ng_attempt_index"] for row in driver.rows()] == [1]
    assert driver.persisted == [1]
    assert not (tmp_path / "rollouts_failures.jsonl").exists()


async def test_attempts_begin_at_the_floor(tmp_path: Path) -> None:
    driver = Driver(tmp_path, 1, started=False)
    start(driver.participant, cell_attempt=4)
    await driver.begun()
    assert driver.sent == ["0-0-a4"]
    assert driver.persisted == []  # the coordinator persisted it
    driver.stop()


async def test_rows_of_an_earlier_life_stand_and_half_a_row_is_none(tmp_path: Path) -> None:
    row = json.dumps({"_ng_rollout_id": "0-0", "reward": 1.0, "_ng_attempt_index": 0})
    (tmp_path / "rollouts.jsonl").write_text(row + "\n" + row.replace("0-0", "1-0")[:20])
    driver = Driver(tmp_path, 2)
    await driver.begun()
    assert driver.sent == ["1-0"]
    driver.answer("1-0")
    await driver.driving
    assert [row["_ng_rollout_id"] for row in driver.rows()] == ["0-0", "1-0"]


# ---- the output ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket", [False, True])
async def test_the_first_row_of_a_rollout_stands(tmp_path: Path, bucket: bool) -> None:
    driver = Driver(tmp_path, 1, bucket=bucket)
    driver.stop()
    await driver.output.done()
    for attempt in (0, 1):
        await driver.output.save(driver.rollouts[0], Episode("0-0", attempt), {"reward": float(attempt)})
    await driver.output.finish(True)
    assert [(row["_ng_attempt_index"], row["reward"]) for row in driver.rows()] == [(0, 0.0)]
    assert await driver.output.done() == {"0-0"}


@pytest.mark.parametrize("where", ["save", "save_failure", "done", "finish"])
async def test_an_output_that_is_away_is_waited_for_and_named(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for a while, or a bucket that does not answer, costs no row and ends nothing."""
    away = True
    original = getattr(DirectoryOutput, where)

    async def sometimes(self: DirectoryOutput, *arguments: Any) -> Any:
        if away:
            raise StorageError("the disk is full")
        return await original(self, *arguments)

    monkeypatch.setattr(DirectoryOutput, where, sometimes)
    driver = Driver(tmp_path, 1)
    driver.answer("0-0", RunResult(None, {"failure_reason": "no"}))
    driver.answer("0-0-a1")
    await asyncio.sleep(100)
    assert (driver.participant.problem, driver.participant.problem_reason) == ("the disk is full", "OutputFailing")
    assert not driver.driving.done()
    away = False
    await driver.driving
    assert driver.participant.problem == ""
    assert [row["_ng_attempt_index"] for row in driver.rows()] == [1]


async def test_an_end_that_nobody_expected_is_told_as_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: DirectoryOutput, complete: bool) -> None:
        raise RuntimeError("no such column")

    monkeypatch.setattr(DirectoryOutput, "finish", broken)
    driver = Driver(tmp_path, 1)
    driver.answer("0-0")
    with pytest.raises(RuntimeError):
        await driver.driving
    assert "RuntimeError: no such column" in driver.participant.problem
    assert driver.participant.problem_reason == "CollectionFailed"
    assert not driver.participant.progress()["ended"]


async def test_an_error_that_nobody_expected_is_the_failure_of_one_rollout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(tmp_path, 3, max_failures=2)
    for key in ("1-0", "1-0-a1"):
        driver.answer(key, ValueError("Out of range float values are not JSON compliant: a user's own"))
    driver.answer("0-0")
    driver.answer("2-0")
    await driver.driving
    assert sorted(row["_ng_rollout_id"] for row in driver.rows()) == ["0-0", "2-0"]
    progress = driver.participant.progress()
    assert (progress["failed"], progress["ended"], progress["complete"]) == (1, 1, 0)
    failures = list(map(json.loads, (tmp_path / "rollouts_failures.jsonl").read_text().splitlines()))
    assert [failure["failure_reason"].rpartition(": ")[2] for failure in failures] == ["ValueError"] * 2
    assert "a user's own" in caplog.text


@pytest.mark.parametrize("body", [None, 3, "text", [], {}, {"result": [1]}, {"result": None, "failure": "no"}])
async def test_an_answer_that_is_neither_a_row_nor_a_failure_is_a_failure(body: Any) -> None:
    class Environment:
        async def post(self, *_: Any, **__: Any) -> Reply:
            return Reply(body, {}, {})

    rollout = Rollout("0-0", {"responses_create_params": {}}, 0, 0)
    result = await EnvironmentRun(Environment(), "env")(Episode("0-0", 0), rollout)  # type: ignore[arg-type]
    assert result.row is None
    assert result.failure is not None
    assert "neither a row nor a failure" in result.failure["failure_reason"]


@pytest.mark.parametrize("bucket", [False, True])
async def test_rows_whose_reward_is_no_number_are_rows_all_the_same(tmp_path: Path, bucket: bool) -> None:
    driver = Driver(tmp_path, 6, bucket=bucket)
    for rollout, reward in zip(driver.rollouts, [None, "much", [1.0], 10**400, 0.5, True], strict=True):
        driver.answer(rollout.id, RunResult({"reward": reward}))
    await driver.driving
    assert driver.participant.progress()["complete"] == 1
    metrics = json.loads((tmp_path / "rollouts_aggregate_metrics.json").read_text())
    assert (metrics["count"], metrics["expected"], metrics["reward_mean"]) == (2, 6, 0.75)


async def test_the_first_error_behind_an_end_that_nobody_expected_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: DirectoryOutput, *_: Any) -> None:
        raise RuntimeError("no such column")

    monkeypatch.setattr(DirectoryOutput, "save", broken)
    driver = Driver(tmp_path, 2)
    driver.answer("0-0")
    with pytest.raises(ExceptionGroup):
        await driver.driving
    assert driver.participant.problem == "the collection ended by an error: RuntimeError: no such column"


@pytest.mark.parametrize("line", ["{", "[1]", "{}", '{"_ng_rollout_id": 3}', "\x00"])
async def test_a_row_file_that_was_spoilt_is_named_by_its_line_until_it_is_mended(tmp_path: Path, line: str) -> None:
    """Its rollout is not collected again meanwhile: the row may be there."""
    path = tmp_path / "rollouts.jsonl"
    good = json.dumps({"_ng_rollout_id": "0-0", "reward": 1.0, "_ng_attempt_index": 0})
    path.write_text(f"{good}\n{line}\n")
    driver = Driver(tmp_path, 2)
    await asyncio.sleep(100)
    assert f"{path} line 2 is no row of a collection" in driver.participant.problem
    assert driver.sent == []
    path.write_text(good + "\n")
    driver.answer("1-0")
    await driver.driving
    assert driver.participant.problem == ""
    assert len(driver.rows()) == 2


async def test_a_disk_that_fails_under_a_row_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(tmp_path, 2)
    driver.stop()
    await driver.output.done()
    await driver.output.save(driver.rollouts[0], Episode("0-0", 0), {"reward": 1.0})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            await driver.output.save(driver.rollouts[1], Episode("1-0", 0), {"reward": 1.0})
    assert [row["_ng_rollout_id"] for row in driver.rows()] == ["0-0"]
    await driver.output.save(driver.rollouts[1], Episode("1-0", 0), {"reward": 1.0})
    assert [row["_ng_rollout_id"] for row in driver.rows()] == ["0-0", "1-0"]


async def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    output = DirectoryOutput(tmp_path / "file", [])
    with pytest.raises(StorageError, match="check its permissions"):
        await output.done()


# ---- checkpoints ------------------------------------------------------------------------------------------


async def test_prepare_is_ready_at_once_and_nothing_is_sent_until_resume(tmp_path: Path) -> None:
    driver = Driver(tmp_path, 2, concurrency=1)
    await driver.begun()
    assert prepare(driver.participant)
    driver.answer("0-0")
    await asyncio.sleep(100)
    assert driver.sent == ["0-0"]
    resume(driver.participant)
    await driver.begun(2)
    driver.stop()


async def test_commit_waits_for_answers_that_no_boundary_covers_and_makes_them_durable(tmp_path: Path) -> None:
    driver = Driver(tmp_path, 3)
    await driver.begun(3)
    frozen = committing(driver, "0-0", live=("1-0",))  # 2-0 is neither: its answer is on the way
    await asyncio.sleep(100)
    assert not frozen.done()
    driver.answer("2-0")
    attempts = record(await frozen)["attempts"]
    assert attempts == {"0-0": 0, "1-0": 0}
    assert [row["_ng_rollout_id"] for row in driver.rows()] == ["2-0"]
    driver.stop()


async def test_a_request_that_was_never_admitted_does_not_hold_the_commit_up(tmp_path: Path) -> None:
    driver = Driver(tmp_path, 1)
    await driver.begun()
    frozen = committing(driver)
    await settle()
    assert not frozen.done()
    driver.answer("0-0", refusal("admission_closed"))
    assert record(await frozen)["attempts"] == {"0-0": 0}
    resume(driver.participant)
    await driver.begun(2)
    assert driver.sent == ["0-0", "0-0"]
    driver.stop()


async def test_an_attempt_is_never_used_twice_when_a_checkpoint_opens_while_it_is_made_durable(
    tmp_path: Path,
) -> None:
    driver = Driver(tmp_path, 1)
    await driver.begun()
    frozen = committing(driver)
    driver.answer("0-0", refusal("session_lost"))
    await frozen
    assert driver.sent == ["0-0"]
    resume(driver.participant)
    await driver.begun(2)
    assert driver.sent == ["0-0", "0-0-a1"]
    driver.stop()


async def crashed(tmp_path: Path) -> dict[str, bytes]:
    """Three rollouts: 0 continues, 1 was not started or must start over, 2 failed for good."""
    driver = Driver(tmp_path / "first", 3, max_failures=1)
    await driver.begun(3)
    driver.answer("2-0", RunResult(None, {"failure_reason": "no"}))
    await asyncio.sleep(1)
    records = await committing(driver, "0-0", live=("1-0",))
    driver.stop()
    return records


async def test_after_a_restore_continued_ones_come_first_and_the_rest_starts_over(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "second", 3, started=False, concurrency=1)
    assert restore(driver.participant, await crashed(tmp_path), "0-0", cell_attempt=2) == ["0-0-a2"]
    await asyncio.sleep(10)
    assert driver.sent == []
    resume(driver.participant, "restore")
    driver.answer("0-0-a2")
    driver.answer("1-0-a2")
    await driver.driving
    assert driver.sent == ["0-0-a2", "1-0-a2"]
    assert driver.participant.progress()["failed"] == 1
    assert driver.participant.to_retire() == []


async def test_a_row_that_is_ahead_of_the_checkpoint_stands_and_its_episode_is_to_be_retired(tmp_path: Path) -> None:
    row = json.dumps({"_ng_rollout_id": "0-0", "reward": 1.0, "_ng_attempt_index": 0})
    (tmp_path / "second").mkdir()
    (tmp_path / "second/rollouts.jsonl").write_text(row + "\n")
    driver = Driver(tmp_path / "second", 3, started=False)
    records = await crashed(tmp_path)
    await driver.participant.load()
    restore(driver.participant, records, "0-0")
    assert driver.participant.to_retire() == ["0-0-a1"]
    await driver.participant.retire([Episode("0-0", 1)])
    assert driver.participant.to_retire() == []
    resume(driver.participant, "restore")
    driver.answer("1-0-a1")
    await driver.driving
    assert driver.sent == ["1-0-a1"]
    assert len(driver.rows()) == 2


async def test_a_restored_episode_of_a_task_that_is_not_there_any_more_is_retired_and_forgotten(
    tmp_path: Path,
) -> None:
    driver = Driver(tmp_path / "second", 2, started=False)
    restore(driver.participant, await crashed(tmp_path), "0-0", "7-0")
    assert driver.participant.to_retire() == ["7-0-a1"]
    await driver.participant.retire([Episode("7-0", 1)])
    assert (driver.participant.to_retire(), driver.participant.to_forget()) == ([], ["7-0"])
    resume(driver.participant, "restore")
    driver.answer("0-0-a1")
    driver.answer("1-0-a1")
    await driver.driving
    assert driver.sent == ["0-0-a1", "1-0-a1"]


async def test_tasks_that_cannot_be_read_cost_no_restored_work(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "second", 2, started=False, unreadable=TasksError("there are none"))
    restore(driver.participant, await crashed(tmp_path), "0-0")
    resume(driver.participant, "restore")
    await asyncio.sleep(100)
    assert (driver.participant.to_retire(), driver.participant.to_forget()) == ([], [])
    driver.unreadable = None
    await driver.begun(2)
    assert driver.sent == ["0-0-a1", "1-0-a1"], "what was restored goes on, first"
    driver.stop()


async def test_what_is_retired_before_the_tasks_are_read_is_not_forgotten_if_it_is_among_them(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "second", 2, started=False, unreadable=TasksError("there are none"))
    restore(driver.participant, await crashed(tmp_path), "0-0")
    await driver.participant.retire([Episode("0-0", 1)])
    assert driver.participant.to_forget() == []
    driver.stop()


async def test_what_was_over_before_a_restore_is_forgotten_until_nothing_of_it_is_to_be_retired(
    tmp_path: Path,
) -> None:
    """Its watermarks came back with the records: they would be carried on for ever."""
    row = json.dumps({"_ng_rollout_id": "0-0", "reward": 1.0, "_ng_attempt_index": 0})
    (tmp_path / "second").mkdir()
    (tmp_path / "second/rollouts.jsonl").write_text(row + "\n")
    driver = Driver(tmp_path / "second", 3, started=False)
    records = await crashed(tmp_path)  # 2-0 had failed
    await driver.participant.load()
    restore(driver.participant, records, "0-0")
    resume(driver.participant, "restore")
    await driver.begun()
    assert driver.participant.to_forget() == ["0-0", "2-0"]
    driver.participant.forget(["0-0", "2-0"])
    assert driver.participant.to_forget() == ["0-0"]  # its retire, which is still to come, marks it once more
    await driver.participant.retire([Episode("0-0", 1)])
    driver.participant.forget(["0-0"])
    assert driver.participant.to_forget() == []
    driver.stop()


async def test_a_restored_attempt_that_is_lost_starts_over_above_it(tmp_path: Path) -> None:
    driver = Driver(tmp_path / "second", 1, started=False)
    restore(driver.participant, await crashed(tmp_path), "0-0")
    resume(driver.participant, "restore")
    driver.answer("0-0-a1", refusal("session_lost"))
    driver.answer("0-0-a2")
    await driver.driving
    assert driver.sent == ["0-0-a1", "0-0-a2"]


@pytest.mark.parametrize(
    "records", [{}, {RECORD: b""}, {RECORD: b'{"format":1}'}, {RECORD: b'{"format":1,"attempts":[],"failed":3}'}]
)
async def test_a_record_that_cannot_be_read_is_refused(tmp_path: Path, records: dict[str, bytes]) -> None:
    driver = Driver(tmp_path, 1, started=False)
    with pytest.raises(ProtocolError) as refused:
        restore(driver.participant, records, "0-0")
    assert refused.value.code == "invalid_checkpoint_state"
    driver.stop()
