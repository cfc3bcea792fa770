"""`single-agent-turn` in a cell: what makes an episode a restart, and what fails while a checkpoint is open."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_rig.episodes import configured, empty, run_body, running, tampered
from gym_rig.verbs import commit, prepare, ready, resume
from gym_rig.virtual import now, settle
from gym_rig.wire import code, ok, post
from gym_servers.agent.simple_agent import SimpleAgent
from gym_servers.coordination.verbs import resume_all
from gym_servers.environment.server import EnvironmentServer
from gym_servers.http.peers import Reply
from gym_servers.protocol import headers
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.resources.counter import CounterServer

# ---- restarts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["setting", "header", "mcp", "list", "agent"])
async def test_an_episode_that_cannot_be_continued_is_reported_and_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    access = {"kind": "mcp", "url": "http://counter/mcp", "headers": {"x-nemo-gym-session-token": "SECRET"}}

    async def change(name: str, path: str, reply: Reply) -> Reply:
        if path == "/v1/agent_sessions" and why != "agent":
            # An agent of another make, which says nothing.
            return Reply(reply.body, {k: v for k, v in reply.headers.items() if k != headers.RESTART}, reply.jar)
        if path not in ("/seed_session", "/v1/agent_sessions") or (path == "/seed_session") == (why == "agent"):
            return reply
        body = {**reply.body, "resources_tools": {"mcp": access, "list": [access]}.get(why)}
        marked = {**reply.headers, headers.RESTART: "x"} if why in ("header", "agent") else reply.headers
        return Reply(body, marked, reply.jar)

    tampered(monkeypatch, change)
    config = {"checkpoint_boundaries": False} if why == "setting" else {}
    async with configured(tmp_path, **config) as rig:
        first = running(rig)
        await rig.until(rig.effects)
        assert rig.participant("env").survey().restarts == {"x"}  # known before anybody else is asked
        outcome = await rig.checkpoint("one")
        assert (outcome.publication.episodes, outcome.publication.restarts) == ([], ["x"])
        for file in (tmp_path / "checkpoints").rglob("*"):
            assert not file.is_file() or b"SECRET" not in file.read_bytes()
        rig.kill("agent")
        await rig.until(lambda: rig.running(1))
        first.cancel()
        assert (await running(rig, attempt=1))["result"]["reward"] == 1.0


async def test_the_limits_of_a_checkpoint_reach_episodes_of_both_kinds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One restart beside one that is continued: neither is in the other's way."""

    async def change(name: str, path: str, reply: Reply) -> Reply:
        session = str((reply.body or {}).get("resources_session_id")) if path == "/seed_session" else ""
        return Reply(reply.body, {**reply.headers, headers.RESTART: "x"}, reply.jar) if session[:1] == "y" else reply

    tampered(monkeypatch, change)
    async with configured(tmp_path) as rig:
        both = [running(rig, "x"), running(rig, "y")]
        await rig.until(lambda: len(rig.participant("counter")._sessions) == 2)
        outcome = await rig.checkpoint("one")
        assert (outcome.publication.episodes, outcome.publication.restarts) == (["x"], ["y"])
        for answer in await asyncio.gather(*both):
            assert answer["result"]["reward"] == 1.0


@pytest.mark.parametrize("replays", [True, False])
async def test_a_verify_holds_a_checkpoint_up_unless_the_seed_said_that_it_may_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replays: bool
) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def verify(*_: Any) -> dict[str, Any]:
        begun.set()
        await ended.wait()
        return {"reward": 1.0}

    monkeypatch.setattr(CounterServer, "verify", verify)
    monkeypatch.setattr(CounterServer, "verify_replays", replays)
    async with configured(tmp_path) as rig:
        episode, env = running(rig), rig.participant("env")
        await begun.wait()
        assert prepare(env, "hand") == replays
        ended.set()
        await asyncio.sleep(1)
        assert ready(env)
        stands = b'"stage":"verify"' if replays else b'"stage":"return"'  # a result is held, or was waited for
        assert stands in (await commit(env, "x"))["x"]
        resume(env, "hand")
        assert (await episode)["result"]["reward"] == 1.0


