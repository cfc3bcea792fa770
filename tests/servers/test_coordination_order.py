"""Taking a checkpoint, step by step, over a whole cell: what is asked of whom, and what stops."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import GRACE
from gym_rig.network import Fault
from gym_rig.taking import checkpoint, collecting, live, phases, stored, to_the_end
from gym_rig.virtual import now
from gym_servers.control.writes import RecordWrite
from gym_servers.coordination.checkpoint import CheckpointFailed
from gym_servers.coordination.client import ParticipantClient
from gym_servers.coordination.verbs import forget_all, resume_all, retire_all
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.phases import Phase
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.manifest import CHECKPOINT
from gym_servers.storage.store import StorageError

NAMES = ("env", "policy", "agent", "counter", "collection")


# ---- the order of things -----------------------------------------------------------------------------------


async def test_verbs_go_in_their_order_and_stop_at_the_first_stage_that_is_not_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(tmp_path) as rig:
        once, asked = ParticipantClient._once, list[tuple[str, str]]()

        async def noted(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            asked.append((verb, self.kind))
            return await once(self, method, verb, *arguments)

        def order(verb: str) -> list[str]:
            return [kind for one, kind in asked if one == verb]

        monkeypatch.setattr(ParticipantClient, "_once", noted)
        await checkpoint(rig, "one").take()
        forward = ["collection", "environment", "model", "agent", "resources"]
        assert order("prepare") == forward
        assert order("resume") == forward[::-1]
        verbs = [verb for verb, _ in asked if verb != "status"]
        assert verbs == ["prepare"] * 5 + ["commit"] * 5 + ["renew"] * 5 + ["resume"] * 5
        asked.clear()
        plane = rig.processes_by_name["policy"].plane
        assert plane is not None
        monkeypatch.setattr(plane._retires, "blockers", lambda: [m.Blocker(id="x", where="retire", age_seconds=3)])
        with pytest.raises(CheckpointFailed, match="policy was not ready"):
            await checkpoint(rig, "two", prepare_timeout=1).take()
        assert order("prepare") == ["collection", "environment", "model"]
        assert order("resume") == ["model", "environment", "collection"]
        assert order("commit") == []


@pytest.mark.parametrize("slow", ["prepare", "commit"])
async def test_leases_are_renewed_for_as_long_as_the_last_one_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """Several times longer than a lease: nobody goes on in between."""
    async with collecting(tmp_path) as rig:
        ends = now() + 3 * GRACE
        tools, plane = rig.participant("counter"), rig.processes_by_name["counter"].plane
        assert plane is not None
        export = tools.export

        async def slowly(scope: Any) -> Any:
            await asyncio.sleep(ends - now())
            return await export(scope)

        def blockers() -> list[m.Blocker]:
            return [m.Blocker(id="x", where="retire", age_seconds=3)] if now() < ends else []

        if slow == "prepare":
            monkeypatch.setattr(plane._retires, "blockers", blockers)
            asyncio.get_running_loop().call_at(ends, tools.gate.touch)
        else:
            monkeypatch.setattr(tools, "export", slowly)
        taken = asyncio.create_task(checkpoint(rig, prepare_timeout=5 * GRACE, commit_timeout=5 * GRACE).take())
        await asyncio.sleep(1)
        while now() < ends - 5:
            assert Phase.IDLE not in phases(rig)
            await asyncio.sleep(5)
        assert (await taken).publication.state == "published"
        assert now() - ends < 5
        await to_the_end(rig, continued=0)


@pytest.mark.parametrize("verb", ["retire", "forget"])
async def test_retires_and_forgets_go_from_the_owner_to_what_it_calls_and_last_to_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """The driver asks for both until it was told: whoever it told before must have done it."""
    async with collecting(tmp_path) as rig:
        once, asked = ParticipantClient._once, list[tuple[str, str]]()

        async def noted(self: ParticipantClient, method: str, asking: str, *arguments: Any) -> Any:
            asked.append((asking, f"{self.kind} asked"))
            try:
                return await once(self, method, asking, *arguments)
            finally:
                asked.append((asking, f"{self.kind} done"))

        monkeypatch.setattr(ParticipantClient, "_once", noted)
        clients = [rig.client(name) for name in ("collection", "counter", "policy", "agent", "env")]
        do = retire_all if verb == "retire" else forget_all
        await do(clients, "v", ["over"], now() + 30)
        steps = [step for one, step in asked if one == verb]
        assert steps[:4] == ["environment asked", "environment done", "agent asked", "agent done"]
        assert sorted(steps[4:8]) == ["model asked", "model done", "resources asked", "resources done"]
        assert steps[8:] == ["collection asked", "collection done"]


async def test_a_driver_that_could_not_be_told_asks_for_its_rollouts_to_be_forgotten_again(tmp_path: Path) -> None:
    """It is the last one, so that nothing is missed where somebody before it cannot be reached."""
    async with collecting(tmp_path) as rig:
        rig.network.faults.append(Fault("unreachable", "counter-control", "forget", calls=10_000))
        await rig.until(rig.complete)
        await asyncio.sleep(300)
        waiting = rig.participant("collection").to_forget()
        assert len(waiting) == 3
        assert rig.participant("env").survey().counts["live"] == 0
        rig.network.faults.clear()
        await rig.until(lambda: rig.participant("collection").to_forget() == [])


async def test_an_episode_in_scope_that_the_environment_does_not_export_is_recorded_as_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(tmp_path) as rig:
        first, *others = live(rig)
        env = rig.participant("env")
        export = env.export

        async def less(scope: Any) -> Any:
            return {key: data for key, data in (await export(scope)).items() if key != first}

        monkeypatch.setattr(env, "export", less)
        landed = (await checkpoint(rig).take()).publication
        assert (landed.scope, landed.episodes, landed.not_started) == ([first, *others], others, [first])
        rig.kill("agent")
        await to_the_end(rig, continued=2)


# ---- stop --------------------------------------------------------------------------------------------------


async def test_a_checkpoint_that_stops_leaves_everybody_closed_for_as_long_as_it_is_held(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        taken = checkpoint(rig, stop=True)
        outcome = await taken.take()
        assert outcome.publication.state == "published"
        assert len(outcome.publication.episodes) == 3
        effects = rig.effects()
        async with taken.held():
            await asyncio.sleep(GRACE * 4)
            assert phases(rig) == {Phase.COMMITTED}
        assert rig.effects() == effects
        assert await resume_all([rig.client(name) for name in NAMES], "cp", now() + 10) == {}
        assert phases(rig) == {Phase.IDLE}
        await to_the_end(rig, continued=0)


async def test_a_stopped_cell_that_nobody_holds_goes_on_by_itself(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        await checkpoint(rig, stop=True).take()
        await asyncio.sleep(GRACE + 1)
        assert phases(rig) == {Phase.IDLE}
        await to_the_end(rig, continued=0)


async def test_processes_that_are_replaced_after_a_stop_continue_with_nothing_done_twice(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        await checkpoint(rig, stop=True).take()
        effects = rig.effects()
        rig.kill()
        await to_the_end(rig, continued=3)
        assert rig.effects() - effects == sum(1 for entry in rig.journal() if entry.get("attempt") == 1)
        calls = [entry["call_id"] for entry in rig.journal() if entry["kind"] == "effect"]
        assert len(calls) == len(set(calls))


@pytest.mark.parametrize("stop", [True, False])
@pytest.mark.parametrize(
    ("verb", "victim"), [("prepare", "counter"), ("commit", "env"), ("renew", "counter"), ("publication", "")]
)
async def test_c5_a_failure_at_any_step_resumes_everybody_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, victim: str, stop: bool
) -> None:
    async with collecting(tmp_path) as rig:
        once, create = ParticipantClient._once, DirectoryStore.create

        async def refuses(self: ParticipantClient, method: str, asked: str, *arguments: Any) -> Any:
            if (self.name, asked) == (victim, verb):
                raise ProtocolError("checkpoint_error", f"{self.name}: no")
            return await once(self, method, asked, *arguments)

        def away(self: DirectoryStore, key: str, data: bytes) -> None:
            if verb == "publication" and key.endswith(CHECKPOINT) and b'"published"' in data:
                raise StorageError("the bucket does not answer")
            create(self, key, data)

        monkeypatch.setattr(ParticipantClient, "_once", refuses)
        monkeypatch.setattr(DirectoryStore, "create", away)
        began = now()
        with pytest.raises(CheckpointFailed) as failed:
            await checkpoint(rig, stop=stop).take()
        assert failed.value.reason == ("StorageError" if verb == "publication" else "Refused")
        assert now() - began < 10
        assert phases(rig) == {Phase.IDLE}
        assert set(stored(rig)) <= {"abandoned"}
        await to_the_end(rig, continued=0)


async def test_a_checkpoint_waits_at_work_for_what_an_earlier_one_left_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is closed meanwhile, and a write that hangs is named."""
    async with collecting(tmp_path) as rig:
        original, gate = RecordWrite._run, asyncio.Event()

        async def hangs(self: RecordWrite, write: Any, seconds: float) -> None:
            await gate.wait()
            await original(self, write, seconds)

        with monkeypatch.context() as patched:
            patched.setattr(RecordWrite, "_run", hangs)
            with pytest.raises(CheckpointFailed, match="did not write"):
                await checkpoint(rig, "slow", commit_timeout=1).take()
        with pytest.raises(CheckpointFailed, match="still writes the records of slow") as failed:
            await checkpoint(rig, "early", prepare_timeout=2).take()
        assert failed.value.reason == "PrepareTimeout"
        waiting = asyncio.create_task(checkpoint(rig, "late").take())
        await asyncio.sleep(5)
        assert phases(rig) == {Phase.IDLE}
        gate.set()
        assert (await waiting).publication.state == "published"
