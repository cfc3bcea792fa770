"""Attempt numbers of a driver outside of the stack: each is used up before anything runs under it, so that none of
its late calls can act after a recovery."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig, cell
from gym_servers.engine.rows import counter_rows
from gym_servers.storage import cells
from gym_servers.storage.cells import highest_attempt, use_attempt_up
from gym_servers.storage.locate import open_store
from gym_servers.storage.store import StorageError


@asynccontextmanager
async def driven(folder: Path, **spec: Any) -> AsyncIterator[Rig]:
    async with cell(folder, counter_rows(1, 1), **{"collection": None, **spec}) as rig:
        await rig.until(rig.running)
        yield rig


async def run(rig: Rig, rollout: str, attempt: int) -> dict[str, Any]:
    row = counter_rows(1, 1)[0]
    data = {name: value for name, value in row.items() if name != "responses_create_params"}
    task = {"task_input": {"responses_create_params": row["responses_create_params"], "task_data": data}}
    body = {"episode_id": {"rollout_id": rollout, "attempt": attempt}, "task": task}
    async with rig.network.client(timeout=None) as client:
        answer: dict[str, Any] = (await client.post("http://env/run", json=body)).json()
    return answer


def used(rig: Rig) -> int:
    return highest_attempt(open_store(rig.root))


async def test_a_recovery_is_above_every_attempt_that_a_driver_has_used(tmp_path: Path) -> None:
    async with driven(tmp_path) as rig:
        assert (await run(rig, "x", 0))["result"]["reward"] == 1.0
        assert used(rig) == 0  # the cell's own attempt needs no entry
        running = asyncio.create_task(run(rig, "x", 5))
        await rig.until(lambda: "x-a5" in rig.participant("env")._live)
        assert used(rig) == 5
        rig.kill("agent")
        await rig.until(lambda: rig.running(6))
        assert rig.controller.record.attempt == 6
        assert (await run(rig, "x", 5))["error"]["code"] == "stale_attempt"
        running.cancel()


async def test_a_number_is_durable_before_anything_runs_under_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driven(tmp_path) as rig:
        use_up, seen = cells.use_attempt_up, list[tuple[int, list[str]]]()

        def noted(store: Any, attempt: int, owner: str) -> None:
            seen.append((attempt, sorted(rig.participant("env")._live)))
            use_up(store, attempt, owner)

        monkeypatch.setattr(cells, "use_attempt_up", noted)
        rig.kill("env")  # its successor imports the patched one
        await rig.until(lambda: rig.running(1))
        seen.clear()
        answers = await asyncio.gather(run(rig, "x", 3), run(rig, "y", 3), run(rig, "z", 1))
        assert [answer["result"]["reward"] for answer in answers] == [1.0] * 3
        assert {attempt for attempt, _ in seen} == {3}
        assert all(live in ([], ["z-a1"]) for _, live in seen)
        assert (await run(rig, "v", 3))["result"]["reward"] == 1.0
        assert len(seen) <= 2, "once is enough"


async def test_what_runs_or_was_answered_needs_no_storage_and_what_is_new_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driven(tmp_path) as rig:
        first = await run(rig, "x", 2)
        participant, away = rig.participant("env"), True
        use_up = participant._use_up

        async def fails(attempt: int) -> None:
            if away:
                raise StorageError("the bucket does not answer")
            await use_up(attempt)

        monkeypatch.setattr(participant, "_use_up", fails)
        participant._used_up.clear()
        assert await run(rig, "x", 2) == first
        assert (await run(rig, "new", 0))["result"]["reward"] == 1.0
        refused = (await run(rig, "y", 7))["error"]
        assert (refused["code"], "the bucket does not answer" in refused["detail"]) == ("admission_closed", True)
        assert (await run(rig, "x", 1))["error"]["code"] == "stale_attempt"
        away = False
        assert (await run(rig, "y", 7))["result"]["reward"] == 1.0


async def test_a_number_that_a_recovery_has_reserved_is_the_recovery_s(tmp_path: Path) -> None:
    async with driven(tmp_path) as rig:
        use_attempt_up(open_store(rig.root), 1, "recovery-of-a-coordinator-that-is-gone")
        assert (await run(rig, "x", 1))["error"]["code"] == "stale_attempt"
        assert (await run(rig, "x", 2))["result"]["reward"] == 1.0


async def test_a_number_far_above_the_cell_s_is_refused_and_uses_nothing_up(tmp_path: Path) -> None:
    async with driven(tmp_path) as rig:
        refused = (await run(rig, "x", 1001))["error"]
        assert (refused["code"], "count by ones" in refused["detail"]) == ("invalid_request", True)
        assert used(rig) == 0
        assert (await run(rig, "x", 1000))["result"]["reward"] == 1.0


async def test_a_stack_with_a_driver_of_its_own_leaves_numbers_to_it(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(counter_rows(1, 1)[0]) + "\n")
    async with driven(tmp_path, collection={"tasks": str(rows), "output": str(tmp_path / "output")}) as rig:
        assert rig.participant("env")._use_up is None
        assert rig.settings["env"].checkpoint.external_driver is False
