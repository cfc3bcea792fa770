"""`single-agent-turn` in a cell: limits, what makes an episode a restart, and where a death finds it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig, cell
from gym_rig.network import Fault, end
from gym_rig.verbs import commit, prepare, ready, resume, start
from gym_rig.virtual import now, settle
from gym_rig.wire import code, foreign, ok, post, serving
from gym_servers.agent.simple_agent import SimpleAgent
from gym_servers.coordination.verbs import resume_all
from gym_servers.engine.rows import counter_rows
from gym_servers.environment.server import EnvironmentServer
from gym_servers.environment.single_agent_turn import STAGES
from gym_servers.http.peers import PATIENCE_SECONDS, Peers, Reply
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.environment import EnvironmentParticipant, Live
from gym_servers.participants.resources import ResourcesParticipant
from gym_servers.protocol import headers
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.resources.counter import CounterServer
from gym_servers.stack.settings import SettingsError

TASK = {
    "task_input": {
        "responses_create_params": {"input": "add 5 then add 7 then get the count"},
        "task_data": {"initial_count": 10, "expected_count": 22},
    },
}


def run_body(rollout: str = "x", attempt: int = 0) -> dict[str, Any]:
    return {"episode_id": {"rollout_id": rollout, "attempt": attempt}, "task": TASK}


def running(rig: Rig, rollout: str = "x", attempt: int = 0) -> asyncio.Task[dict[str, Any]]:
    async def go() -> dict[str, Any]:
        answer: dict[str, Any] = (await post(rig, "env", "/run", run_body(rollout, attempt))).json()
        return answer

    return asyncio.create_task(go())


@asynccontextmanager
async def configured(folder: Path, rate: float = 100.0, **config: Any) -> AsyncIterator[Rig]:
    """A cell that only the test drives, whose environment has this `config`; its engine gives `rate` tokens a
    second."""
    servers = [
        {"name": "env", "kind": "environment", "server": "single-agent-turn", "config": config},
        {"name": "policy", "kind": "model", "server": "scripted", "config": {"base_url": "http://engine"}},
        {"name": "agent", "kind": "agent", "server": "simple-agent"},
        {"name": "counter", "kind": "resources", "server": "counter", "config": {"journal": str(folder / "j")}},
    ]
    async with foreign(folder, rate=rate, servers=servers) as rig:
        await serving(rig)
        yield rig


def empty(rig: Rig) -> bool:
    """Nobody holds a session any more."""
    return not any(rig.participant(name).survey().counts["sessions"] for name in ("agent", "counter"))


def tampered(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, str, Reply], Awaitable[Reply]]) -> None:
    """Every answer of a peer passes through `change(name, path, reply)`."""
    original = Peers.post

    async def posted(self: Peers, name: str, path: str, body: Any, **options: Any) -> Reply:
        return await change(name, path, await original(self, name, path, body, **options))

    monkeypatch.setattr(Peers, "post", posted)


# ---- limits -------------------------------------------------------------------------------------------------


async def test_an_episode_over_its_limit_fails_as_agent_timeout_and_leaves_no_session(tmp_path: Path) -> None:
    async with configured(tmp_path, default_episode_timeout_seconds=1.5) as rig:
        began = now()
        answer = await running(rig)
        assert now() - began == pytest.approx(1.5, abs=0.3)
        assert "result" not in answer
        assert (answer["failure"]["failure_kind"], answer["failure"]["stage"]) == ("agent_timeout", "invoke_agent")
        assert "1.5 s" in answer["failure"]["failure_reason"]
        assert empty(rig)


async def test_the_limit_of_an_episode_does_not_run_on_while_its_cell_is_checkpointed_or_restored(
    tmp_path: Path,
) -> None:
    """It needs a few seconds of work, is made to stand for hours, and dies once."""
    async with configured(tmp_path, default_episode_timeout_seconds=15) as rig:
        first = running(rig)
        await rig.until(rig.effects)
        env, agent = rig.participant("env"), rig.participant("agent")
        record = (await rig.checkpoint("one")).publication
        assert record.episodes == ["x"]
        for participant in (env, agent):
            assert participant.gate.is_open
        rig.kill("policy")
        await rig.until(lambda: rig.running(1))
        first.cancel()
        await asyncio.sleep(3600)
        answer = await running(rig, attempt=1)
        assert answer["result"]["reward"] == 1.0


async def test_episodes_over_the_concurrency_limit_queue_and_fail_when_it_takes_too_long(tmp_path: Path) -> None:
    async with configured(tmp_path, max_concurrent_episodes=1, queue_timeout_seconds=0.5) as rig:
        first, second = running(rig, "x"), running(rig, "y")
        failure = (await second)["failure"]
        assert (failure["failure_kind"], failure["stage"]) == ("transport_local_resource", "queue")
        assert (await first)["result"]["reward"] == 1.0


async def test_cleanup_that_takes_too_long_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    async with configured(tmp_path, cleanup_timeout_seconds=7) as rig:
        monkeypatch.setattr(AgentParticipant, "close", never)

        async def fails(*_: Any) -> Any:
            raise ProtocolError("invalid_request", "cannot")

        monkeypatch.setattr(SimpleAgent, "turn", fails)
        began = now()
        answer = await running(rig)
        assert answer["failure"]["failure_kind"] == "agent_request_failed"
        assert now() - began == pytest.approx(7, abs=0.5)


@pytest.mark.parametrize("how", ["fails", "hangs"])
@pytest.mark.parametrize("which", ["agent", "counter", "both"])
async def test_a_close_that_fails_or_hangs_does_not_keep_the_other_session_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str, how: str
) -> None:
    async def broken(*_: Any) -> None:
        if how == "hangs":
            await asyncio.Event().wait()
        raise ProtocolError("checkpoint_error", "cannot end it")

    async def fails(*_: Any) -> Any:
        raise ProtocolError("invalid_request", "cannot")

    monkeypatch.setattr(SimpleAgent, "turn", fails)
    for name, kind in (("agent", AgentParticipant), ("counter", ResourcesParticipant)):
        if which in (name, "both"):
            monkeypatch.setattr(kind, "close", broken)
    async with configured(tmp_path, cleanup_timeout_seconds=8) as rig:
        began = now()
        answer = await running(rig)
        assert answer["failure"]["failure_kind"] == "agent_request_failed"
        left = {name: rig.participant(name).survey().counts["sessions"] for name in ("agent", "counter")}
        assert left == {name: int(which in (name, "both")) for name in ("agent", "counter")}
        assert now() - began == pytest.approx(8 if how == "hangs" else 0, abs=0.5)


@pytest.mark.parametrize("begins", ["before", "meanwhile"])
async def test_time_in_which_a_checkpoint_is_open_does_not_count_against_cleanup(
    tmp_path: Path, begins: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The closes wait at their servers for the resume; only then do they have their time, and only then is the
    episode over."""
    async with configured(tmp_path, cleanup_timeout_seconds=8) as rig:
        env, agent, counter = (rig.participant(name) for name in ("env", "agent", "counter"))
        episode = running(rig)
        await rig.until(rig.effects)
        closed = [agent, counter] if begins == "before" else [env, agent, counter]
        for participant in closed:
            prepare(participant)
        live = env._live["x"]
        live.task.cancel()
        await asyncio.sleep(3)
        if begins == "before":
            prepare(env)
        await asyncio.sleep(100)
        assert not live.task.done()
        for participant in (counter, agent, env):
            resume(participant)
        await asyncio.wait([live.task], timeout=1)
        assert live.task.done()
        assert empty(rig)
        assert "not done in" not in caplog.text
        assert (await episode)["error"]["code"] == "stale_attempt"


