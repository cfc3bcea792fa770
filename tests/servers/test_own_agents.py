"""An agent that builds its own application: watched, fenced, and restart-only unless it opts in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from gym_rig.cell import Rig, cell
from gym_rig.network import Seen
from gym_rig.verbs import checkpoint, commit, prepare, restore_built, resume
from gym_rig.virtual import settle
from gym_rig.wire import code, foreign, ok, post, serving
from gym_servers.agent.server import AgentServer, AgentSetup
from gym_servers.agent.tools import function_calls, items_of
from gym_servers.engine.rows import counter_rows
from gym_servers.http.episode_path import required_episode
from gym_servers.protocol import headers
from gym_servers.protocol.identity import Episode
from gym_servers.stack.settings import SettingsError

COUNTER = {"name": "counter", "kind": "resources", "server": "counter"}


def servers(folder: Path, agent: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"name": "env", "kind": "environment", "server": "single-agent-turn"},
        {"name": "policy", "kind": "model", "server": "scripted", "config": {"base_url": "http://engine"}},
        {"name": "agent", "kind": "agent", **agent},
        {**COUNTER, "config": {"journal": str(folder / "journal.jsonl")}},
    ]


def scratch(folder: Path) -> list[dict[str, Any]]:
    return servers(folder, {"server": "scratch-agent", "config": {"folder": str(folder / "scratch")}})


def own(folder: Path, name: str = "Notes") -> list[dict[str, Any]]:
    return servers(folder, {"server": f"{__name__}:{name}"})


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "scratch").iterdir())


# ---- the example ------------------------------------------------------------------------------------------


async def test_a_restart_only_agents_episodes_are_reported_by_the_environment_and_start_over(tmp_path: Path) -> None:
    async with cell(tmp_path, counter_rows(3, 1), servers=scratch(tmp_path)) as rig:
        await rig.until(lambda: rig.effects() >= 3)
        outcome = await rig.checkpoint("one")
        assert (outcome.publication.episodes, len(outcome.publication.restarts)) == ([], 3)
        assert rig.participant("env").survey().restarts == rig.participant("agent").survey().restarts != frozenset()
        rig.kill("policy")
        await rig.until(rig.complete)
        counted = rig.account(3)
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean, counted.continued) == (3, 1.0, 0)
        assert [name for name in folders(tmp_path) if name.endswith("-a1")] == []


async def test_a_retire_stops_the_work_of_a_restart_only_agent_and_frees_its_sandbox(tmp_path: Path) -> None:
    async with foreign(tmp_path, servers=scratch(tmp_path)) as rig:
        await serving(rig)
        for key in ("x", "y"):
            _, _ = await ok(rig, "agent", f"/ng-rollout/{key}/v1/agent_sessions", {"agent_session_id": key})
        running = asyncio.create_task(post(rig, "agent", "/ng-rollout/x/v1/responses", {"input": "add 1"}))
        await settle()
        assert folders(tmp_path) == ["x", "y"]
        await retired(rig, "x")
        assert folders(tmp_path) == ["y"]
        assert code(await running) == "stale_attempt"
        late = await post(rig, "agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "x"})
        assert code(late) == "stale_attempt"
        assert folders(tmp_path) == ["y"]


async def retired(rig: Rig, key: str) -> None:
    participant = rig.participant("agent")
    participant.gate.fence.mark(key, 0)
    await participant.retire([Episode(key, 0)])


async def test_a_close_stops_its_work_before_the_application_is_asked_to_clean_up(tmp_path: Path) -> None:
    async with foreign(tmp_path, servers=scratch(tmp_path)) as rig:
        await serving(rig)
        await ok(rig, "agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "x"})
        work = asyncio.create_task(post(rig, "agent", "/ng-rollout/x/v1/responses", {"input": "add 1"}))
        await settle()
        assert not work.done()
        await ok(rig, "agent", "/ng-rollout/x/v1/agent_sessions/close", {"agent_session_id": "x"})
        assert code(await work) == "stale_attempt"
        assert (folders(tmp_path), rig.participant("agent").survey().counts) == ([], {"sessions": 0, "busy": 0})


async def test_its_calls_need_an_episode_and_its_own_routes_stay_its_own(tmp_path: Path) -> None:
    async with foreign(tmp_path, servers=scratch(tmp_path)) as rig:
        await serving(rig)
        for path in ("/v1/agent_sessions", "/v1/agent_sessions/close", "/v1/responses", "/run"):
            response = await post(rig, "agent", path, {"agent_session_id": "x"})
            assert (response.status_code, code(response)) == (400, "rollout_id_required"), path
        response = await post(rig, "agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "x"})
        assert response.headers[headers.RESTART] == "agent"
        async with rig.network.client() as client:
            assert (await client.get("http://agent/readyz")).status_code == 200
            assert (await client.get("http://agent/nowhere")).status_code == 404
        for _ in range(2):  # a second close is answered like the first
            await ok(rig, "agent", "/ng-rollout/x/v1/agent_sessions/close", {"agent_session_id": "x"})
        assert rig.participant("agent").survey().counts == {"sessions": 0, "busy": 0}


@pytest.mark.parametrize(
    "path, body",
    [
        ("/v1/responses", [1]),
        ("/v1/agent_sessions", {}),
        ("/v1/agent_sessions", {"agent_session_id": "x", "tool_accesses": [{"kind": "direct_http", "cookies": 1}]}),
        ("/v1/agent_sessions/close", {}),
    ],
)
async def test_a_body_that_the_example_cannot_read_is_refused_and_no_fault(
    tmp_path: Path, path: str, body: object
) -> None:
    async with foreign(tmp_path, servers=scratch(tmp_path)) as rig:
        await serving(rig)
        await ok(rig, "agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "x"})
        assert code(await post(rig, "agent", f"/ng-rollout/x{path}", body)) == "invalid_request"


async def test_with_checkpointing_off_it_is_its_own_application(tmp_path: Path) -> None:
    async with foreign(tmp_path, servers=scratch(tmp_path), checkpoints={"enabled": False}) as rig:
        await rig.processes()
        response = await post(rig, "agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "x"})
        assert response.is_success
        assert headers.RESTART not in response.headers
        assert rig.participant("agent").survey().counts == {"sessions": 0, "busy": 0}


# ---- one that opts in ---------------------------------------------------------------------------------------


class Notes(AgentServer):
    """Counts the requests of a session, and can carry the count."""

    checkpoint_sessions_supported: ClassVar[bool] = True
    held: ClassVar[asyncio.Event | None] = None
    last: ClassVar[Notes]  # the newest process

    def __init__(self, setup: AgentSetup) -> None:
        super().__init__(setup)
        self.counts: dict[str, int] = {}
        self.seeds = self.closes = 0
        Notes.last = self

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/agent_sessions")
        async def seed(body: dict[str, Any]) -> dict[str, Any]:
            self.seeds += 1
            if Notes.held is not None:
                await Notes.held.wait()
            self.counts[required_episode().key] = 0
            return {"agent_session_id": body["agent_session_id"]}

        @app.post("/v1/responses")
        @app.post("/v1/chat/completions")
        @app.post("/run")
        async def work(request: Request) -> Any:
            if Notes.held is not None:
                await Notes.held.wait()
            key = required_episode().key
            self.counts[key] = self.counts.get(key, 0) + 1
            if (await request.json()).get("break"):
                return JSONResponse({"error": "broken"}, 500)
            return {"output": [], "count": self.counts[key], "said": "grüß"}

        @app.post("/v1/agent_sessions/close")
        async def close() -> dict[str, Any]:
            self.closes += 1
            if Notes.held is not None:
                await Notes.held.wait()
            return {"closes": self.closes}

        return app

    async def export_agent_sessions(self, keys: Sequence[str]) -> Mapping[str, Any]:
        return {key: self.counts[key] for key in keys}

    async def restore_agent_sessions(self, sessions: Mapping[str, Any]) -> None:
        self.counts = {key: int(count) for key, count in sessions.items()}

    async def retire_agent_session(self, key: str) -> None:
        self.counts.pop(key, None)


class Unsure(Notes):
    checkpoint_sessions_supported: ClassVar[bool] = False


async def test_an_activation_of_an_own_application_that_opts_in_holds_no_checkpoint_up_and_is_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it ends while the checkpoint is open: what was reported stays as it was until the resume."""
    async with foreign(tmp_path, servers=own(tmp_path)) as rig:
        await serving(rig)
        seed = "/ng-rollout/x/v1/agent_sessions"
        response = await post(rig, "agent", seed, {"agent_session_id": "x"})
        assert headers.RESTART not in response.headers
        monkeypatch.setattr(Notes, "held", asyncio.Event())
        running = asyncio.create_task(post(rig, "agent", "/ng-rollout/x/v1/responses", {}, **FIRST))
        await settle()
        participant = rig.participant("agent")
        assert prepare(participant)
        assert participant.survey().restarts == {"x"}
        assert Notes.held is not None
        Notes.held.set()
        await asyncio.sleep(10)
        assert not running.done()
        assert participant.survey().restarts == {"x"}
        assert await commit(participant) == {}
        resume(participant)
        assert (await running).json()["count"] == 1
        assert participant.survey().restarts == frozenset()
        assert list(await checkpoint(participant)) == ["x"]


