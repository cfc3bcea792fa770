"""Taking a checkpoint, step by step, over a whole cell: what is asked of whom, what stops, what is left out, and what
becomes of it where the coordinator or a participant is gone in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_rig.cell import GRACE, Rig, cell
from gym_rig.network import Alive, Fault
from gym_rig.virtual import now, settle
from gym_rig.wire import code, post
from gym_servers.control.writes import RecordWrite
from gym_servers.coordination.checkpoint import Checkpoint, CheckpointFailed, Progress, Request
from gym_servers.coordination.client import ParticipantClient, Unreachable
from gym_servers.coordination.order import PREPARE
from gym_servers.coordination.verbs import forget_all, resume_all, retire_all
from gym_servers.engine.rows import counter_rows
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.phases import Phase
from gym_servers.stack.settings import ServerSettings
from gym_servers.storage.cells import directory_name, published
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.locate import join, open_store
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.store import StorageError

NAMES = ("env", "policy", "agent", "counter", "collection")


@asynccontextmanager
async def collecting(folder: Path, rollouts: int = 3) -> AsyncIterator[Rig]:
    """A cell in the middle of its work."""
    async with cell(folder, counter_rows(rollouts, 2)) as rig:
        await rig.until(lambda: rig.effects() >= rollouts)
        yield rig


async def quiet(_: Progress) -> None:
    return None


def checkpoint(rig: Rig, name: str = "cp", tell: Any = quiet, **options: Any) -> Checkpoint:
    """A checkpoint that the test takes itself, so that no look goes on beside it."""
    record = rig.controller.record
    uri = join(rig.root, directory_name(record.attempt, 90, name))
    sessions = {participant: pin.session for participant, pin in record.pins.items()}
    request = Request(name, name, uri, "rig-uid", 0, record.attempt, 90, sessions, lease_grace=GRACE, **options)
    return Checkpoint([rig.client(one) for one in record.pins], request, open_store(uri), tell, rig.wall)


def phases(rig: Rig) -> set[Phase]:
    return {one.server.participant.gate.phase for one in rig.processes_by_name.values()}


def stored(rig: Rig) -> list[str]:
    return sorted(read_publication(path.read_bytes()).state for path in Path(rig.root).rglob(CHECKPOINT))


def live(rig: Rig) -> list[str]:
    return sorted(rig.participant("env")._live)


async def to_the_end(rig: Rig, rollouts: int = 3, continued: int | None = None) -> None:
    await rig.until(rig.complete)
    counted = rig.account(rollouts)
    assert counted.problems == []
    assert (counted.rows, counted.reward_mean) == (rollouts, 1.0)
    if continued is not None:
        assert counted.continued == continued


# ---- the order of things ----------------------------------------------------------------------------------


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


# ---- stop -------------------------------------------------------------------------------------------------


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


# ---- scope ------------------------------------------------------------------------------------------------


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


def without_floor(settings: ServerSettings) -> ServerSettings:
    """As for a driver that cannot know the floor."""
    checkpoint = settings.checkpoint.model_copy(update={"attempt_floor": False})
    return settings.model_copy(update={"checkpoint": checkpoint})


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


# ---- who is meant -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["Preparing", "Committing"])
async def test_c16_a_participant_that_is_another_process_by_now_aborts_the_checkpoint_by_name(
    tmp_path: Path, moment: str
) -> None:
    """Before it is prepared, and between its prepare and its freeze."""
    async with collecting(tmp_path) as rig:

        async def tell(progress: Progress) -> None:
            if progress.phase == moment:
                rig.kill("counter")
                rig.start("counter")

        with pytest.raises(CheckpointFailed, match="counter") as failed:
            await checkpoint(rig, tell=tell).take()
        assert failed.value.reason == "SessionChanged"
        assert phases(rig) == {Phase.IDLE, Phase.STARTING}
        await to_the_end(rig)


async def test_a_checkpoint_that_is_not_ready_names_the_participant_the_step_and_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(tmp_path) as rig:
        freed = asyncio.Event()
        plane = rig.processes_by_name["counter"].plane
        assert plane is not None
        monkeypatch.setattr(plane._retires, "_retire", lambda episodes: freed.wait())
        retiring = asyncio.create_task(
            plane.retire(m.RetireRequest(checkpoint_id="v", deadline_ts=now() + 100, episode_ids=["gone"]))
        )
        await asyncio.sleep(7)
        with pytest.raises(
            CheckpointFailed, match=r"counter was not ready in 2 s: gone is in retire for 9\."
        ) as failed:
            await checkpoint(rig, prepare_timeout=2).take()
        assert failed.value.reason == "PrepareTimeout"
        assert phases(rig) == {Phase.IDLE}
        freed.set()
        await retiring
        await rig.checkpoint("now")


@pytest.mark.parametrize("victim", ["collection", "env", "policy", "agent", "counter"])
@pytest.mark.parametrize("report", [None, m.Report(ready=False)])
async def test_a_participant_that_is_not_ready_and_does_not_say_why_is_not_taken_for_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, report: m.Report | None
) -> None:
    async with collecting(tmp_path) as rig:
        once, asked = ParticipantClient._once, list[str]()

        async def silent(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            asked.append(verb)
            answer = await once(self, method, verb, *arguments)
            return (
                m.PhaseReply(phase="preparing", report=report) if (self.name, verb) == (victim, "prepare") else answer
            )

        monkeypatch.setattr(ParticipantClient, "_once", silent)
        with pytest.raises(CheckpointFailed, match=f"{victim} was not ready in .* does not say why") as failed:
            await checkpoint(rig).take()
        assert failed.value.reason == "PrepareTimeout"
        assert "commit" not in asked
        assert phases(rig) == {Phase.IDLE}


async def test_c21_a_participant_that_moved_away_is_named_within_the_deadline_and_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(tmp_path) as rig:
        once, asked = ParticipantClient._once, 0

        async def gone(self: ParticipantClient, *arguments: Any) -> Any:
            nonlocal asked
            if self.name == "agent":
                asked += 1
                raise Unreachable("agent does not answer on control: ConnectError")
            return await once(self, *arguments)

        began = now()
        with monkeypatch.context() as patched:
            patched.setattr(ParticipantClient, "_once", gone)
            with pytest.raises(CheckpointFailed, match="agent does not answer") as failed:
                await checkpoint(rig, prepare_timeout=5).take()
            assert failed.value.reason == "ParticipantUnreachable"
            assert now() - began < 16
            tries = asked
            await asyncio.sleep(60)
            assert asked == tries
        assert phases(rig) == {Phase.IDLE}
        await to_the_end(rig)


async def test_c7_connections_that_break_off_at_the_very_end_discard_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is written, and the question whether it is gets lost: several times, from everybody."""
    async with collecting(tmp_path) as rig:
        once, lost = ParticipantClient._once, 0

        async def flaky(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            nonlocal lost
            resumed = phases(rig) == {Phase.IDLE}
            if verb == "status" and resumed and began and lost < 20:
                lost += 1
                raise Unreachable(f"{self.name} does not answer on control: ReadError")
            return await once(self, method, verb, *arguments)

        began = False

        async def tell(progress: Progress) -> None:
            nonlocal began
            began = progress.phase == "Committing"

        monkeypatch.setattr(ParticipantClient, "_once", flaky)
        assert (await checkpoint(rig, tell=tell).take()).publication.state == "published"
        assert lost == 20


async def test_c7_a_refusal_is_an_answer_and_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(tmp_path) as rig:
        once, asked = ParticipantClient._once, 0

        async def refuses(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            nonlocal asked
            if (self.name, verb) == ("policy", "prepare"):
                asked += 1
                raise ProtocolError("checkpoint_conflict", "policy: another one is open")
            return await once(self, method, verb, *arguments)

        monkeypatch.setattr(ParticipantClient, "_once", refuses)
        with pytest.raises(CheckpointFailed, match="another one is open"):
            await checkpoint(rig).take()
        assert asked == 1


async def test_c6_of_two_checkpoints_at_once_one_is_taken_and_one_is_refused(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        both = [asyncio.ensure_future(rig.controller.take(f"{name}-id", name, quiet)) for name in ("one", "two")]
        await rig.until(lambda: all(task.done() for task in both))
        errors = [task.exception() for task in both]
        assert [type(error) for error in errors if error is not None] == [CheckpointFailed]
        assert stored(rig) == ["published"]
        # And two coordinators that know nothing of each other: whoever closed a participant first keeps it.
        outcomes = await asyncio.gather(
            checkpoint(rig, "a").take(), checkpoint(rig, "b").take(), return_exceptions=True
        )
        assert sum(isinstance(one, CheckpointFailed) for one in outcomes) >= 1
        assert phases(rig) == {Phase.IDLE}
        await to_the_end(rig)


# ---- a coordinator that is gone ---------------------------------------------------------------------------


class Coordinator:
    """A rig's coordinator in a process of its own, which can be killed: what it asks then never arrives."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.alive = rig, Alive()
        rig.http = rig.network.client(self.alive)
        rig.controller = rig.coordinator(rig.saved[-1])
        self.tasks: list[asyncio.Task[Any]] = []

    async def take(self, tell: Any = quiet) -> None:
        """Returns when the checkpoint has ended or its coordinator was killed."""
        await self.rig.controller.look()
        task = asyncio.ensure_future(self.rig.controller.take("open-id", "open", tell))
        self.tasks.append(task)
        died = asyncio.ensure_future(self.alive.died.wait())
        await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()

    def replace(self) -> None:
        """Another one takes over: it knows the record and nothing else."""
        self.left = self.rig.controller
        self.rig.http = self.rig.network.client()
        self.rig.controller = self.rig.coordinator(self.rig.saved[-1])

    async def end(self) -> None:
        for task in (*self.tasks, self.left._checkpoint):
            if task is not None:
                task.cancel()
                await asyncio.wait([task], timeout=1)


async def never(coordinator: Coordinator) -> None:
    coordinator.alive.kill()
    await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize(
    ("step", "victim"),
    [
        ("status", "env"),
        ("prepare", "collection"),
        ("prepare", "counter"),
        ("commit", "counter"),
        ("renew", "env"),
        ("resume", "agent"),
        ("Publishing", ""),
    ],
)
async def test_c1_a_coordinator_that_is_killed_at_any_step_leaves_a_settled_checkpoint_and_an_open_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, victim: str
) -> None:
    async with collecting(tmp_path) as rig:
        first = Coordinator(rig)
        once, killed = ParticipantClient._once, False

        async def dies(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            nonlocal killed
            # With the question sent: the answer finds nobody.
            answer = await once(self, method, verb, *arguments)
            opened = rig.controller.record.open is not None
            if opened and not killed and (self.name, verb) == (victim, step):
                killed = True
                await never(first)
            return answer

        async def tell(progress: Progress) -> None:
            if progress.phase == step:
                await never(first)

        monkeypatch.setattr(ParticipantClient, "_once", dies)
        await first.take(tell)
        assert first.alive.died.is_set()
        first.replace()
        began = now()
        await rig.until(lambda: rig.controller.record.open is None)
        await rig.until(lambda: phases(rig) == {Phase.IDLE})
        assert now() - began < GRACE
        assert stored(rig) == ["published" if step == "Publishing" else "abandoned"]
        await rig.checkpoint("next")
        rig.kill("agent")
        await to_the_end(rig)
        await first.end()


async def test_c4_a_coordinator_that_was_away_when_the_work_ended_finds_it_with_its_next_look(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        first = Coordinator(rig)

        async def tell(progress: Progress) -> None:
            if progress.phase == "Publishing":
                await never(first)

        await first.take(tell)
        await asyncio.sleep(600)
        assert stored(rig) == []
        first.replace()
        await rig.controller.look()
        assert stored(rig) == ["published"]
        assert rig.controller.record.open is None
        await first.end()


async def test_c5_a_cell_whose_coordinator_never_comes_back_opens_by_itself(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        first = Coordinator(rig)

        async def tell(progress: Progress) -> None:
            if progress.phase == "Committing":
                await never(first)

        await first.take(tell)
        assert phases(rig) == {Phase.PREPARED}
        await asyncio.sleep(GRACE + 1)
        assert phases(rig) == {Phase.IDLE}
        first.replace()
        await first.end()
        await to_the_end(rig)


async def test_c2_what_is_written_after_a_checkpoint_was_declared_failed_is_never_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor gives it up at start-up; the upload of one participant ends a while later."""
    async with collecting(tmp_path) as rig:
        await rig.checkpoint("good")
        first = Coordinator(rig)
        original, gate = RecordWrite._run, asyncio.Event()

        async def hangs(self: RecordWrite, write: Any, seconds: float) -> None:
            await gate.wait()
            await original(self, write, seconds)

        monkeypatch.setattr(RecordWrite, "_run", hangs)
        taking = asyncio.ensure_future(first.take())
        while not any(one.plane and one.plane.status().write.state == "writing" for one in running(rig)):  # type: ignore[union-attr]  # noqa: ASYNC110 - as a coordinator asks
            await asyncio.sleep(0.05)
        await asyncio.sleep(1)
        first.alive.kill()
        await taking
        first.replace()
        await rig.until(lambda: rig.controller.record.open is None)
        assert stored(rig) == ["abandoned", "published"]
        gate.set()
        await rig.until(lambda: all(one.plane.status().write.state == "done" for one in running(rig)))  # type: ignore[union-attr]
        assert stored(rig) == ["abandoned", "published"]
        assert [publication.name for _, publication, _ in published(open_store(rig.root))] == ["good"]
        rig.kill("agent")
        await rig.until(lambda: rig.running(1))
        choice = rig.controller.record.recoveries[-1].checkpoint
        assert choice is not None
        assert choice.name == "good"
        await to_the_end(rig)
        await first.end()


def running(rig: Rig) -> list[Any]:
    return list(rig.processes_by_name.values())


@pytest.mark.parametrize("step", ["prepare", "commit", "renew", "resume"])
@pytest.mark.parametrize("victim", ["policy", "counter"])
async def test_c3_a_death_between_two_acknowledgements_is_named_the_others_go_on_and_the_cell_recovers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, step: str
) -> None:
    """It aborts the checkpoint, but for one that is proved and durable by then."""
    async with collecting(tmp_path) as rig:
        await rig.checkpoint("good")
        once, killed, resumed = ParticipantClient._once, False, set[str]()

        async def dies(self: ParticipantClient, method: str, verb: str, content: Any, *arguments: Any) -> Any:
            nonlocal killed
            if (self.name, verb, killed) == (victim, step, False):
                killed = True
                await asyncio.sleep(0.1)  # what can be written by now is written
                rig.kill(victim)
            answer = await once(self, method, verb, content, *arguments)
            if verb == "resume" and content["checkpoint_id"] == "open-id":
                resumed.add(self.name)
            return answer

        monkeypatch.setattr(ParticipantClient, "_once", dies)
        taken = asyncio.ensure_future(rig.controller.take("open-id", "open", quiet))
        await rig.until(lambda: taken.done() and rig.running(1))
        recovery = rig.controller.record.recoveries[-1]
        assert victim in recovery.reason
        if step == "resume":
            assert taken.result().publication.state == "published"
            assert (stored(rig), recovery.checkpoint and recovery.checkpoint.name) == (["published"] * 2, "open")
        else:
            failure = taken.exception()
            assert isinstance(failure, CheckpointFailed)
            assert victim in str(failure)
            assert stored(rig) == ([] if step == "prepare" else ["abandoned"]) + ["published"]
            assert recovery.checkpoint is not None
            assert recovery.checkpoint.name == "good"
        asked = PREPARE.index(rig.settings[victim].kind) if step == "prepare" else len(PREPARE)
        closed = {name for name, one in rig.settings.items() if one.kind in PREPARE[:asked]}
        assert closed - {victim} <= resumed
        await to_the_end(rig, continued=3)