async def test_a_limit_that_comes_during_cleanup_does_not_take_the_row_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def change(_: str, path: str, reply: Reply) -> Reply:
        if path == "/close_session":
            await asyncio.sleep(60)
        return reply

    tampered(monkeypatch, change)
    async with configured(tmp_path, default_episode_timeout_seconds=30) as rig:
        assert (await running(rig))["result"]["reward"] == 1.0


async def test_time_in_which_a_peer_admits_nothing_does_not_count(tmp_path: Path) -> None:
    async with configured(tmp_path, default_episode_timeout_seconds=15) as rig:
        rig.kill("agent")
        rig.start("agent")  # a fresh process, which takes no work yet
        episode = running(rig)
        await asyncio.sleep(60)
        assert not episode.done()
        start(rig.participant("agent"))
        assert (await episode)["result"]["reward"] == 1.0


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"default_episode_timeout_seconds": 0}, "default_episode_timeout_seconds"),
        ({"max_concurrent_episodes": 0}, "max_concurrent_episodes"),
        ({"max_concurrent_episodes": 1.5}, "max_concurrent_episodes"),
        ({"queue_timeout_seconds": -1}, "queue_timeout_seconds"),
        ({"cleanup_timeout_seconds": "SECRET"}, "cleanup_timeout_seconds"),
        ({"checkpoint_boundaries": "SECRET"}, "checkpoint_boundaries"),
        ({"timeout": 3}, "timeout"),
    ],
)
async def test_limits_that_are_not_usable_are_refused_at_start_up(
    tmp_path: Path, config: dict[str, Any], named: str
) -> None:
    with pytest.raises(SettingsError, match=named) as refused:
        async with configured(tmp_path, **config):
            pass
    assert "SECRET" not in str(refused.value)


