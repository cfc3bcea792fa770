"""The data API over HTTP, with checkpointing on and off: what a client sees."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from gym_rig.cell import COOKIES, TOKEN, Rig, rig_settings
from gym_rig.network import Fault, Seen
from gym_rig.virtual import settle
from gym_rig.wire import code, foreign, ok, post, serving
from gym_servers import serve
from gym_servers.engine.rows import counter_rows
from gym_servers.http.sessions import sign, unsign
from gym_servers.model import capture_routes
from gym_servers.protocol import headers
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.messages import PREFIX
from gym_servers.protocol.rollouts import FORGET_PATH, STATE_PATH
from gym_servers.resources.counter import CounterServer
from gym_servers.stack.settings import SettingsError

NAMES = ("env", "policy", "agent", "counter", "collection")
CAPTURED = {f"{capture_routes.PREFIX}/{{key}}/manifest", f"{capture_routes.PREFIX}/{{key}}"}  # need the ledger
ROW = {"initial_count": 10, "expected_count": 15}
TASK = {
    "task_input": {"responses_create_params": {"input": "add 5 then get the count"}, "task_data": ROW},
}


async def seeded(rig: Rig, key: str = "x") -> dict[str, str]:
    """A counter session; its cookies."""
    _, jar = await ok(rig, "counter", f"/ng-rollout/{key}/seed_session", {"resources_session_id": f"s-{key}", **ROW})
    return jar


# ---- checkpointing off ------------------------------------------------------------------------------------


def listened(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, **spec: Any) -> list[FastAPI]:
    """The applications that `serve` would listen with."""
    settings, _ = rig_settings(tmp_path, counter_rows(1, 1), **spec)
    apps: list[FastAPI] = []
    monkeypatch.setenv("GYM_COOKIE_SECRET", COOKIES)
    monkeypatch.setenv("GYM_CONTROL_TOKEN", TOKEN)
    monkeypatch.setattr(serve, "listener", lambda app, host, port: apps.append(app))
    serve.prepare(settings[name])
    return apps


def paths(apps: list[FastAPI]) -> set[str]:
    return {str(getattr(route, "path", "")) for app in apps for route in app.routes}


@pytest.mark.parametrize("name", ["env", "policy", "agent", "counter"])
def test_without_checkpoints_there_is_no_control_route_and_the_same_data_api(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = listened(tmp_path / "off", name, monkeypatch, checkpoints={"enabled": False}, collection=None)
    on = listened(tmp_path / "on", name, monkeypatch, collection=None)
    assert (len(off), len(on)) == (1, 2)
    assert not [path for path in paths(off) if path.startswith(PREFIX)]
    verbs = {
        f"{PREFIX}/{verb}"
        for verb in ("status", "prepare", "renew", "commit", "restore", "resume", "retire", "forget", "end")
    }
    asked = {FORGET_PATH, STATE_PATH, f"{STATE_PATH}/{{rollout_id}}"} if name == "env" else set()
    captured = CAPTURED if name == "policy" else set()
    assert paths(on) - paths(off) == verbs | asked | captured | (paths(on) & {"/openapi.json"} - paths(off))


async def test_without_checkpoints_the_data_api_needs_no_episode_and_answers_the_same(tmp_path: Path) -> None:
    answers: dict[bool, Any] = {}
    for enabled in (True, False):
        checkpoints = None if enabled else {"enabled": False}
        spec = {} if checkpoints is None else {"checkpoints": checkpoints}
        async with foreign(tmp_path / str(enabled), **spec) as rig:
            if enabled:
                await serving(rig)
            else:
                await rig.processes()
            body = {"episode_id": {"rollout_id": "x", "attempt": 0}, "task": TASK}
            answers[enabled], _ = await ok(rig, "env", "/run", body)
            if not enabled:
                jar = (await ok(rig, "counter", "/seed_session", ROW))[1]
                assert (await ok(rig, "counter", "/increment_counter", {"count": 5}, jar=jar))[0] == {"success": True}
                assert (await ok(rig, "counter", "/verify", ROW, jar=jar))[0]["reward"] == 1.0
                reply, _ = await ok(rig, "policy", "/v1/responses", {"input": "add 1"})
                assert reply["status"] == "completed"
                assert (await post(rig, "env", f"{PREFIX}/prepare", {})).status_code in (404, 405)
    assert answers[True]["result"]["reward"] == answers[False]["result"]["reward"] == 1.0
    assert shape(answers[True]) == shape(answers[False])


@pytest.mark.parametrize("enabled", [True, False])
async def test_without_checkpoints_no_call_carries_a_header_of_the_protocol(
    tmp_path: Path, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: set[str] = set()
    replied: set[str] = set()
    original = httpx.AsyncClient.post

    async def noted(self: httpx.AsyncClient, url: str, **options: Any) -> httpx.Response:
        sent.update(name for name in options.get("headers") or {} if name.startswith("x-ng-"))
        response = await original(self, url, **options)
        replied.update(name for name in response.headers if name.startswith("x-ng-"))
        return response

    monkeypatch.setattr(httpx.AsyncClient, "post", noted)
    monkeypatch.setattr(CounterServer, "verify_replays", True)
    async with foreign(tmp_path, **({} if enabled else {"checkpoints": {"enabled": False}})) as rig:
        if enabled:
            await serving(rig)
        else:
            await rig.processes()
        answer, _ = await ok(rig, "env", "/run", {"episode_id": {"rollout_id": "x", "attempt": 0}, "task": TASK})
        row, _ = await ok(rig, "agent", "/run", {**ROW, **TASK["task_input"], "_ng_rollout_id": "y"})
        assert answer["result"]["reward"] == row["reward"] == 1.0
    own = {headers.ACTIVATION, headers.MODEL_CALL, headers.TOOL_CALL, headers.CLOSE_FOLLOWS}
    assert (sent, replied) == ((own, {headers.VERIFY}) if enabled else (set(), set()))


def shape(value: Any) -> Any:
    """A reply without what differs from one request to the next."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items() if name not in ("id", "call_id", "created_at")}
    return [shape(one) for one in value] if isinstance(value, list) else value


