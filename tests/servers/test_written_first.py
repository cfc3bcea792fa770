"""A coordinator acts on what it has written: one that was taken over from finds out before it touches anybody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from gym_rig.cell import GRACE, LOOK_SECONDS, Rig, cell
from gym_rig.coordinator import CoordinatorProcess
from gym_rig.network import Fault, Seen
from gym_servers.coordination.checkpoint import Progress
from gym_servers.coordination.record import OpenCheckpoint, Stage
from gym_servers.engine.rows import counter_rows
from gym_servers.protocol.phases import Phase

ROLLOUTS = 3


async def quiet(_: Progress) -> None:
    return None


def phases(rig: Rig) -> set[Phase]:
    return {one.server.participant.gate.phase for one in rig.processes_by_name.values()}


async def becomes(rig: Rig, phase: Phase) -> None:
    """Wait until all are in a phase, without a look of the test's own."""
    async with asyncio.timeout(GRACE):
        while phases(rig) != {phase}:  # noqa: ASYNC110 - others bring it about
            await asyncio.sleep(0.005)


async def closed(rig: Rig) -> None:
    """All are closed by a checkpoint that has stopped the cell."""
    taken = asyncio.ensure_future(rig.controller.take("halt-id", "halt", quiet, stop=True))
    await rig.until(taken.done)
    assert taken.result().publication.state == "published"


async def released(rig: Rig) -> None:
    await closed(rig)
    await rig.controller.release()


async def closed_for_nothing(rig: Rig) -> None:
    await closed(rig)
    await rig.save(rig.saved[-1].model_copy(update={"stage": Stage.RUNNING, "stopped": None}))


async def left_open(rig: Rig) -> None:
    await closed_for_nothing(rig)
    left = OpenCheckpoint(checkpoint_id="halt-id", name="halt", uri=f"{rig.root}/checkpoints/left", sequence=9)
    await rig.save(rig.saved[-1].model_copy(update={"open": left}))


async def recovering(rig: Rig, *, reached: Phase) -> None:
    await rig.checkpoint("one")
    rig.kill("agent")
    await rig.until(lambda: rig.controller.record.stage is Stage.STARTING)
    if reached is Phase.RESTORED:
        resumes = Fault("lose request", path="/resume", calls=1000)
        rig.network.faults.append(resumes)
        await rig.until(lambda: bool(rig.controller.record.pins))
        await becomes(rig, reached)
        rig.network.faults.remove(resumes)
    await rig.controller.close()
    assert phases(rig) == {reached}


async def restored(rig: Rig) -> None:
    await recovering(rig, reached=Phase.RESTORED)


async def fresh(rig: Rig) -> None:
    await recovering(rig, reached=Phase.STARTING)


@pytest.mark.parametrize("found", [released, closed_for_nothing, left_open, restored, fresh])
async def test_whoever_was_taken_over_from_restores_and_resumes_nobody(
    tmp_path: Path, found: Callable[[Rig], Awaitable[None]]
) -> None:
    async with cell(tmp_path, counter_rows(ROLLOUTS, 2)) as rig:
        await rig.until(lambda: rig.effects() >= ROLLOUTS)
        await found(rig)
        asked: list[str] = []

        def note(seen: Seen) -> None:
            if seen.caller == "coordinator" and seen.method == "POST" and not seen.path.endswith("/renew"):
                asked.append(seen.path)

        rig.network.on_request = note
        before, record = phases(rig), rig.saved[-1]
        behind = CoordinatorProcess(rig, record, LOOK_SECONDS, lease_grace=GRACE)
        await rig.save(record)  # by its successor
        await asyncio.wait_for(behind.alive.died.wait(), GRACE / 2)
        await asyncio.sleep(1)
        assert (asked, phases(rig)) == ([], before)
        ahead = CoordinatorProcess(rig, rig.saved[-1], LOOK_SECONDS, lease_grace=GRACE)
        await becomes(rig, Phase.IDLE)
        assert asked, "there was something to be done"
        ahead.kill()
        rig.controller = rig.coordinator(rig.saved[-1])
        await rig.until(rig.complete)
        assert rig.account(ROLLOUTS).problems == []
        for one in (behind, ahead):
            one.looking.cancel()
            await asyncio.wait([one.looking], timeout=1)