# ---- restarts -----------------------------------------------------------------------------------------------


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


# ---- failures while a checkpoint is open --------------------------------------------------------------------


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


# ---- cases --------------------------------------------------------------------------------------------------


async def test_c12_an_episode_that_was_ended_from_outside_has_no_row(tmp_path: Path) -> None:
    async with configured(tmp_path) as rig:
        live = running(rig)
        await rig.until(rig.effects)
        participant = rig.participant("env")
        participant.gate.fence.mark("x", 0)
        await participant.retire([Episode("x", 0)])
        answer = await live
        assert set(answer) == {"error"}
        assert answer["error"]["code"] == "stale_attempt"
        assert empty(rig)


async def test_c18_a_session_cookie_that_is_lost_on_the_way_is_an_error_and_no_fresh_session(tmp_path: Path) -> None:
    async with configured(tmp_path) as rig:
        await ok(rig, "agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "a"})
        response = await post(rig, "agent", "/ng-rollout/x/v1/responses", {"input": "hello"})
        assert (response.status_code, code(response)) == (409, "session_lost")
        assert rig.participant("agent").survey().counts == {"sessions": 1, "busy": 0}


async def test_c19_a_second_close_is_answered_like_the_first(tmp_path: Path) -> None:
    async with configured(tmp_path) as rig:
        _, jar = await ok(rig, "agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "a"})
        body = {"agent_session_id": "a"}
        replies = [await ok(rig, "agent", "/ng-rollout/x/v1/agent_sessions/close", body, jar=jar) for _ in range(3)]
        assert [reply for reply, _ in replies] == [body] * 3


@pytest.mark.parametrize("server", ["agent", "counter"])
async def test_c19_closes_that_come_at_once_are_all_answered_like_the_first(tmp_path: Path, server: str) -> None:
    async with configured(tmp_path) as rig:
        seed, close, name = {
            "agent": ("v1/agent_sessions", "v1/agent_sessions/close", "agent_session_id"),
            "counter": ("seed_session", "close_session", "resources_session_id"),
        }[server]
        body = {name: "a"}
        _, jar = await ok(rig, server, f"/ng-rollout/x/{seed}", body)
        at_once = [ok(rig, server, f"/ng-rollout/x/{close}", body, jar=jar) for _ in range(4)]
        replies = [*await asyncio.gather(*at_once), await ok(rig, server, f"/ng-rollout/x/{close}", body, jar=jar)]
        assert [reply for reply, _ in replies] == [body] * 5
        assert empty(rig)


async def test_c22_a_tool_session_that_is_lost_is_a_failure_of_its_own_kind_and_never_scored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = 0

    async def verify(*_: Any) -> dict[str, Any]:
        nonlocal verified
        verified += 1
        return {"reward": 1.0}

    monkeypatch.setattr(CounterServer, "verify", verify)
    async with configured(tmp_path) as rig:
        live = running(rig)
        await rig.until(rig.effects)
        tools = rig.participant("counter")
        tools._sessions.clear()  # as by a server that came back blank
        failure = (await live)["failure"]
        assert (failure["failure_kind"], verified) == ("session_lost", 0)


async def test_c23_a_crash_in_scoring_does_not_run_the_agent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scoring, verify, close = 0, CounterServer.verify, AgentParticipant.close

    async def dies(self: CounterServer, session_id: str, body: Any) -> dict[str, Any]:
        nonlocal scoring
        scoring += 1
        if scoring == 1:
            rig.kill("counter")
        return await verify(self, session_id, body)

    closing = asyncio.Event()

    async def slow(self: AgentParticipant, *arguments: Any) -> None:
        closing.set()
        await rig.participant("env").gate.wait_until(lambda: rig.participant("env").gate.checkpoint_open)
        await close(self, *arguments)

    monkeypatch.setattr(CounterServer, "verify", dies)
    monkeypatch.setattr(AgentParticipant, "close", slow)
    async with configured(tmp_path) as rig:
        first = running(rig)
        await closing.wait()
        monkeypatch.setattr(AgentParticipant, "close", slow)
        outcome = await rig.checkpoint("cut")
        assert outcome.publication.episodes == ["x"]
        await rig.until(lambda: scoring)
        monkeypatch.setattr(AgentParticipant, "close", close)
        done = len(rig.journal())
        await rig.until(lambda: rig.running(1))
        first.cancel()
        assert (await running(rig, attempt=1))["result"]["reward"] == 1.0
        assert len(rig.journal()) == done  # no token, no tool call, no seed
        assert scoring == 2


@pytest.mark.parametrize("boundary", STAGES)
async def test_c24_an_episode_that_stood_at_a_boundary_runs_this_stage_and_those_behind_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boundary: str
) -> None:
    """Each stage there is: nothing before it is done a second time, nothing behind it is left out."""
    stage, reached, ran = EnvironmentParticipant.stage, asyncio.Event(), list[tuple[int, str]]()

    async def held(self: EnvironmentParticipant, live: Live, name: str, **how: Any) -> Any:
        step = how.pop("step")

        async def noted() -> Any:
            ran.append((live.episode.attempt, name))
            return await step()

        if (live.episode.attempt, name) == (0, boundary):
            reached.set()
            await self.gate.wait_until(lambda: self.gate.checkpoint_open)
        return await stage(self, live, name, step=noted, **how)

    monkeypatch.setattr(EnvironmentParticipant, "stage", held)
    async with configured(tmp_path) as rig:
        first = running(rig)
        await reached.wait()
        outcome = await rig.checkpoint("one")
        assert outcome.publication.episodes == ["x"]
        rig.kill("policy")
        await rig.until(lambda: rig.running(1))
        first.cancel()
        assert (await running(rig, attempt=1))["result"]["reward"] == 1.0
        again = STAGES[STAGES.index(boundary) :]
        assert tuple(name for attempt, name in ran if attempt == 1) == again
        done = [entry["kind"] for entry in rig.journal() if entry.get("attempt") == 1]
        assert done.count("seed") == ("seed" in again)
        assert done.count("effect") == (2 if "invoke_agent" in again else 0)
        assert empty(rig)


async def test_c24_a_continued_episode_goes_on_at_its_boundary_and_not_from_the_start(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(1, 1, (4, 4))) as rig:
        await rig.until(lambda: rig.effects() >= 2)
        await rig.checkpoint("one")
        rig.kill("agent")
        await rig.until(rig.complete)
        counted = rig.account(1)
        assert (counted.problems, counted.continued, counted.reward_mean) == ([], 1, 1.0)
        assert sum(entry["kind"] == "seed" for entry in rig.journal()) == 1


@pytest.mark.parametrize("breaks", [1, 3])
async def test_c7_a_long_activation_survives_connections_that_break_off_after_a_long_while(
    tmp_path: Path, breaks: int
) -> None:
    """Longer than an unreachable peer is tried: the peer was reached, and works."""
    async with configured(tmp_path, rate=0.2) as rig:
        episode = running(rig)
        for _ in range(breaks):
            while not (calls := under_way(rig, "agent", "/v1/responses")):
                assert not episode.done(), await episode
                await asyncio.sleep(0.1)
            await asyncio.sleep(PATIENCE_SECONDS + 1)
            assert not episode.done()
            for call in calls:
                end(call, "the connection broke")
            await asyncio.sleep(1)  # until it is tried again
        assert (await episode)["result"]["reward"] == 1.0
        assert (rig.effects(), sum(entry["kind"] == "seed" for entry in rig.journal())) == (2, 1)


def under_way(rig: Rig, host: str, path: str) -> list[asyncio.Future[str]]:
    """Calls that have not been answered yet."""
    return [call for call, seen in rig.network.under_way.items() if seen.host == host and seen.path.endswith(path)]


@pytest.mark.parametrize(
    ("victim", "kind", "stage"),
    [
        ("counter", "transport_unreachable", "seed"),
        ("agent", "transport_unreachable", "seed"),
        ("policy", "agent_request_failed", "invoke_agent"),
    ],
)
async def test_c21_a_peer_that_is_gone_is_tried_for_a_bounded_time_and_named(
    tmp_path: Path, victim: str, kind: str, stage: str
) -> None:
    async with configured(tmp_path, cleanup_timeout_seconds=5) as rig:
        rig.kill(victim)
        began = now()
        failure = (await running(rig))["failure"]
        assert (failure["failure_kind"], failure["stage"]) == (kind, stage)
        assert f"{victim} does not answer: ConnectError" in failure["failure_reason"]
        assert PATIENCE_SECONDS <= now() - began < PATIENCE_SECONDS + 10


async def test_c21_a_peer_that_breaks_every_connection_at_once_is_tried_for_a_bounded_time(tmp_path: Path) -> None:
    async with configured(tmp_path, cleanup_timeout_seconds=5) as rig:
        rig.network.faults.append(Fault("lose request", "agent", calls=10_000))
        began = now()
        failure = (await running(rig))["failure"]
        assert failure["failure_kind"] == "transport_unreachable"
        assert PATIENCE_SECONDS <= now() - began < PATIENCE_SECONDS + 10


async def test_c21_time_in_which_a_peer_admits_nothing_is_no_time_in_which_it_is_away(tmp_path: Path) -> None:
    """Away for a while, then up and closed for a while, then away again: it was there in between."""
    async with configured(tmp_path) as rig:
        rig.kill("agent")
        episode = running(rig)
        await asyncio.sleep(PATIENCE_SECONDS - 5)
        rig.start("agent")
        await asyncio.sleep(10)
        rig.kill("agent")
        await asyncio.sleep(PATIENCE_SECONDS - 5)
        rig.start("agent")
        start(rig.participant("agent"))
        assert (await episode)["result"]["reward"] == 1.0


# ---- calls of the agent that no session owns ------------------------------------------------------------------


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
