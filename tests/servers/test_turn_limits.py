"""`single-agent-turn` in a cell: how long an episode and its cleanup may take."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gym_rig.episodes import configured, empty, running, tampered
from gym_rig.verbs import prepare, resume, start
from gym_rig.virtual import now
from gym_servers.agent.simple_agent import SimpleAgent
from gym_servers.http.peers import Reply
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.resources import ResourcesParticipant
from gym_servers.protocol.errors import ProtocolError
from gym_servers.stack.settings import SettingsError


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