async def test_a_failed_seed_of_an_own_application_leaves_no_session(tmp_path: Path) -> None:
    async with foreign(tmp_path, servers=own(tmp_path)) as rig:
        await serving(rig)
        response = await post(rig, "agent", "/ng-rollout/x/v1/agent_sessions", ["no object"])
        assert response.status_code == 422
        assert rig.participant("agent").survey().counts == {"sessions": 0, "busy": 0}


async def test_an_own_application_that_opts_in_is_continued_through_its_hooks(tmp_path: Path) -> None:
    async with foreign(tmp_path, servers=own(tmp_path)) as rig:
        await serving(rig)
        await ok(rig, "agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "x"})
        for _ in range(3):
            await ok(rig, "agent", "/ng-rollout/x/v1/responses", {})
        records = await checkpoint(rig.participant("agent"))
        rig.kill("agent")
        fresh = rig.start("agent").server.participant
        assert await restore_built(fresh, records, "x") == ["x-a1"]
        resume(fresh, "restore")
        reply, _ = await ok(rig, "agent", "/ng-rollout/x-a1/v1/responses", {})
        assert reply["count"] == 4
        assert code(await post(rig, "agent", "/ng-rollout/x/v1/responses", {})) == "stale_attempt"


async def test_without_the_class_attribute_an_own_application_is_restart_only(tmp_path: Path) -> None:
    async with foreign(tmp_path, servers=own(tmp_path, "Unsure")) as rig:
        await serving(rig)
        await ok(rig, "agent", "/ng-rollout/x/v1/agent_sessions", {"agent_session_id": "x"})
        participant = rig.participant("agent")
        assert participant.survey().restarts == {"x"}


async def test_a_class_that_is_no_agent_is_refused_at_start_up(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is not a subclass of"):
        async with foreign(tmp_path, servers=servers(tmp_path, {"server": "pathlib:Path"})) as rig:
            await rig.processes()


# ---- calls that come twice ----------------------------------------------------------------------------------

SEEDED = "/ng-rollout/x/v1/agent_sessions"
PATHS = pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/run"])
KINDS = pytest.mark.parametrize("kind", ["Notes", "Unsure"])
FIRST = {headers.ACTIVATION: "1"}


@PATHS
@KINDS
async def test_c20_a_call_that_comes_twice_under_its_index_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, path: str
) -> None:
    """While the first is under way, also behind a checkpoint, and after it; whoever asked first may be gone."""
    async with foreign(tmp_path, servers=own(tmp_path, kind)) as rig:
        await serving(rig)
        await ok(rig, "agent", SEEDED, {"agent_session_id": "x"})
        monkeypatch.setattr(Notes, "held", asyncio.Event())
        gone, *both = (
            asyncio.create_task(post(rig, "agent", f"/ng-rollout/x{path}", {"input": "a"}, **FIRST)) for _ in range(3)
        )
        await settle()
        gone.cancel()
        await settle()
        assert code(await post(rig, "agent", f"/ng-rollout/x{path}", {"input": "b"}, **FIRST)) == (
            "checkpoint_conflict"
        )
        assert Notes.held is not None
        Notes.held.set()
        replies = [await one for one in both]
        replies.append(await post(rig, "agent", f"/ng-rollout/x{path}", {"input": "a"}, **FIRST))
        assert [(one.status_code, one.json()["count"], one.json()["said"]) for one in replies] == [
            (200, 1, "grüß")
        ] * 3
        assert Notes.last.counts == {"x": 1}
        for index, body, wanted in (
            ("1", {"input": "b"}, "checkpoint_conflict"),
            ("3", {}, "activation_out_of_order"),
        ):
            late = await post(rig, "agent", f"/ng-rollout/x{path}", body, **{headers.ACTIVATION: index})
            assert code(late) == wanted
        reply, _ = await ok(rig, "agent", f"/ng-rollout/x{path}", {"input": "a"}, **{headers.ACTIVATION: "2"})
        assert reply["count"] == 2


@KINDS
async def test_c20_a_row_that_comes_twice_without_a_session_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Its episode is a restart while it runs; what it answered is answered again, also after a restore."""
    async with foreign(tmp_path, servers=own(tmp_path, kind)) as rig:
        await serving(rig)
        monkeypatch.setattr(Notes, "held", asyncio.Event())
        row = {"responses_create_params": {}, "_ng_attempt_index": 0}
        both = [asyncio.create_task(post(rig, "agent", "/ng-rollout/x/run", row)) for _ in range(2)]
        await settle()
        participant = rig.participant("agent")
        assert participant.survey().restarts == {"x"}
        assert code(await post(rig, "agent", "/ng-rollout/x/run", {**row, "more": 1})) == "checkpoint_conflict"
        assert Notes.held is not None
        Notes.held.set()
        replies = [(await one).json()["count"] for one in both]
        replies.append((await ok(rig, "agent", "/ng-rollout/x/run", row))[0]["count"])
        assert (replies, Notes.last.counts) == ([1, 1, 1], {"x": 1})
        records = await checkpoint(participant)
        rig.kill("agent")
        fresh = rig.start("agent").server.participant
        assert await restore_built(fresh, records, "x") == ["x-a1"]
        resume(fresh, "restore")
        reply, _ = await ok(rig, "agent", "/ng-rollout/x-a1/run", {**row, "_ng_attempt_index": 1})
        assert (reply["count"], Notes.last.counts) == (1, {})


async def test_c15_an_activation_of_before_the_cut_is_answered_after_the_restore(tmp_path: Path) -> None:
    """The environment stood before its reply: it asks for the same activation again."""
    async with foreign(tmp_path, servers=own(tmp_path)) as rig:
        await serving(rig)
        await ok(rig, "agent", SEEDED, {"agent_session_id": "x"})
        before, _ = await ok(rig, "agent", "/ng-rollout/x/v1/responses", {"input": "a"}, **FIRST)
        records = await checkpoint(rig.participant("agent"))
        rig.kill("agent")
        fresh = rig.start("agent").server.participant
        await restore_built(fresh, records, "x")
        resume(fresh, "restore")
        again, _ = await ok(rig, "agent", "/ng-rollout/x-a1/v1/responses", {"input": "a"}, **FIRST)
        assert again == before
        assert Notes.last.counts == {"x-a1": 1}


@PATHS
async def test_c17_an_error_of_an_own_application_is_passed_on_and_not_kept(tmp_path: Path, path: str) -> None:
    async with foreign(tmp_path, servers=own(tmp_path)) as rig:
        await serving(rig)
        await ok(rig, "agent", SEEDED, {"agent_session_id": "x"})
        for count in (1, 2):
            response = await post(rig, "agent", f"/ng-rollout/x{path}", {"break": True}, **FIRST)
            assert (response.status_code, response.json()) == (500, {"error": "broken"})
            assert Notes.last.counts == {"x": count}
        reply, _ = await ok(rig, "agent", f"/ng-rollout/x{path}", {"input": "a"}, **FIRST)
        assert reply["count"] == 3


async def test_c20_a_seed_that_comes_twice_at_once_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with foreign(tmp_path, servers=own(tmp_path)) as rig:
        await serving(rig)
        monkeypatch.setattr(Notes, "held", asyncio.Event())
        both = [asyncio.create_task(post(rig, "agent", SEEDED, {"agent_session_id": "x"})) for _ in range(2)]
        await settle()
        assert code(await post(rig, "agent", SEEDED, {"agent_session_id": "y"})) == "checkpoint_conflict"
        assert Notes.held is not None
        Notes.held.set()
        assert [(await one).json() for one in both] == [{"agent_session_id": "x"}] * 2
        assert (Notes.last.seeds, rig.participant("agent").survey().counts["sessions"]) == (1, 1)


@pytest.mark.parametrize(
    ("agent", "path"),
    [
        ("simple-agent", "/v1/responses"),
        *((f"{__name__}:Notes", path) for path in ("/v1/responses", "/v1/chat/completions", "/run")),
    ],
)
async def test_an_activation_that_is_counted_without_a_session_is_a_lost_session(
    tmp_path: Path, agent: str, path: str
) -> None:
    """What is counted are a session's activations: a fresh one in its place would run them again."""
    async with foreign(tmp_path, servers=servers(tmp_path, {"server": agent})) as rig:
        await serving(rig)
        response = await post(rig, "agent", f"/ng-rollout/x{path}", {"input": "a"}, **FIRST)
        assert (response.status_code, code(response)) == (409, "session_lost")


async def test_calls_without_an_index_are_each_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one cannot be told from a repeat: whoever may repeat calls has to count them."""
    async with foreign(tmp_path, servers=own(tmp_path)) as rig:
        await serving(rig)
        await ok(rig, "agent", SEEDED, {"agent_session_id": "x"})
        monkeypatch.setattr(Notes, "held", asyncio.Event())
        both = [asyncio.create_task(post(rig, "agent", "/ng-rollout/x/v1/responses", {})) for _ in range(2)]
        await settle()
        assert Notes.held is not None
        Notes.held.set()
        assert sorted([(await one).json()["count"] for one in both]) == [1, 2]


@KINDS
async def test_c19_closes_that_come_at_once_clean_up_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Together with a retire, and where whoever came first has left."""
    async with foreign(tmp_path, servers=own(tmp_path, kind)) as rig:
        await serving(rig)
        await ok(rig, "agent", SEEDED, {"agent_session_id": "x"})
        monkeypatch.setattr(Notes, "held", asyncio.Event())
        gone, *rest = (
            asyncio.create_task(post(rig, "agent", f"{SEEDED}/close", {"agent_session_id": "x"})) for _ in range(3)
        )
        await settle()
        gone.cancel()
        retiring = asyncio.create_task(retired(rig, "x"))
        await settle()
        assert not retiring.done()
        assert Notes.held is not None
        Notes.held.set()
        await retiring
        assert [(await one).json() for one in rest] == [{"closes": 1}] * 2
        assert (Notes.last.closes, Notes.last.counts) == (1, {})
        assert rig.participant("agent").survey().counts == {"sessions": 0, "busy": 0}


async def test_a_close_ends_a_restored_session_of_an_own_application_too(tmp_path: Path) -> None:
    """It was seeded under another attempt's name."""
    async with foreign(tmp_path, servers=own(tmp_path)) as rig:
        await serving(rig)
        await ok(rig, "agent", SEEDED, {"agent_session_id": "x"})
        records = await checkpoint(rig.participant("agent"))
        rig.kill("agent")
        fresh = rig.start("agent").server.participant
        await restore_built(fresh, records, "x")
        resume(fresh, "restore")
        await ok(rig, "agent", "/ng-rollout/x-a1/v1/agent_sessions/close", {"agent_session_id": "x"})
        assert (fresh.survey().counts["sessions"], Notes.last.counts) == (0, {})


# ---- one that knows nothing of checkpoints ------------------------------------------------------------------


class Unaware(AgentServer):
    """The usual loop by a plain client: any error is the end of its work."""

    checkpoint_sessions_supported: ClassVar[bool] = True

    def __init__(self, setup: AgentSetup) -> None:
        super().__init__(setup)
        self._http = httpx.AsyncClient(timeout=None)
        self._cookies: dict[str, dict[str, str]] = {}

    def setup_webserver(self) -> FastAPI:
        app = FastAPI()

        @app.post("/v1/agent_sessions")
        async def seed(body: dict[str, Any]) -> dict[str, Any]:
            self._cookies[required_episode().key] = body["tool_accesses"][0]["cookies"]
            return {"agent_session_id": body["agent_session_id"]}

        @app.post("/v1/agent_sessions/close")
        async def close(body: dict[str, Any]) -> dict[str, Any]:
            return {"agent_session_id": body["agent_session_id"]}

        @app.post("/v1/responses")
        async def responses(params: dict[str, Any]) -> dict[str, Any]:
            items = items_of(params["input"])
            while True:
                reply = await self._post("policy", "/v1/responses", {**params, "input": items})
                items += reply["output"]
                calls = function_calls(reply)
                if not calls:
                    return {**reply, "output": items[1:]}
                for call in calls:
                    output = await self._post("counter", f"/{call['name']}", json.loads(call["arguments"]))
                    result = {"type": "function_call_output", "call_id": call["call_id"]}
                    items.append({**result, "output": json.dumps(output)})

        return app

    async def _post(self, host: str, path: str, body: Any) -> Any:
        key = required_episode().key
        cookies = "; ".join(f"{name}={value}" for name, value in self._cookies[key].items())
        reply = await self._http.post(f"http://{host}/ng-rollout/{key}{path}", json=body, headers={"cookie": cookies})
        reply.raise_for_status()
        return reply.json()

    async def export_agent_sessions(self, keys: Sequence[str]) -> Mapping[str, Any]:
        return {key: self._cookies[key] for key in keys}

    async def restore_agent_sessions(self, sessions: Mapping[str, Any]) -> None:
        self._cookies = {key: dict(cookies) for key, cookies in sessions.items()}

    async def retire_agent_session(self, key: str) -> None:
        self._cookies.pop(key, None)


class UnawareAndUnsure(Unaware):
    checkpoint_sessions_supported: ClassVar[bool] = False


@pytest.mark.parametrize("name", ["Unaware", "UnawareAndUnsure"])
async def test_checkpoints_are_taken_beside_an_application_that_knows_nothing_of_them_and_cost_it_nothing(
    tmp_path: Path, name: str
) -> None:
    """Whatever it is at: no activation fails by a checkpoint, and after a death its rollouts start over."""
    async with cell(tmp_path, counter_rows(2, 2), servers=own(tmp_path, name)) as rig:
        rig.network.latency = 0.1
        in_a_tool, asked = False, 0

        def noted(seen: Seen) -> None:
            nonlocal in_a_tool, asked
            in_a_tool |= seen.host == "counter" and not seen.path.endswith(("_session", "/verify"))
            asked += seen.host == "policy" and rig.participant("policy").gate.checkpoint_open

        rig.network.on_request = noted
        for number in range(2):
            in_a_tool, rig.journal_file.seconds = False, 2.0  # by when the model has closed, and not opened again
            await rig.until(lambda: in_a_tool)  # noqa: B023 - it is what is waited for
            outcome = await rig.checkpoint(f"cp{number}")
            rig.journal_file.seconds = 0.0
            assert len(outcome.publication.restarts) == 2  # all of them were in their loops
            assert asked > number, "no model call met the checkpoint"
        assert not (tmp_path / "output/rollouts_failures.jsonl").exists()
        rig.kill("counter")
        await rig.until(rig.complete)
        assert not (tmp_path / "output/rollouts_failures.jsonl").exists()
        counted = rig.account(2)  # its tool calls have no ids to be counted by: a doubled one shows in the reward
        assert (counted.rows, counted.reward_mean) == (2, 1.0)
