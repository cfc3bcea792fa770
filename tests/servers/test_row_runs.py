"""Row-shaped `/run`, at the environment and at an agent: the same joins, refusals and continuations as a task's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig, cell
from gym_rig.network import Fault
from gym_rig.verbs import commit, prepare, ready, resume
from gym_rig.virtual import settle
from gym_rig.wire import code, foreign, ok, post, serving
from gym_servers.engine.rows import counter_rows
from gym_servers.http.peers import Peers, Reply
from gym_servers.participants.agent import AgentParticipant
from gym_servers.protocol import headers
from gym_servers.protocol.identity import Episode
from gym_servers.resources.counter import CounterServer

ROW = {
    "responses_create_params": {"input": "add 5 then get the count"},
    "initial_count": 10,
    "expected_count": 15,
    "note": "kept",
}
BOTH = pytest.mark.parametrize("server", ["env", "agent"])


def named(**keys: Any) -> dict[str, Any]:
    return {**ROW, **keys}


def servers(folder: Path, **agent: Any) -> list[dict[str, Any]]:
    """A stack whose environment hands rows to the agent."""
    return [
        {"name": "env", "kind": "environment", "server": "legacy-agent"},
        {"name": "policy", "kind": "model", "server": "scripted", "config": {"base_url": "http://engine"}},
        {"name": "agent", "kind": "agent", "server": "simple-agent", "config": agent},
        {
            "name": "counter",
            "kind": "resources",
            "server": "counter",
            "config": {"journal": str(folder / "journal.jsonl")},
        },
    ]


def seeds(rig: Rig) -> int:
    return sum(entry["kind"] == "seed" for entry in rig.journal())


def generated(rig: Rig) -> int:
    """Model calls that were generated to their end."""
    return sum(entry["kind"] == "tokens" and entry["last"] for entry in rig.journal())


# ---- the shape ----------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    ("prefix", "keys", "episode"),
    [
        ("", {"_ng_rollout_id": "x"}, "x"),
        ("", {"_ng_rollout_id": "x", "_ng_attempt_index": 2}, "x-a2"),
        ("", {"_ng_task_index": 3, "_ng_rollout_index": 1}, "3-1"),
        ("", {"_ng_task_index": 3, "_ng_rollout_index": 1, "_ng_attempt_index": 1}, "3-1-a1"),
        ("/ng-rollout/y-a3", {"_ng_rollout_id": "x", "_ng_attempt_index": 2}, "y-a3"),
    ],
)
async def test_the_answer_is_the_verify_reply_of_the_episode_that_the_row_or_the_path_names(
    tmp_path: Path, server: str, prefix: str, keys: dict[str, Any], episode: str
) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        row, _ = await ok(rig, server, f"{prefix}/run", named(**keys))
        assert (row["reward"], row["note"], row["mask_sample"]) == (1.0, "kept", False)
        assert row["response"]["output"]
        (seed,) = [entry for entry in rig.journal() if entry["kind"] == "seed"]
        assert seed["rollout"] == episode.partition("-a")[0]
        assert seed["attempt"] == int(episode.partition("-a")[2] or 0)
        for name in ("agent", "counter"):
            assert rig.participant(name).survey().counts["sessions"] == 0


@BOTH
async def test_a_row_without_an_identity_is_refused_with_checkpointing_on_alone(tmp_path: Path, server: str) -> None:
    async with foreign(tmp_path / "on") as rig:
        await serving(rig)
        response = await post(rig, server, "/run", ROW)
        assert (response.status_code, code(response)) == (400, "rollout_id_required")
    async with foreign(tmp_path / "off", checkpoints={"enabled": False}) as rig:
        await rig.processes()
        for _ in range(2):
            row, _ = await ok(rig, server, "/run", ROW)
            assert row["reward"] == 1.0
        assert [entry["rollout"] for entry in rig.journal() if entry["kind"] == "seed"] == [None, None]


@BOTH
@pytest.mark.parametrize(
    "row",
    [
        {"responses_create_params": "SECRET", "_ng_rollout_id": "x"},
        {**ROW, "_ng_rollout_id": "x-a1"},
        {**ROW, "_ng_rollout_id": ["SECRET"]},
        {**ROW, "_ng_rollout_id": "x", "_ng_attempt_index": "SECRET"},
        {**ROW, "_ng_rollout_id": "x", "_ng_attempt_index": -1},
        ["SECRET"],
    ],
)
async def test_a_row_of_another_form_is_refused_without_repeating_it(tmp_path: Path, server: str, row: Any) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        response = await post(rig, server, "/run", row)
        assert (response.status_code, code(response)) == (422, "invalid_request")
        assert "SECRET" not in response.text


@BOTH
async def test_c20_a_row_that_is_sent_again_joins_or_is_answered_and_never_runs_twice(
    tmp_path: Path, server: str
) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        row = named(_ng_rollout_id="x")
        first = asyncio.create_task(post(rig, server, "/run", row))
        await settle()
        response = await post(rig, server, "/run", {**row, "note": "another"})
        assert (response.status_code, code(response)) == (409, "checkpoint_conflict")
        second = await post(rig, server, "/run", row)
        assert (await first).json() == second.json() == (await post(rig, server, "/run", row)).json()
        assert (seeds(rig), rig.effects()) == (1, 1)


async def test_an_agent_says_that_a_close_follows_its_verify_and_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[str, bool]] = []
    original = Peers.post

    async def noted(self: Peers, name: str, path: str, body: Any, **options: Any) -> Reply:
        if name == "counter":
            sent.append((path, headers.CLOSE_FOLLOWS in (options.get("headers") or {})))
        return await original(self, name, path, body, **options)

    monkeypatch.setattr(Peers, "post", noted)
    async with foreign(tmp_path) as rig:
        await serving(rig)
        await ok(rig, "agent", "/run", named(_ng_rollout_id="x"))
        assert sent[0] == ("/seed_session", False)
        assert sent[-2:] == [("/verify", True), ("/close_session", False)]


@BOTH
async def test_c12_a_row_that_failed_is_no_row(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any) -> Any:
        raise RuntimeError("the verifier broke")

    monkeypatch.setattr(CounterServer, "verify", fails)
    async with foreign(tmp_path) as rig:
        await serving(rig)
        response = await post(rig, server, "/run", named(_ng_rollout_id="x"))
        assert response.status_code == 502
        assert "reward" not in response.text
        assert set(response.json()) == {"failure"}
        for name in ("agent", "counter"):
            assert not any(rig.participant(name).survey().counts.values()), name


@pytest.mark.parametrize(("server", "form"), [("env", "row"), ("env", "task"), ("agent", "row")])
async def test_c17_a_failure_is_given_to_whoever_waits_and_never_again(
    tmp_path: Path, server: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attempt is used up: whoever did not get the failure learns that, and starts over under the next one."""
    original, failed, scored = CounterServer.verify, asyncio.Event(), 0

    async def fails(self: CounterServer, session: str, body: Any) -> Any:
        nonlocal scored
        scored += 1
        await failed.wait()
        if scored == 1:
            raise RuntimeError("the verifier broke")
        return await original(self, session, body)

    def request(attempt: int) -> dict[str, Any]:
        if form == "row":
            return named(_ng_rollout_id="x", _ng_attempt_index=attempt)
        data = {name: value for name, value in ROW.items() if name != "responses_create_params"}
        given = {"responses_create_params": ROW["responses_create_params"], "task_data": data}
        return {"episode_id": {"rollout_id": "x", "attempt": attempt}, "task": {"task_input": given}}

    monkeypatch.setattr(CounterServer, "verify", fails)
    async with foreign(tmp_path) as rig:
        await serving(rig)
        both = [asyncio.create_task(post(rig, server, "/run", request(0))) for _ in range(2)]
        await rig.until(lambda: scored)
        failed.set()
        for one in both:
            assert "failure" in (await one).json()
        late = await post(rig, server, "/run", request(0))
        assert (late.status_code, code(late)) == (409, "stale_attempt")
        answer, _ = await ok(rig, server, "/run", request(1))
        assert (answer if form == "row" else answer["result"])["reward"] == 1.0
        assert seeds(rig) == 2


