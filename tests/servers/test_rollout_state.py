"""What an environment tells a driver that asks where its rollouts stand: at every moment, and after a recovery."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_rig.cell import GRACE, Rig, cell
from gym_servers.coordination.checkpoint import Progress
from gym_servers.engine.rows import counter_rows
from gym_servers.participants.answered import REMEMBERED_RESULTS
from gym_servers.protocol.identity import Episode
from gym_servers.protocol.rollouts import STATE_PATH, RolloutPage, RolloutState

STATE = {"value": {"step": 7, "none": None}}


class Driver:
    """A trainer that sends `/run` itself."""

    def __init__(self, rig: Rig, client: httpx.AsyncClient) -> None:
        self.rig, self.client = rig, client
        self.tasks: list[asyncio.Task[httpx.Response]] = []

    async def run(self, rollout: str, attempt: int = 0) -> httpx.Response:
        row = counter_rows(1, 1)[0]
        data = {name: value for name, value in row.items() if name != "responses_create_params"}
        task = {"task_input": {"responses_create_params": row["responses_create_params"], "task_data": data}}
        body = {"episode_id": {"rollout_id": rollout, "attempt": attempt}, "task": task}
        return await self.client.post("http://env/run", json=body)

    def begin(self, *rollouts: str, attempt: int = 0) -> None:
        self.tasks += [asyncio.create_task(self.run(rollout, attempt)) for rollout in rollouts]

    async def state(self, rollout: str) -> RolloutState:
        reply = await self.client.get(f"http://env{STATE_PATH}/{rollout}")
        assert reply.is_success, reply.text
        return RolloutState.model_validate(reply.json())

    async def stands(self, rollout: str) -> tuple[str, int | None, int]:
        found = (await self.state(rollout)).rollout
        assert found.rollout_id == rollout
        return found.state, found.attempt, found.next_attempt

    async def page(self, **query: Any) -> RolloutPage:
        reply = await self.client.get(f"http://env{STATE_PATH}", params=query)
        assert reply.is_success, reply.text
        return RolloutPage.model_validate(reply.json())


@asynccontextmanager
async def driven(folder: Path, **spec: Any) -> AsyncIterator[Driver]:
    """A cell in service that somebody else drives."""
    async with (
        cell(folder, counter_rows(1, 1), collection=None, **spec) as rig,
        rig.network.client(timeout=None) as client,
    ):
        driver = Driver(rig, client)
        await rig.until(rig.running)
        yield driver
        for task in driver.tasks:
            task.cancel()
        await asyncio.gather(*driver.tasks, return_exceptions=True)


async def quiet(_: Progress) -> None:
    return None


async def checkpoint(rig: Rig, **wishes: Any) -> None:
    taken = asyncio.ensure_future(rig.controller.take("one-id", "one", quiet, **wishes))
    await rig.until(taken.done)
    taken.result()


async def test_a_rollout_stands_where_a_run_would_find_it(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        assert await driver.stands("x") == ("unknown", None, 0)
        driver.begin("x")
        await driver.rig.until(lambda: driver.rig.effects() >= 1)
        assert await driver.stands("x") == ("running", 0, 1)
        assert (await driver.state("x")).rollout.stage == "invoke_agent"
        await driver.rig.until(driver.tasks[0].done)
        assert await driver.stands("x") == ("answered", 0, 1)
        again = (await driver.run("x")).json()
        assert again == driver.tasks[0].result().json()
        driver.begin("x", attempt=3)
        await driver.rig.until(lambda: "x-a3" in driver.rig.participant("env")._live)
        assert await driver.stands("x") == ("running", 3, 4)


async def test_after_a_recovery_a_driver_learns_what_continues_and_under_which_attempt(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        rig = driver.rig
        driver.begin("x", "y")
        await rig.until(lambda: rig.effects() >= 2)
        await checkpoint(rig, labels={"step": "7"}, driver_state=STATE)
        driver.begin("late")
        await rig.until(lambda: "late" in rig.participant("env")._live)
        rig.kill("policy")
        await rig.until(lambda: rig.running(1))
        state = await driver.state("x")
        assert (state.cell, state.in_service, state.cell_attempt, state.attempt_floor) == (0, True, 1, True)
        assert state.origin is not None
        assert (state.origin.checkpoint_id, state.origin.name) == ("one-id", "one")
        assert (state.origin.labels, state.origin.driver_state) == ({"step": "7"}, STATE)
        assert [await driver.stands(one) for one in ("x", "y")] == [("restored", 1, 2)] * 2
        assert await driver.stands("late") == ("unknown", None, 1)
        assert await driver.stands("new") == ("unknown", None, 1)
        page = await driver.page()
        assert [(one.rollout_id, one.attempt) for one in page.rollouts] == [("x", 1), ("y", 1)]
        assert (page.next, page.origin) == (None, state.origin)
        continued, late = await asyncio.gather(driver.run("x", 1), driver.run("late", 1))
        assert continued.json()["result"]["reward"] == late.json()["result"]["reward"] == 1.0
        assert await driver.stands("x") == ("answered", 1, 2)


async def test_after_a_start_from_the_input_nothing_continues(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        driver.begin("x")
        await driver.rig.until(lambda: driver.rig.effects() >= 1)
        driver.rig.kill("agent")
        await driver.rig.until(lambda: driver.rig.running(1))
        state = await driver.state("x")
        assert (state.in_service, state.cell_attempt, state.origin) == (True, 1, None)
        assert await driver.stands("x") == ("unknown", None, 1)


async def test_without_a_floor_only_what_is_restored_has_other_attempts(tmp_path: Path) -> None:
    async with driven(tmp_path, access={"attemptFloor": False}) as driver:
        rig = driver.rig
        driver.begin("x")
        await rig.until(lambda: rig.effects() >= 1)
        await checkpoint(rig)
        rig.kill("agent")
        await rig.until(lambda: rig.running(1))
        assert not (await driver.state("x")).attempt_floor
        assert await driver.stands("x") == ("restored", 1, 2)
        assert await driver.stands("new") == ("unknown", None, 0)
        assert (await driver.run("new", 0)).json()["result"]["reward"] == 1.0
        assert (await driver.run("x", 0)).json()["error"]["code"] == "stale_attempt"


async def test_what_a_checkpoint_left_out_is_over_also_without_a_floor(tmp_path: Path) -> None:
    """Its late calls of before the recovery do not start it a second time under its old number."""
    async with driven(tmp_path, access={"attemptFloor": False}) as driver:
        rig = driver.rig
        driver.begin("x", "y")
        await rig.until(lambda: rig.effects() >= 2)
        await checkpoint(rig, episodes=frozenset({"x"}))
        rig.kill("agent")
        await rig.until(lambda: rig.running(1))
        assert [await driver.stands(one) for one in ("x", "y")] == [("restored", 1, 2), ("unknown", None, 1)]
        assert (await driver.run("y", 0)).json()["error"]["code"] == "stale_attempt"


async def test_a_cell_that_is_not_in_service_says_so(tmp_path: Path) -> None:
    """From the start of its processes to their resume, and where a restore was given up."""
    async with driven(tmp_path) as driver:
        rig = driver.rig
        driver.begin("x")
        await rig.until(lambda: rig.effects() >= 1)
        await checkpoint(rig, driver_state=STATE)
        rig.kill()
        await rig.processes()
        state = await driver.state("x")
        assert (state.in_service, state.cell_attempt, state.origin) == (False, 0, None)
        plane, opened = rig.processes_by_name["env"].plane, asyncio.Event()
        assert plane is not None
        resume = plane.resume

        async def held(request: Any) -> Any:
            await opened.wait()
            return await resume(request)

        plane.resume = held  # type: ignore[method-assign]
        await rig.until(lambda: str(plane.gate.phase) == "restored")
        state = await driver.state("x")
        assert (state.in_service, state.rollout.state, state.cell_attempt) == (False, "restored", 1)
        assert state.origin is not None
        await rig.controller.close()
        await asyncio.sleep(GRACE + 1)
        state = await driver.state("x")
        assert (state.in_service, state.rollout.state, state.origin) == (False, "unknown", None)
        opened.set()
        await rig.until(lambda: rig.running(2))
        assert (await driver.state("x")).rollout.attempt == 2


async def test_while_a_checkpoint_is_open_the_cell_counts_as_in_service(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        driver.begin("x")
        await driver.rig.until(lambda: driver.rig.effects() >= 1)
        await checkpoint(driver.rig, stop=True)
        state = await driver.state("x")
        assert (state.in_service, state.rollout.state) == (True, "running")


async def test_a_retired_rollout_has_to_be_sent_above_what_was_retired(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        participant = driver.rig.participant("env")
        driver.begin("x", attempt=2)
        await driver.rig.until(lambda: driver.rig.effects() >= 1)
        participant.gate.fence.mark("x", 2)
        assert await driver.stands("x") == ("unknown", None, 3)
        await participant.retire([Episode("x", 2)])
        assert await driver.stands("x") == ("unknown", None, 3)


async def test_a_result_that_is_not_kept_any_more_is_never_run_again(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        assert (await driver.run("x")).json()["result"]["reward"] == 1.0
        answered = driver.rig.participant("env")._answered
        for number in range(REMEMBERED_RESULTS):
            answered.remember(Episode(f"other-{number}", 0), "d", {})
        assert await driver.stands("x") == ("unknown", None, 1)
        assert (await driver.run("x")).json()["error"]["code"] == "stale_attempt"


async def test_pages_are_bounded_and_lead_to_all(tmp_path: Path) -> None:
    async with driven(tmp_path) as driver:
        answered = driver.rig.participant("env")._answered
        names = sorted(f"r-{number}" for number in range(25))
        for name in names:
            answered.remember(Episode(name, 1), "d", {})
        found, after = [], ""
        for _ in range(3):
            page = await driver.page(limit=10, after=after)
            assert len(page.rollouts) <= 10
            found += [one.rollout_id for one in page.rollouts]
            after = page.next or ""
        assert (found, after) == (names, "")
        assert (await driver.page(limit=25)).next is None
        assert (await driver.page(after="zzz")).rollouts == []


@pytest.mark.parametrize(
    "path", ["?limit=0", "?limit=1001", "?limit=many", f"?after={'x' * 201}", "/x-a2", "/-", "/%20"]
)
async def test_what_is_asked_wrongly_is_refused_with_a_reason(tmp_path: Path, path: str) -> None:
    async with driven(tmp_path) as driver:
        reply = await driver.client.get(f"http://env{STATE_PATH}{path}")
        assert reply.status_code == 422
        assert reply.json()["error"]["code"] == "invalid_request"


async def test_without_checkpointing_there_is_no_such_address(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(1, 1), collection=None, checkpoints={"enabled": False}) as rig:
        rig.start("env")
        async with rig.network.client() as client:
            assert (await client.get(f"http://env{STATE_PATH}")).status_code == 404
