"""An API server that does not answer for a minute, and one whose watches tell nothing any more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gym_operator.api.names import SERVER_LABEL, STACK_LABEL, STACK_UID_LABEL
from gym_operator.effects.fleet import RESYNC_SECONDS, STUCK_SECONDS
from gym_operator.effects.kube import CHECKPOINTS, PODS, RESTORES, SCHEDULES, STACKS, Resource
from gym_operator.effects.resync import WATCHED
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, Reopened, operated
from gym_servers.engine.rows import counter_rows
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CHECKPOINT, read_publication

ROWS = 12
OUTAGE_SECONDS = 60.0
LEASE_SECONDS = 60.0


async def under_way(rig: OperatedRig) -> None:
    await rig.until(rig.in_service, "in service")
    await rig.until(lambda: rig.cell.effects() >= 2, "tools were called")


async def without_an_api_server(rig: OperatedRig, seconds: float = OUTAGE_SECONDS) -> None:
    """Nothing is answered and nothing is told; what has happened meanwhile is told when it is back."""
    told = rig.kube.watch
    missed = []
    rig.kube.dead = True
    rig.kube.watch = lambda *event: missed.append(event)
    await asyncio.sleep(seconds)
    rig.kube.dead = False
    rig.kube.watch = told
    for event in missed:
        told(*event)


@pytest.mark.parametrize("phase", ["Preparing", "Committing", "Publishing"])
async def test_an_outage_in_a_checkpoint_leaves_nothing_open_and_nobody_parked(tmp_path: Path, phase: str) -> None:
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        pods = rig.pods()
        rig.checkpoint("torn")
        await rig.reaches("torn", phase)
        await without_an_api_server(rig)
        await rig.until(lambda: rig.final("torn"), "final")
        torn = rig.status(CHECKPOINTS, "torn")
        landed = read_publication(open_store(torn["uri"]).get(CHECKPOINT))
        assert (torn["phase"] == "Succeeded") == (landed.state == "published"), torn
        rig.checkpoint("next")
        await rig.until(lambda: rig.final("next"), "the next one")
        assert rig.status(CHECKPOINTS, "next")["phase"] == "Succeeded"
        assert rig.phases() == {"idle"}
        assert (rig.pods(), rig.record().get("attempt", 0)) == (pods, 0), "nothing was replaced"
        await rig.until(rig.complete, "complete")


async def test_rollouts_go_on_within_a_lease_while_the_api_server_is_away(tmp_path: Path) -> None:
    """Whoever was closed opens, whether the operator can write of it or not."""
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        rig.checkpoint("torn")
        await rig.reaches("torn", "Preparing")
        away = asyncio.create_task(without_an_api_server(rig, 5 * LEASE_SECONDS))
        await asyncio.sleep(2 * LEASE_SECONDS)
        effects = rig.cell.effects()
        assert rig.phases() <= {"idle", "preparing"}
        await rig.until(lambda: rig.cell.effects() > effects or rig.phases() == {"idle"}, "it goes on")
        assert not away.done()
        await away
        await rig.until(lambda: rig.final("torn"), "final")
        await rig.until(rig.complete, "complete")


async def test_a_death_during_an_outage_is_recovered_after_it_under_one_attempt(tmp_path: Path) -> None:
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        rig.checkpoint("kept")
        await rig.until(lambda: rig.final("kept"), "kept")
        away = asyncio.create_task(without_an_api_server(rig))
        await asyncio.sleep(5)
        rig.cell.kill("agent")
        await away
        await rig.until(lambda: rig.in_service(1), "recovered")
        await rig.until(rig.complete, "complete")
        assert [one["attempt"] for one in rig.status()["cells"][0]["recoveries"]] == [1]
        assert (
            rig.status()["cells"][0]["recoveries"][0]["checkpoint"] == rig.status(CHECKPOINTS, "kept")["checkpointID"]
        )


async def test_an_outage_makes_no_operator_unhealthy(tmp_path: Path) -> None:
    """A restart would not help, and cost what is under way."""
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        assert rig.operator is not None
        away = asyncio.create_task(without_an_api_server(rig, 300.0))
        while not away.done():
            assert rig.operator.fleet.health()["ok"]
            await asyncio.sleep(10)
        await rig.until(rig.complete, "complete")


async def test_a_step_that_hangs_makes_the_operator_unhealthy(tmp_path: Path) -> None:
    """Whatever is done beside the stacks: the liveness probe is all that helps then."""
    async with operated(tmp_path, counter_rows(1, 1)) as rig:
        await rig.until(rig.complete, "complete")
        assert rig.operator is not None
        fleet = rig.operator.fleet

        async def hang() -> None:
            await asyncio.Event().wait()

        hung = asyncio.create_task(fleet._again("something", 1.0, hang))
        await asyncio.sleep(STUCK_SECONDS - 10)
        assert fleet.health()["ok"]
        await asyncio.sleep(30)
        assert fleet.health()["stuck"] == ["something"]
        assert not fleet.health()["ok"]
        hung.cancel()


async def test_k17_what_silent_watches_do_not_tell_is_seen_all_the_same_and_they_are_opened_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        operator, opened = rig.operator, Reopened(rig)
        assert operator is not None
        monkeypatch.setattr(operator.fleet, "_reopen", opened)
        rig.kube.watch = lambda *_: None
        rig.checkpoint("unheard")
        await asyncio.sleep(RESYNC_SECONDS + 10)
        await rig.until(lambda: rig.final("unheard"), "it was found")
        assert rig.status(CHECKPOINTS, "unheard")["phase"] == "Succeeded"
        await asyncio.sleep(2 * RESYNC_SECONDS)
        assert opened.times == 1, "once, and that helped"
        assert operator.fleet.health()["ok"]
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")


async def test_k17_watches_that_stay_silent_end_in_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening them anew does not help: the liveness probe fails."""
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        await under_way(rig)
        operator = rig.operator
        assert operator is not None
        rig.kube.watch = lambda *_: None
        for number in range(9):
            rig.checkpoint(f"unheard-{number}")
            await asyncio.sleep(RESYNC_SECONDS)
        health = operator.fleet.health()
        assert not health["ok"]
        assert "gymcheckpoints" in health["silentWatches"]