async def test_c17_a_driver_whose_failure_was_lost_on_the_way_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = CounterServer.verify

    async def fails(self: CounterServer, session: str, body: Any) -> Any:
        if rig.participant("collection")._attempts["0-0"] == 0:
            rig.network.faults.append(Fault("lose reply", "env", "/run"))
            raise RuntimeError("the verifier broke")
        return await original(self, session, body)

    monkeypatch.setattr(CounterServer, "verify", fails)
    async with cell(tmp_path, counter_rows(1, 1)) as rig:
        await rig.until(rig.complete)
        counted = rig.account(1)
        assert (counted.problems, counted.rows, dict(counted.attempts)) == ([], 1, {"1": 1})


@BOTH
async def test_c12_a_row_that_was_retired_is_refused_and_leaves_nothing(tmp_path: Path, server: str) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        running = asyncio.create_task(post(rig, server, "/run", named(_ng_rollout_id="x")))
        await rig.until(rig.effects)
        for name in ("env", "agent", "counter"):
            participant = rig.participant(name)
            participant.gate.fence.mark("x", 0)
            await participant.retire([Episode("x", 0)])
        assert code(await running) == "stale_attempt"
        for name in ("env", "agent", "counter"):
            counts = rig.participant(name).survey().counts
            assert not any(counts.values()), (name, counts)


# ---- an agent's row through checkpoints and deaths -----------------------------------------------------------


@pytest.mark.parametrize("victim", ["env", "policy", "agent", "counter", "collection"])
async def test_rows_that_an_agent_runs_by_itself_are_continued_after_a_death(tmp_path: Path, victim: str) -> None:
    async with cell(tmp_path, counter_rows(3, 1), servers=servers(tmp_path)) as rig:
        await rig.until(lambda: rig.effects() >= 4)
        await rig.checkpoint("one")
        await rig.until(lambda: rig.effects() >= 6)
        rig.kill(victim)
        await rig.until(rig.complete)
        counted = rig.account(3)
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean, counted.continued) == (3, 1.0, 3)
        for name in ("agent", "counter"):
            assert rig.participant(name).survey().counts["sessions"] == 0


