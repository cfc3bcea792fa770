"""What a GymCheckpoint may ask for beyond a checkpoint of everything: some rollouts only, a stack that stops after
it, and words of its driver that are kept with it - under the real operator, which may die at any write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects.kube import CHECKPOINTS, PODS
from gym_operator.rules.cell_record import from_document
from gym_rig.operated import OperatedRig, operated
from gym_rig.virtual import now
from gym_rig.writes import at_any_write
from gym_servers.engine.rows import counter_rows
from gym_servers.local.demo import account_of
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CHECKPOINT, Publication, read_publication

ROWS = 6


async def under_way(rig: OperatedRig) -> None:
    await rig.until(rig.in_service, "in service")
    await rig.until(lambda: rig.cell.effects() >= 2, "tools were called")


async def taken(rig: OperatedRig, name: str, **spec: Any) -> dict[str, Any]:
    rig.checkpoint(name, **spec)
    await rig.until(lambda: rig.final(name), f"{name} is final")
    return rig.status(CHECKPOINTS, name)


def publication(status: dict[str, Any]) -> Publication:
    return read_publication(open_store(status["uri"]).get(CHECKPOINT))


def pods(rig: OperatedRig) -> int:
    return sum(kind == PODS for kind, _, _ in rig.kube.objects)


async def to_the_end(rig: OperatedRig, continued: int | None = None) -> None:
    """Every rollout has one row, and no tool effect of the surviving history happened twice or not at all."""
    await rig.until(rig.complete, "complete")
    record = from_document(rig.record())
    assert record is not None
    counted = account_of(rig.cell.folder, record, ROWS)
    assert counted.ok, counted.problems
    assert continued in (None, counted.continued)


async def lets_go_on(rig: OperatedRig) -> None:
    """What a user does to a stack that a checkpoint has stopped."""
    rig.change(suspend=True)
    await rig.until(lambda: rig.status()["phase"] == "Suspended", "suspended")
    rig.change(suspend=False)
    await rig.until(lambda: rig.in_service(1), "in service again")


# ---- stopAfter --------------------------------------------------------------------------------------------


async def test_a_stack_stays_stopped_after_a_checkpoint_until_it_is_suspended_and_turned_on(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        status = await taken(rig, "last", stopAfter=True)
        assert status["phase"] == "Succeeded", status
        began = now()
        await rig.until(lambda: pods(rig) == 0, "no pods")
        assert now() - began < 2
        await rig.until(lambda: rig.status().get("stoppedBy") == "last", "said")
        effects, began = rig.cell.effects(), now()
        await rig.until(lambda: now() - began > 200, "a while")
        assert (rig.status()["phase"], rig.status()["attempt"], pods(rig)) == ("Stopped", 0, 0)
        assert rig.conditions()["Ready"]["reason"] == "StoppedByCheckpoint"
        assert "spec.suspend" in rig.conditions()["Ready"]["message"]
        assert rig.conditions()["Stalled"]["status"] == "False"
        assert rig.cell.effects() == effects
        rig.checkpoint("more")
        await rig.until(lambda: "stopped the stack" in rig.status(CHECKPOINTS, "more").get("message", ""), "held")
        await lets_go_on(rig)
        assert "stoppedBy" not in rig.status()
        recovery = rig.status()["cells"][0]["recoveries"][-1]
        assert (recovery["checkpoint"], recovery["reason"]) == (
            status["checkpointID"],
            "it was stopped by checkpoint last",
        )
        await to_the_end(rig, continued=ROWS)


async def test_a_change_of_the_spec_alone_does_not_start_a_stopped_stack(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        await taken(rig, "last", stopAfter=True)
        await rig.until(lambda: pods(rig) == 0, "no pods")
        rig.change(recovery={"backoffLimit": 7})
        await rig.until(lambda: rig.status()["observedGeneration"] == 2, "seen")
        began = now()
        await rig.until(lambda: now() - began > 30, "a while")
        assert (pods(rig), rig.status()["stoppedBy"]) == (0, "last")


async def test_a_checkpoint_that_fails_stops_nothing(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        rig.checkpoint("last", stopAfter=True)
        await rig.reaches("last", "Committing")
        rig.kube.remove(PODS, "local", "rig-agent-0")
        await rig.until(lambda: rig.final("last"), "final")
        assert rig.status(CHECKPOINTS, "last")["phase"] == "Failed"
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert "stoppedBy" not in rig.status()
        await to_the_end(rig)


@at_any_write(12)
async def test_c1_an_operator_killed_at_any_write_leaves_the_stack_stopped_or_at_work(
    tmp_path: Path, write: int, after: bool
) -> None:
    """As its checkpoint says: stopped where it succeeded, at work where it failed."""
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        began = now()
        await rig.replace_operator(
            write,
            lambda: rig.checkpoint("last", stopAfter=True),
            after=after,
            ended=lambda: rig.final("last") and now() - began > 30,
        )
        await rig.until(lambda: rig.final("last"), "final")
        status = rig.status(CHECKPOINTS, "last")
        if status["phase"] == "Succeeded":
            assert publication(status).state == "published"
            await rig.until(lambda: rig.status().get("stoppedBy") == "last", "stopped")
            await rig.until(lambda: pods(rig) == 0, "no pods")
            assert rig.record().get("attempt", 0) == 0, "nobody died"
            await lets_go_on(rig)
        else:
            assert "stoppedBy" not in rig.status()
        await to_the_end(rig)


# ---- what is kept with it ---------------------------------------------------------------------------------


async def test_a_checkpoint_keeps_what_its_driver_says_with_it(tmp_path: Path) -> None:
    state = {"value": {"step": 7, "seen": [1.5, None], "none": None}}
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        kept = publication(await taken(rig, "one", labels={"step": "7"}, driverState=state))
        assert (kept.labels, kept.driver_state) == ({"step": "7"}, state)
        elsewhere = {"uri": "s3://trainer/step-8", "digest": "a" * 64}
        kept = publication(await taken(rig, "two", driverState=elsewhere))
        assert (kept.labels, kept.driver_state) == ({}, elsewhere)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"value": {"big": "x" * 9000}}, "put it into a bucket"),
        ({"value": {}, "uri": "s3://b/k", "digest": "a" * 64}, "as value, or as uri and digest"),
        ({"uri": "s3://b/k"}, "needs digest beside it"),
    ],
)
async def test_a_driver_state_that_cannot_be_kept_fails_the_checkpoint_and_says_what_to_do(
    tmp_path: Path, state: dict[str, Any], says: str
) -> None:
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        status = await taken(rig, "one", driverState=state)
        assert (status["phase"], status["reason"]) == ("Failed", "InvalidSpec")
        assert says in status["message"]
        assert "x" * 100 not in status["message"]


# ---- episodes ---------------------------------------------------------------------------------------------


async def test_a_checkpoint_of_some_rollouts_continues_those_and_the_rest_starts_over(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        live = sorted(rig.cell.participant("env")._live)
        status = await taken(rig, "some", episodes=[*live[:2], "unknown-9"])
        assert (status["phase"], status["episodes"]) == ("Succeeded", 2)
        kept = publication(status)
        assert (kept.episodes, kept.left_out) == (live[:2], live[2:])
        rig.kube.remove(PODS, "local", "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        await to_the_end(rig, continued=2)