# ---- checkpointing on -------------------------------------------------------------------------------------


async def test_work_without_an_episode_is_refused_where_one_is_needed(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        tools = await seeded(rig)
        _, agent = await ok(rig, "agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "a"})
        for server, path, body, jar in (
            ("counter", "/seed_session", ROW, None),
            ("counter", "/increment_counter", {"count": 1}, tools),
            ("counter", "/verify", ROW, tools),
            ("counter", "/close_session", {}, tools),
            ("counter", "/close_session", {"resources_session_id": "unknown"}, None),
            ("policy", "/v1/responses", {"input": "x"}, None),
            ("agent", "/v1/agent_sessions", {"agent_session_id": "a"}, None),
            ("agent", "/v1/responses", {"input": "x"}, None),
            ("agent", "/v1/responses", {"input": "x"}, agent),
            ("agent", "/v1/agent_sessions/close", {"agent_session_id": "a"}, agent),
            ("agent", "/v1/agent_sessions/close", {"agent_session_id": "unknown"}, None),
        ):
            response = await post(rig, server, path, body, jar=jar)
            assert (response.status_code, code(response)) == (400, "rollout_id_required"), (server, path)
        assert rig.effects() == 0
        for name in ("counter", "agent"):
            assert rig.participant(name).survey().counts == {"sessions": 1, "busy": 0}


async def test_a_fresh_process_is_not_ready_and_takes_no_work(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await rig.processes()
        async with rig.network.client() as client:
            for name in ("env", "policy", "agent", "counter"):
                assert (await client.get(f"http://{name}/readyz")).status_code == 503
                assert (await client.get(f"http://{name}/livez")).status_code == 200
        for server, path, body in (
            ("counter", "/ng-rollout/x/seed_session", ROW),
            ("counter", "/ng-rollout/x/increment_counter", {"count": 1}),
            ("counter", "/ng-rollout/x/verify", ROW),
            ("counter", "/ng-rollout/x/close_session", {"resources_session_id": "s"}),
            ("policy", "/ng-rollout/x/v1/responses", {"input": "x"}),
            ("agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "a"}),
            ("agent", "/ng-rollout/x/v1/agent_sessions/close", {"agent_session_id": "a"}),
            ("agent", "/ng-rollout/x/v1/responses", {"input": "x"}),
            ("agent", "/ng-rollout/x/run", {"responses_create_params": {"input": "x"}}),
            ("env", "/run", {"episode_id": {"rollout_id": "x"}, "task": TASK}),
        ):
            response = await post(rig, server, path, body)
            assert (response.status_code, code(response)) == (409, "admission_closed"), server
        await serving(rig)
        async with rig.network.client() as client:
            assert (await client.get("http://env/readyz")).status_code == 200


@pytest.mark.parametrize("key", ["x-a0", "x-a01", ".x", "a%20b", "%2e%2e"])
async def test_a_prefix_that_names_no_episode_is_refused(tmp_path: Path, key: str) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        response = await post(rig, "counter", f"/ng-rollout/{key}/seed_session", ROW)
        assert (response.status_code, code(response)) == (422, "invalid_request")


async def test_the_training_prefix_is_the_same_call(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        one, _ = await ok(
            rig, "policy", "/ng-rollout/x/v1/responses", {"input": "add 1"}, **{headers.MODEL_CALL: "1.1"}
        )
        path = "/ng-rollout/x/training-token-capture/v1/responses"
        two, _ = await ok(rig, "policy", path, {"input": "add 1"}, **{headers.MODEL_CALL: "1.1"})
        assert one == two
        assert sum(entry["kind"] == "tokens" and entry["last"] for entry in rig.journal()) == 1


async def test_a_body_of_another_form_is_refused_without_repeating_it(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        jar = await seeded(rig)
        for server, path, body in (
            ("env", "/run", {"episode_id": "SECRET", "task": TASK}),
            ("env", "/run", {"episode_id": {"rollout_id": "x-a1"}, "task": TASK}),
            ("env", "/run", {"episode_id": {"rollout_id": "x", "attempt": -1}, "task": TASK}),
            ("counter", "/ng-rollout/y/seed_session", ["SECRET"]),
            ("counter", "/ng-rollout/y/seed_session", {"initial_count": "SECRET"}),
            ("policy", "/ng-rollout/x/v1/responses", {"input": 3}),
            ("policy", "/ng-rollout/x/v1/responses", ["SECRET"]),
        ):
            response = await post(rig, server, path, body)
            assert response.status_code == 422, (server, path, response.text)
            assert code(response) == "invalid_request"
            assert "SECRET" not in response.text
        response = await post(rig, "counter", "/ng-rollout/x/increment_counter", {"count": "x"}, jar=jar)
        assert response.status_code == 422
        assert (await post(rig, "counter", "/ng-rollout/x/no_such_tool", {}, jar=jar)).status_code == 404


async def test_an_activation_header_that_is_no_number_is_refused(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        _, jar = await ok(rig, "agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "a"})
        for index in ("0", "-1", "x", "1.5"):
            sent = {headers.ACTIVATION: index}
            response = await post(rig, "agent", "/ng-rollout/x/v1/responses", {"input": "x"}, jar=jar, **sent)
            assert code(response) == "invalid_request"
        sent = {headers.ACTIVATION: "2"}
        response = await post(rig, "agent", "/ng-rollout/x/v1/responses", {"input": "x"}, jar=jar, **sent)
        assert code(response) == "activation_out_of_order"


async def test_requests_without_an_activation_header_never_collide(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        _, jar = await ok(rig, "agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "a"})
        replies = [
            (await ok(rig, "agent", "/ng-rollout/x/v1/responses", {"input": text}, jar=jar))[0]
            for text in ("one", "other")
        ]
        assert replies[0]["id"] != replies[1]["id"]


async def test_a_cookie_of_another_stack_is_a_lost_session(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        jar = await seeded(rig)
        assert unsign(jar, COOKIES) == {"CounterServer___counter": {"session_id": "s-x"}}
        for wrong in ({}, sign(unsign(jar, COOKIES), "another secret"), {next(iter(jar)): "x"}):
            response = await post(rig, "counter", "/ng-rollout/x/increment_counter", {"count": 1}, jar=wrong)
            assert (response.status_code, code(response)) == (409, "session_lost")
        with pytest.raises(ProtocolError, match="session_lost"):
            unsign(jar, "another secret")


async def test_tools_can_only_be_named_by_peers_of_this_cell(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        body = {"agent_session_id": "a", "tool_accesses": [{"kind": "direct_http", "base_url": "http://evil"}]}
        response = await post(rig, "agent", "/ng-rollout/x/v1/agent_sessions", body)
        assert code(response) == "invalid_request"


# ---- duplicates, and calls under a replaced attempt ---------------------------------------------------------


async def test_c20_a_duplicate_run_joins_and_another_task_is_refused(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        body = {"episode_id": {"rollout_id": "x", "attempt": 0}, "task": TASK}
        first = asyncio.create_task(post(rig, "env", "/run", body))
        await settle()
        other = {**body, "task": {"task_input": {"responses_create_params": {"input": "else"}}}}
        response = await post(rig, "env", "/run", other)
        assert (response.status_code, code(response)) == (409, "checkpoint_conflict")
        second, third = await post(rig, "env", "/run", body), await first
        assert second.json() == third.json() == (await post(rig, "env", "/run", body)).json()
        assert second.json()["result"]["reward"] == 1.0
        assert sum(entry["kind"] == "seed" for entry in rig.journal()) == 1
        assert rig.effects() == 1


async def recovered(rig: Rig) -> None:
    """A checkpoint, a death, and the cell in service again under attempt 1."""
    await rig.checkpoint("one")
    rig.kill("policy")
    await rig.until(lambda: rig.running(1))


async def test_c15_every_stale_call_of_a_client_has_no_effect_after_a_restore(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        body = {"episode_id": {"rollout_id": "x", "attempt": 0}, "task": TASK}
        run = asyncio.create_task(post(rig, "env", "/run", body))
        await rig.until(rig.effects)
        (session,) = rig.participant("counter")._sessions
        (agent_session,) = rig.participant("agent")._sessions
        await recovered(rig)
        run.cancel()
        effects, generated = rig.effects(), len(rig.journal())
        tools = sign({"CounterServer___counter": {"session_id": session}}, COOKIES)
        agent = sign({"SimpleAgent___agent": {"session_id": agent_session}}, COOKIES)
        activation, call = {headers.ACTIVATION: "1"}, {headers.MODEL_CALL: "1.9"}
        for server, path, sent, jar, extra in (
            ("env", "/run", body, {}, {}),
            ("counter", "/ng-rollout/x/increment_counter", {"count": 1}, tools, {headers.TOOL_CALL: "late"}),
            ("counter", "/ng-rollout/x/seed_session", ROW, {}, {}),
            ("policy", "/ng-rollout/x/v1/responses", {"input": "add 1"}, {}, call),
            ("agent", "/ng-rollout/x/v1/responses", TASK["task_input"]["responses_create_params"], agent, activation),
            ("agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "late"}, {}, {}),
            ("env", "/run", {**body, "episode_id": {"rollout_id": "new", "attempt": 0}}, {}, {}),
        ):
            response = await post(rig, server, path, sent, jar=jar, **extra)
            assert (response.status_code, code(response)) == (409, "stale_attempt"), (server, path)
        assert (rig.effects(), len(rig.journal())) == (effects, generated)
        answer, _ = await ok(rig, "env", "/run", {**body, "episode_id": {"rollout_id": "x", "attempt": 1}})
        assert answer["result"]["reward"] == 1.0


async def test_c15_a_tool_call_of_before_the_cut_is_answered_after_the_restore(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        jar = await seeded(rig)
        once = {headers.TOOL_CALL: "call-1"}
        await ok(rig, "counter", "/ng-rollout/x/increment_counter", {"count": 5}, jar=jar, **once)
        outcome = await rig.checkpoint("one")
        assert outcome.publication.episodes == []  # the environment knows of no episode x: nothing is restored
        assert rig.effects() == 1
        await ok(rig, "counter", "/ng-rollout/x/increment_counter", {"count": 5}, jar=jar, **once)
        assert rig.effects() == 1


async def test_the_control_api_is_not_on_the_data_port(tmp_path: Path) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        async with rig.network.client() as client:
            for name in ("env", "policy", "agent", "counter"):
                response = await client.get(
                    f"http://{name}{PREFIX}/status", headers={"authorization": f"Bearer {TOKEN}"}
                )
                assert response.status_code in (404, 405)


# ---- the engine -------------------------------------------------------------------------------------------


async def test_c21_an_engine_that_is_away_is_waited_for_and_named(tmp_path: Path) -> None:
    """A rollout that can be continued does not fail for it."""
    async with foreign(tmp_path) as rig:
        await serving(rig)
        rig.network.faults.append(Fault("unreachable", "engine", calls=1_000_000))
        body = {"episode_id": {"rollout_id": "x", "attempt": 0}, "task": TASK}
        running = asyncio.create_task(ok(rig, "env", "/run", body))
        await asyncio.sleep(3600)
        assert not running.done()
        status = await rig.client("policy").status()
        assert "the engine has not answered for" in status.problem
        rig.network.faults.clear()
        assert (await running)[0]["result"]["reward"] == 1.0
        assert (await rig.client("policy").status()).problem == ""


@pytest.mark.parametrize("seconds", [100, 1000])
async def test_an_engine_that_is_slower_than_its_client_waits_gets_to_answer(tmp_path: Path, seconds: float) -> None:
    """Asked again and again after the same time it would begin anew for ever."""
    async with foreign(tmp_path) as rig:
        engine, alive = rig.network.find("engine")

        async def slow(*arguments: Any) -> None:
            await asyncio.sleep(seconds)
            await engine(*arguments)

        rig.network.listen("engine", slow, alive)
        await serving(rig)
        asked: list[Seen] = []
        rig.network.on_request = lambda seen: asked.append(seen) if seen.host == "engine" else None
        body = {"episode_id": {"rollout_id": "x", "attempt": 0}, "task": TASK}
        answer, _ = await ok(rig, "env", "/run", body)
        assert answer["result"]["reward"] == 1.0
        assert len(asked) <= 3 * 6  # model calls, and doublings of a minute


# ---- one process ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", ["2", "8", "many"])
@pytest.mark.parametrize("name", ["env", "policy", "agent", "counter"])
def test_c16_several_workers_are_refused_at_start_up_with_the_reason(
    tmp_path: Path, name: str, workers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", workers)
    with pytest.raises(SettingsError, match=f"WEB_CONCURRENCY={workers}.*one process.*set it to 1"):
        listened(tmp_path, name, monkeypatch, collection=None)


@pytest.mark.parametrize(("workers", "enabled"), [("1", True), ("", True), ("4", False)])
def test_c16_one_worker_is_fine_and_without_checkpoints_any_number(
    tmp_path: Path, workers: str, enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEB_CONCURRENCY", workers)
    spec = {} if enabled else {"checkpoints": {"enabled": False}}
    assert listened(tmp_path, "agent", monkeypatch, collection=None, **spec)
