"""A stack that somebody else drives, under the real operator: after a recovery its status says what continues, under
which attempt and in which cell, and gives back what was handed over with the checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from gym_operator.api.restore import RESTORE_TERMINAL
from gym_operator.effects.kube import CHECKPOINTS, PODS, RESTORES
from gym_rig.operated import OperatedRig, operated
from gym_rig.writes import at_any_write
from gym_servers.engine.rows import counter_rows

STATE = {"value": {"step": 7, "none": None}}


async def run(rig: OperatedRig, rollout: str, attempt: int = 0) -> dict[str, Any]:
    row = counter_rows(1, 1)[0]
    data = {name: value for name, value in row.items() if name != "responses_create_params"}
    task = {"task_input": {"responses_create_params": row["responses_create_params"], "task_data": data}}
    body = {"episode_id": {"rollout_id": rollout, "attempt": attempt}, "task": task}
    async with rig.cell.network.client(timeout=None) as client:
        answer: dict[str, Any] = (await client.post("http://env/run", json=body)).json()
    return answer


@asynccontextmanager
async def driven(folder: Path, *rollouts: str) -> AsyncIterator[OperatedRig]:
    """A stack with rollouts under way that are in a checkpoint, and one that began after it."""
    async with operated(folder, counter_rows(1, 1), collection=None) as rig:
        await rig.until(rig.in_service, "in service")
        running = [asyncio.create_task(run(rig, rollout)) for rollout in rollouts]
        await rig.until(lambda: rig.cell.effects() >= len(rollouts), "tools were called")
        rig.checkpoint("one", labels={"step": "7"}, driverState=STATE, episodes=list(rollouts[:-1]))
        await rig.until(lambda: rig.final("one"), "final")
        assert rig.status(CHECKPOINTS, "one")["phase"] == "Succeeded"
        running.append(asyncio.create_task(run(rig, "late")))
        yield rig
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def continuation(rig: OperatedRig) -> dict[str, Any]:
    found: dict[str, Any] = rig.status()["cells"][0].get("continuation") or {}
    return found


def expected(rig: OperatedRig, attempt: int) -> dict[str, Any]:
    return {
        "attempt": attempt,
        "checkpoint": rig.status(CHECKPOINTS, "one")["checkpointID"],
        "continuedCount": 2,
        "continued": [{"rollout": "x", "attempt": attempt}, {"rollout": "y", "attempt": attempt}],
        "startedOverCount": 1,
        "startedOver": ["z"],
    }


async def test_the_status_says_what_continues_and_gives_back_what_was_handed_over(tmp_path: Path) -> None:
    async with driven(tmp_path, "x", "y", "z") as rig:
        assert continuation(rig) == {}
        assert "restored" not in rig.status()
        rig.kube.remove(PODS, "local", "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert continuation(rig) == expected(rig, 1)
        assert rig.status()["restored"] == {
            "name": "one",
            "id": rig.status(CHECKPOINTS, "one")["checkpointID"],
            "labels": {"step": "7"},
            "driverState": STATE,
        }
        answers = await asyncio.gather(*(run(rig, rollout, 1) for rollout in ("x", "y", "z", "late")))
        assert [answer["result"]["reward"] for answer in answers] == [1.0] * 4


async def test_k11_a_checkpoint_of_an_idle_stack_restores_to_an_idle_stack(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(1, 1), rate=5, collection=None) as rig:
        await rig.until(rig.in_service, "in service")
        rig.checkpoint("empty")
        await rig.until(lambda: rig.final("empty"), "final")
        taken = rig.status(CHECKPOINTS, "empty")
        assert (taken["phase"], taken["episodes"]) == ("Succeeded", 0)
        running = asyncio.create_task(run(rig, "x"))
        await rig.until(lambda: rig.cell.effects() >= 1, "a tool was called")
        spec = {"stackRef": {"name": "rig"}, "checkpointRef": {"name": "empty"}}
        rig.kube.put(RESTORES, "local", {"metadata": {"name": "back"}, "spec": spec})
        await rig.until(lambda: rig.status(RESTORES, "back").get("phase") in RESTORE_TERMINAL, "final")
        restored = rig.status(RESTORES, "back")
        assert (restored["phase"], restored["continuedCount"]) == ("Succeeded", 0), restored
        assert restored["checkpoint"]["id"] == taken["checkpointID"]
        assert (continuation(rig)["continuedCount"], continuation(rig)["startedOverCount"]) == (0, 0)
        assert rig.in_service(1)
        (gone,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(gone, Exception), "nothing of what ran goes on"
        before = rig.cell.effects()
        answers = await asyncio.gather(run(rig, "x", 1), run(rig, "y", 1))
        assert [answer["result"]["reward"] for answer in answers] == [1.0] * 2
        assert rig.cell.effects() > before + 1


async def test_while_a_recovery_goes_on_nothing_is_said_of_the_one_before(tmp_path: Path) -> None:
    async with driven(tmp_path, "x", "y", "z") as rig:
        rig.kube.remove(PODS, "local", "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        rig.pods_may_start = False
        rig.kube.remove(PODS, "local", "rig-env-0")
        await rig.until(lambda: rig.record().get("attempt") == 2, "the next recovery")
        assert continuation(rig) == {}
        assert "restored" not in rig.status()
        rig.pods_may_start = True
        await rig.until(lambda: rig.in_service(2), "recovered")
        assert continuation(rig) == expected(rig, 2)


async def test_a_recovery_from_the_input_says_that_all_start_over(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(1, 1), collection=None) as rig:
        await rig.until(rig.in_service, "in service")
        assert continuation(rig) == {}
        rig.kube.remove(PODS, "local", "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert (continuation(rig)["attempt"], continuation(rig)["continuedCount"]) == (1, 0)
        assert "checkpoint" not in continuation(rig)


@at_any_write(17)
async def test_it_is_said_whatever_write_of_the_recovery_the_operator_dies_at(
    tmp_path: Path, write: int, after: bool
) -> None:
    async with driven(tmp_path, "x", "y", "z") as rig:
        await rig.replace_operator(
            write,
            lambda: rig.kube.remove(PODS, "local", "rig-counter-0"),
            after=after,
            ended=lambda: rig.in_service(1),
        )
        await rig.until(lambda: rig.in_service(1) and continuation(rig), "said")
        attempt = rig.record()["attempt"]
        assert continuation(rig) == expected(rig, attempt)
        assert rig.status()["restored"]["driverState"] == STATE