def known(rig: OperatedRig) -> set[tuple[Resource, str]]:
    """The objects that the operator believes to be there."""
    assert rig.operator is not None
    cache = rig.operator.fleet._cache
    bodies = {SCHEDULES: cache.schedules.values(), RESTORES: cache.restores.values(), STACKS: cache.stacks.values()}
    return {
        *((resource, body["metadata"]["name"]) for resource, found in bodies.items() for body in found),
        *((CHECKPOINTS, entry.name) for entry in cache.entries()),
        *((PODS, pod.name) for pod in cache.all_pods()),
    }


async def test_k17_what_was_deleted_is_forgotten_though_the_api_server_knows_no_more_that_it_was(
    tmp_path: Path,
) -> None:
    """The watches are silent, and what happened was compacted before anybody asked."""
    async with operated(tmp_path, counter_rows(ROWS, 1), rate=1.0) as rig:
        await rig.until(rig.in_service, "in service")
        rig.checkpoint("gone")
        labels = {STACK_LABEL: "of-another", STACK_UID_LABEL: "of-another", SERVER_LABEL: "agent"}
        template = {"spec": {"stackRef": {"name": IDENTITY.name}}}
        bodies = {
            STACKS: {"metadata": {"name": "gone"}, "spec": {**rig.spec, "suspend": True}},
            SCHEDULES: {"metadata": {"name": "gone"}, "spec": {"every": "1h", "suspend": True, "template": template}},
            RESTORES: {"metadata": {"name": "gone"}, "spec": {"stackRef": {"name": IDENTITY.name}}},
            PODS: {"metadata": {"name": "gone", "labels": labels}, "spec": {}},
        }
        for resource, body in bodies.items():
            rig.kube.put(resource, IDENTITY.namespace, body)
        await rig.until(lambda: rig.final("gone"), "taken")
        await rig.until(lambda: rig.status(RESTORES, "gone").get("phase") == "Failed", "it names no checkpoint")
        operator = rig.operator
        assert operator is not None
        await rig.until(operator.fleet._resync.complete.is_set, "all was told once")
        everything = {(resource, "gone") for resource in WATCHED}
        before = known(rig)
        assert everything <= before

        rig.kube.watch = lambda *_: None
        for resource in WATCHED:
            rig.kube.remove(resource, IDENTITY.namespace, "gone")
        rig.kube.compact()
        assert known(rig) == before
        await asyncio.sleep(RESYNC_SECONDS + 1)
        assert known(rig) == before - everything
        assert operator.fleet.health()["stacks"] == 1
        assert operator.fleet.health()["ok"]
