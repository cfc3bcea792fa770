"""`single-agent-turn` in a cell: where a death finds an episode, and what lost sessions and connections do to it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig, cell
from gym_rig.episodes import configured, empty, running
from gym_rig.network import Fault, end
from gym_rig.verbs import start
from gym_rig.virtual import now
from gym_rig.wire import code, ok, post
from gym_servers.engine.rows import counter_rows
from gym_servers.environment.single_agent_turn import STAGES
from gym_servers.http.peers import PATIENCE_SECONDS
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.environment import EnvironmentParticipant, Live
from gym_servers.protocol.identity import Episode
from gym_servers.resources.counter import CounterServer


def under_way(rig: Rig, host: str, path: str) -> list[asyncio.Future[str]]:
    """Calls that have not been answered yet."""
    return [call for call, seen in rig.network.under_way.items() if seen.host == host and seen.path.endswith(path)]


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
