"""Which episodes a checkpoint of a whole cell continues, and what becomes of those that it leaves out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_rig.cell import Rig, cell
from gym_rig.network import Fault
from gym_rig.taking import checkpoint, collecting, live, to_the_end
from gym_rig.virtual import now, settle
from gym_rig.wire import code, post
from gym_servers.coordination.checkpoint import CheckpointFailed, Request
from gym_servers.coordination.client import ParticipantClient
from gym_servers.coordination.verbs import resume_all
from gym_servers.engine.rows import counter_rows
from gym_servers.stack.settings import ServerSettings
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import StorageError


def without_floor(settings: ServerSettings) -> ServerSettings:
    """As for a driver that cannot know the floor."""
    checkpoint = settings.checkpoint.model_copy(update={"attempt_floor": False})
    return settings.model_copy(update={"checkpoint": checkpoint})


@pytest.mark.parametrize("named_by", ["rollout", "key"])
async def test_a_checkpoint_of_some_episodes_continues_those_and_the_rest_starts_over(
    tmp_path: Path, named_by: str
) -> None:
    async with collecting(tmp_path) as rig:
        kept = live(rig)[0]
        assert "-a" not in kept  # attempt 0: the rollout's name is the episode's
        outcome = await checkpoint(rig, episodes=frozenset({kept})).take()
        assert outcome.publication.scope == outcome.publication.episodes == [kept]
        assert outcome.publication.restarts == []
        rig.kill("agent")
        await to_the_end(rig, continued=1)


async def test_a_rollout_is_kept_under_whatever_attempt_it_runs() -> None:
    request = Request("a", "a", "", "", 0, 0, 1, {}, episodes=frozenset({"r", "s-a2"}))
    assert [request.keeps(key) for key in ("r", "r-a7", "s-a2", "s-a3", "s", "t")] == [True, True, True, *[False] * 3]
    assert Request("a", "a", "", "", 0, 0, 1, {}).keeps("anything")


async def test_what_cannot_be_continued_is_told_to_the_later_stages_and_named(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        first, *others = live(rig)
        env = rig.participant("env")
        env.restart_only(env._live[first])
        outcome = await checkpoint(rig).take()
        assert (outcome.publication.restarts, outcome.publication.episodes) == ([first], others)
        for name in ("model", "agent", "resources"):
            (participant,) = [
                one.server.participant
                for one in rig.processes_by_name.values()
                if one.server.participant.kind == name
            ]
            told = getattr(participant, "_restarts", frozenset({first}))
            assert told == frozenset({first}), name
        rig.kill("agent")
        await to_the_end(rig, continued=2)


async def test_a_later_stages_restarts_leave_the_scope_too(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        rig.participant("counter").mode = "restart_only"
        outcome = await checkpoint(rig).take()
        assert (outcome.publication.scope, outcome.publication.episodes) == ([], [])
        assert outcome.publication.restarts == live(rig)


TASK = {"responses_create_params": {"input": "add 5 then add 6 then get the count"}, "task_data": {}}


async def run(rig: Rig, rollout: str, attempt: int) -> httpx.Response:
    task_data = {"initial_count": 0, "expected_count": 11}
    body = {
        "episode_id": {"rollout_id": rollout, "attempt": attempt},
        "task": {"task_input": {**TASK, "task_data": task_data}},
    }
    async with rig.network.client() as client:
        return await client.post("http://env/run", json=body)


@asynccontextmanager
async def unclaimed(folder: Path, *rollouts: str) -> AsyncIterator[Rig]:
    """A cell in service after a recovery, whose foreign driver has not come back yet."""
    async with cell(folder, counter_rows(1, 1), collection=None) as rig:
        await rig.until(rig.running)
        running = [asyncio.create_task(run(rig, rollout, 0)) for rollout in rollouts]
        await rig.until(lambda: rig.effects() >= len(rollouts))
        await rig.checkpoint("one")
        rig.kill("policy")
        await rig.until(lambda: rig.running(1))
        for task in running:
            task.cancel()
        assert rig.participant("env").survey().counts["unclaimed"] == len(rollouts)
        yield rig


async def test_what_a_published_checkpoint_leaves_out_and_nobody_claimed_is_freed_everywhere(tmp_path: Path) -> None:
    async with unclaimed(tmp_path, "x", "y") as rig:
        outcome = await checkpoint(rig, episodes=frozenset({"y"})).take()
        assert outcome.publication.episodes == ["y-a1"]
        counts = {name: rig.participant(name).survey().counts for name in ("env", "agent", "counter", "policy")}
        assert (counts["env"]["unclaimed"], counts["agent"]["sessions"]) == (1, 1)
        assert (counts["counter"]["sessions"], counts["policy"]["ledgers"]) == (1, 1)
        assert (await run(rig, "x", 1)).json()["error"]["code"] == "stale_attempt"
        assert (await run(rig, "y", 1)).json()["result"]["reward"] == 1.0
        assert (await run(rig, "x", 2)).json()["result"]["reward"] == 1.0


async def test_left_out_records_are_retired_in_the_order_of_retires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with unclaimed(tmp_path, "x") as rig:
        once, asked = ParticipantClient._once, list[str]()

        async def noted(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            if verb == "retire":
                asked.append(self.kind)
            return await once(self, method, verb, *arguments)

        monkeypatch.setattr(ParticipantClient, "_once", noted)
        await checkpoint(rig, episodes=frozenset()).take()
        assert asked[:2] == ["environment", "agent"]
        assert sorted(asked[2:]) == ["model", "resources"]


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_replacement_that_comes_while_left_out_records_are_given_up_runs_or_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Never both: claimed by its driver, it is not ended for having waited too long."""
    async with unclaimed(tmp_path, "x", "y") as rig:
        once, coming = ParticipantClient._once, list[asyncio.Task[httpx.Response]]()

        async def comes() -> None:
            if not coming:
                coming.append(asyncio.create_task(run(rig, "x", 1)))
                await settle()

        async def noted(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            if moment == "before" and (self.name, verb) == ("env", "retire"):
                await comes()
            answer = await once(self, method, verb, *arguments)
            if moment == "after" and (self.name, verb) == ("env", "retire"):
                await comes()
            return answer

        monkeypatch.setattr(ParticipantClient, "_once", noted)
        await checkpoint(rig, episodes=frozenset()).take()
        (came,) = coming
        answer = (await came).json()
        if moment == "before":
            assert answer["result"]["reward"] == 1.0
        else:
            assert answer["error"]["code"] == "stale_attempt"
        assert (await run(rig, "y", 1)).json()["error"]["code"] == "stale_attempt"
        for name in ("env", "agent", "counter"):
            assert not any(rig.participant(name).survey().counts.values()), name


async def test_left_out_records_are_freed_everywhere_also_where_their_owners_answer_is_lost(tmp_path: Path) -> None:
    async with unclaimed(tmp_path, "x") as rig:
        rig.network.faults.append(Fault("lose reply", "env-control", "retire"))
        await checkpoint(rig, episodes=frozenset()).take()
        assert rig.network.faults == []
        for name in ("env", "agent", "counter", "policy"):
            assert not any(rig.participant(name).survey().counts.values()), name


async def test_unclaimed_records_in_scope_are_kept_and_exported_again(tmp_path: Path) -> None:
    async with unclaimed(tmp_path, "x") as rig:
        outcome = await checkpoint(rig).take()
        assert outcome.publication.episodes == ["x-a1"]
        assert (await run(rig, "x", 1)).json()["result"]["reward"] == 1.0


async def test_without_a_floor_a_restore_fences_what_continues_and_what_starts_over_at_every_server(
    tmp_path: Path,
) -> None:
    async with cell(tmp_path, counter_rows(1, 1), collection=None) as rig:
        rig.settings = {name: without_floor(one) for name, one in rig.settings.items()}
        await rig.until(rig.running)
        running = [asyncio.create_task(run(rig, rollout, 0)) for rollout in ("x", "y")]
        await rig.until(lambda: rig.effects() >= 2)
        env = rig.participant("env")
        env.restart_only(env._live["x"])
        assert (await rig.checkpoint("one")).publication.restarts == ["x"]
        rig.kill("policy")
        await rig.until(lambda: rig.running(1))
        for task in running:
            task.cancel()
        for rollout in ("x", "y"):
            assert (await run(rig, rollout, 0)).json()["error"]["code"] == "stale_attempt"
            for server, path, body in (
                ("counter", "seed_session", {"initial_count": 1}),
                ("policy", "v1/responses", {"input": "add 1"}),
                ("agent", "v1/agent_sessions", {"agent_session_id": "late"}),
            ):
                refused = await post(rig, server, f"/ng-rollout/{rollout}/{path}", body)
                assert code(refused) == "stale_attempt", (server, rollout)
            assert (await run(rig, rollout, 1)).json()["result"]["reward"] == 1.0
        assert (await run(rig, "new", 0)).json()["result"]["reward"] == 1.0


@pytest.mark.parametrize("how", ["it fails", "it stops"])
async def test_nothing_is_freed_by_a_checkpoint_that_is_not_published_or_that_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with unclaimed(tmp_path, "x") as rig:
        taken = checkpoint(rig, episodes=frozenset(), stop=how == "it stops")
        if how == "it fails":

            def away(*_: Any) -> None:
                raise StorageError("the bucket does not answer")

            with monkeypatch.context() as patched, pytest.raises(CheckpointFailed):
                patched.setattr(DirectoryStore, "create", away)
                await taken.take()
        else:
            await taken.take()
            await resume_all([rig.client(name) for name in rig.settings], "cp", now() + 10)
        assert (await run(rig, "x", 1)).json()["result"]["reward"] == 1.0
