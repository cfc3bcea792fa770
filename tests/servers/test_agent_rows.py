"""The agent participant: a row runs once, and its answer is kept."""

from __future__ import annotations

import asyncio

import pytest

from gym_rig.agents import agent, seeded
from gym_rig.alone import R0, R1, code
from gym_rig.verbs import checkpoint, prepare, restore, resume
from gym_rig.virtual import settle
from gym_servers.protocol.identity import Episode


class Row:
    """The work of a row, ended by a test."""

    def __init__(self) -> None:
        self.end, self.runs = asyncio.Event(), 0
        self.error: Exception | None = None

    async def __call__(self) -> str:
        self.runs += 1
        await self.end.wait()
        if self.error is not None:
            raise self.error
        return "row"


async def test_a_repeated_row_joins_and_another_one_is_refused() -> None:
    participant, work = agent(), Row()
    first, second = (asyncio.create_task(participant.row(R0, "d", work)) for _ in range(2))
    await settle()
    assert await code(participant.row(R0, "other", work)) == "checkpoint_conflict"
    first.cancel()
    work.end.set()
    assert (await second, work.runs) == ("row", 1)


async def test_c17_a_row_that_failed_is_not_answered_again_and_its_attempt_is_used_up() -> None:
    participant, work = agent(), Row()
    work.error = ValueError("broken")
    work.end.set()
    with pytest.raises(ValueError, match="broken"):
        await participant.row(R0, "d", work)
    assert await code(participant.row(R0, "d", work)) == "stale_attempt"
    work.error = None
    assert await participant.row(R1, "d", work) == "row"


async def test_a_row_that_comes_while_a_checkpoint_is_open_waits_and_runs_once() -> None:
    participant, work = agent(), Row()
    prepare(participant)
    calls = [asyncio.create_task(participant.row(R0, "d", work)) for _ in range(2)]
    await settle()
    assert work.runs == 0
    resume(participant)
    work.end.set()
    assert await asyncio.gather(*calls) == ["row", "row"]
    assert work.runs == 1


async def test_an_answered_row_is_answered_again_also_by_another_process() -> None:
    participant, work = agent(), Row()
    session = await seeded(participant)
    await participant.answered(session, "d", "row")
    assert await participant.row(R0, "d", work) == "row"
    second = agent(started=False)
    assert restore(second, await checkpoint(participant, "r"), "r") == ["r-a1"]
    resume(second, "restore")
    assert await second.row(R1, "d", work) == "row"
    assert await code(second.row(R1, "other", work)) == "checkpoint_conflict"
    assert work.runs == 0


async def test_a_retired_or_forgotten_row_leaves_no_receipt() -> None:
    participant = agent()
    for name in ("r", "gone", "kept"):
        await participant.answered(await seeded(participant, Episode(name, 0), name), "d", "row")
    participant.gate.fence.mark("r", 0)
    await participant.retire([R0])
    participant.forget(["gone"])
    assert set(await checkpoint(participant)) == {"answered/kept"}


async def test_a_retire_ends_a_row_before_its_session() -> None:
    participant = agent()
    log: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            log.append("row")

    running = asyncio.create_task(participant.row(R0, "d", work))
    await settle()
    participant.gate.fence.mark("r", 0)
    await participant.retire([R0])
    assert log == ["row"]
    assert await code(running) == "stale_attempt"