def test_an_environment_that_says_nothing_has_no_boundaries() -> None:
    assert EnvironmentServer.checkpoint_boundaries is False


# ---- failures while a checkpoint is open -------------------------------------------------------------------


async def test_an_activation_that_fails_while_a_checkpoint_is_open_is_closed_after_the_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = asyncio.Event()

    async def breaks(self: SimpleAgent, session: Any, activation: Any, params: Any) -> Any:
        async def call() -> Any:
            await fail.wait()
            raise ProtocolError("invalid_request", "the model cannot")

        return await self.setup.participant.model_call(activation, call)

    monkeypatch.setattr(SimpleAgent, "turn", breaks)
    async with configured(tmp_path) as rig:
        answer = running(rig)
        await rig.until(lambda: rig.participant("agent")._sessions)
        env, agent = rig.participant("env"), rig.participant("agent")
        clients = [rig.client(name) for name in ("env", "policy", "agent", "counter")]
        reports = []
        for client in clients:
            asked = m.PrepareRequest(checkpoint_id="hand", deadline_ts=now() + 5)
            reports.append((await client.call("prepare", asked, m.PhaseReply)).report)
        assert [report.episodes for report in reports if report and report.episodes] == [["x"]]
        fail.set()
        await settle()
        assert (agent.survey().restarts, agent.survey().ready) == ({"x"}, True)
        assert not answer.done()
        assert len(agent._sessions) == 1
        assert await resume_all(clients, "hand", now() + 5) == {}
        failure = (await answer)["failure"]
        assert (failure["failure_kind"], failure["stage"]) == ("agent_request_failed", "invoke_agent")
        assert empty(rig)
        assert env.survey().counts["live"] == 0


async def test_a_refused_duplicate_neither_ends_nor_cleans_up_the_live_one(tmp_path: Path) -> None:
    async with configured(tmp_path) as rig:
        live = running(rig)
        await rig.until(rig.effects)
        other = run_body()
        other["task"] = {"task_input": {"responses_create_params": {"input": "else"}}}
        assert code(await post(rig, "env", "/run", other)) == "checkpoint_conflict"
        await asyncio.sleep(0.1)
        assert not empty(rig)
        assert (await live)["result"]["reward"] == 1.0


# ---- calls of the agent that no session owns ---------------------------------------------------------------


async def test_a_direct_call_is_a_restart_of_its_episode_and_is_refused_without_one(tmp_path: Path) -> None:
    async with configured(tmp_path) as rig:
        params = {"input": "add 5 then get the count"}
        response = await post(rig, "agent", "/v1/responses", params)
        assert (response.status_code, code(response)) == (400, "rollout_id_required")
        _, jar = await ok(rig, "counter", "/ng-rollout/d/seed_session", {"initial_count": 1})
        direct = asyncio.create_task(post(rig, "agent", "/ng-rollout/d/v1/responses", params, jar=jar))
        await settle()
        assert rig.participant("agent").survey().restarts == {"d"}
        outcome = await rig.checkpoint("one")
        assert (outcome.publication.episodes, outcome.publication.restarts) == ([], ["d"])
        reply = (await direct).json()
        outputs = [item["output"] for item in reply["output"] if item["type"] == "function_call_output"]
        assert outputs == ['{"success": true}', '{"count": 6}']
        assert rig.participant("agent").survey().restarts == frozenset()


async def test_tool_headers_make_a_session_a_restart_and_reach_no_record(tmp_path: Path) -> None:
    async with configured(tmp_path) as rig:
        access = {"kind": "direct_http", "base_url": "http://counter", "headers": {"authorization": "SECRET"}}
        body = {"agent_session_id": "a", "tool_accesses": [access]}
        response = await post(rig, "agent", "/ng-rollout/x/v1/agent_sessions", body)
        assert response.headers[headers.RESTART] == "agent"
        participant = rig.participant("agent")
        assert participant.survey().restarts == {"x"}
        assert participant.session_of(Episode("x", 0)).accesses[0]["headers"] == {"authorization": "SECRET"}