def hold_before_verify(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """The agent stands between the loop's reply and its verify until a checkpoint is open; set when it is there."""
    reached, step = asyncio.Event(), AgentParticipant.step

    @asynccontextmanager
    async def held(self: AgentParticipant, episode: Episode, where: str) -> AsyncIterator[None]:
        if where == "verify" and not reached.is_set():
            reached.set()
            await self.gate.wait_until(lambda: self.gate.checkpoint_open)
        async with step(self, episode, where):
            yield

    monkeypatch.setattr(AgentParticipant, "step", held)
    return reached


async def restored_row(rig: Rig) -> dict[str, Any]:
    row, _ = await ok(rig, "env", "/run", named(_ng_rollout_id="x", _ng_attempt_index=1))
    return dict(row)


async def test_c23_a_death_while_a_row_is_scored_restores_the_reply_and_scores_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is not run again: no token is generated and no tool is called after the restore."""
    async with foreign(tmp_path, servers=servers(tmp_path)) as rig:
        await serving(rig)
        scoring, verify = 0, CounterServer.verify

        async def dies(self: CounterServer, session_id: str, body: Any) -> dict[str, Any]:
            nonlocal scoring
            scoring += 1
            if scoring == 1:
                rig.kill("counter")
            return await verify(self, session_id, body)

        monkeypatch.setattr(CounterServer, "verify", dies)
        reached = hold_before_verify(monkeypatch)
        running = asyncio.create_task(post(rig, "env", "/run", named(_ng_rollout_id="x")))
        await reached.wait()
        await rig.checkpoint("cut")
        await rig.until(lambda: scoring)
        before = (generated(rig), rig.effects(), seeds(rig))
        await rig.until(lambda: rig.running(1))
        running.cancel()
        assert (await restored_row(rig))["reward"] == 1.0
        assert (generated(rig), rig.effects(), seeds(rig)) == before
        assert scoring == 2


async def test_with_verification_skipped_a_row_parks_at_its_return_and_its_reply_is_restored(
    tmp_path: Path,
) -> None:
    async with foreign(tmp_path, servers=servers(tmp_path, skip_verification=True)) as rig:
        await serving(rig)
        running = asyncio.create_task(post(rig, "env", "/run", named(_ng_rollout_id="x")))
        await rig.until(lambda: rig.effects())
        agent = rig.participant("agent")
        outcome = await rig.checkpoint("one")
        assert outcome.publication.episodes == ["x"]
        row = (await running).json()
        assert "reward" not in row
        assert (row["note"], bool(row["response"]["output"])) == ("kept", True)
        assert rig.participant("counter").survey().counts["sessions"] == 0
        assert agent.survey().counts["sessions"] == 0
        rig.kill("agent")
        await rig.until(lambda: rig.running(1))
        again = await restored_row(rig)
        assert again["response"]["output"] == row["response"]["output"]


async def test_an_answer_that_nobody_got_is_restored_with_its_row(tmp_path: Path) -> None:
    """The agent has scored and closed; the environment's boundary still says that the agent runs."""
    async with foreign(tmp_path, servers=servers(tmp_path)) as rig:
        await serving(rig)
        env, agent = rig.participant("env"), rig.participant("agent")
        running = asyncio.create_task(post(rig, "env", "/run", named(_ng_rollout_id="x")))
        await rig.until(rig.effects)
        assert prepare(env, "hand")  # the environment is asked first; the agent goes on and answers
        await agent.gate.wait_until(lambda: len(agent._answered) == 1)
        prepare(agent, "hand")
        await settle()  # it ends what it had begun
        assert ready(agent)
        assert agent.survey().counts == {"sessions": 0, "busy": 1}  # it stands before it answers
        assert set(await commit(agent, "x")) == {"answered/x"}
        assert b'"stage":"invoke_agent"' in (await commit(env, "x"))["x"]
        for participant in (agent, env):
            resume(participant, "hand")
        assert (await running).json()["reward"] == 1.0


async def test_a_relayed_row_over_its_limit_is_ended_at_the_agent_too(tmp_path: Path) -> None:
    described = servers(tmp_path)
    described[0]["config"] = {"default_episode_timeout_seconds": 1.0}
    async with foreign(tmp_path, servers=described) as rig:
        await serving(rig)
        response = await post(rig, "env", "/run", named(_ng_rollout_id="x"))
        assert response.json()["failure"]["failure_kind"] == "agent_timeout"
        await settle()
        effects = rig.effects()
        await asyncio.sleep(60)
        assert rig.effects() == effects
        for name in ("env", "agent", "counter"):
            counts = rig.participant(name).survey().counts
            assert not any(counts.values()), (name, counts)
