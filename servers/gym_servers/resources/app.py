"""A resources server's routes: seed, tools, verify, close. The session id rides in the signed session cookie."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.sessions import SessionMiddleware

from gym_servers.http.apps import base_app
from gym_servers.http.episode_path import current_episode
from gym_servers.http.sessions import cookie_name
from gym_servers.journal.client import Journal
from gym_servers.participants.gate import Gate
from gym_servers.participants.resources import Hooks, ResourcesParticipant, ToolSession
from gym_servers.protocol import headers
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.errors import ProtocolError
from gym_servers.resources.metrics import aggregate
from gym_servers.resources.server import ResourcesServer, ToolCall, journal_identity


def participant_of(gate: Gate, server: ResourcesServer) -> ResourcesParticipant:
    """The participant that carries `server`'s sessions."""
    hooks = Hooks(
        server.export_session_states,
        server.check_session_states,
        server.install_session_states,
        server.retire_session_state,
    )
    return ResourcesParticipant(gate, server.checkpoint_mode, hooks)


def create_app(
    participant: ResourcesParticipant, server: ResourcesServer, journal: Journal, instance: str, secret: str
) -> FastAPI:
    gate = participant.gate
    app = base_app(server.name, lambda: gate.is_open or gate.checkpoint_open)
    cookie = cookie_name(type(server).__name__, instance)
    app.add_middleware(SessionMiddleware, secret_key=secret, session_cookie=cookie, max_age=None)
    tools = server.tools()

    @app.post("/seed_session")
    async def seed_session(request: Request, response: Response) -> dict[str, Any]:
        body = await _json(request)
        session_id = str(body.get("resources_session_id") or uuid.uuid4().hex)
        row = body["task_data"] if isinstance(body.get("task_data"), dict) else body
        episode = current_episode()

        async def begin() -> None:
            try:
                await server.seed(session_id, row)
            except ValueError as error:
                raise ProtocolError("invalid_request", f"the task's row: {error}") from error
            # Part of the seed: a retire that comes meanwhile waits for it, nothing of the episode is told after that.
            begun = ToolSession(session_id, episode)
            await journal.append([{"kind": "seed", "server": instance, **journal_identity(begun)}])

        await participant.seed(session_id, episode, begin)
        request.session["session_id"] = session_id
        if server.checkpoint_mode == "restart_only":
            response.headers[headers.RESTART] = server.name
        if server.verify_replays:
            response.headers[headers.VERIFY] = "replay"
        return {"resources_session_id": session_id, "resources_tools": None, "sandbox_access": None}

    @app.post("/close_session")
    async def close_session(request: Request) -> dict[str, Any]:
        body = await _json(request)
        session_id = str(body.get("resources_session_id") or request.session.get("session_id") or "")
        await participant.close(session_id, current_episode())
        return {"resources_session_id": session_id}

    @app.post("/verify")
    async def verify(request: Request) -> dict[str, Any]:
        body = await _json(request)

        async def score(session: ToolSession) -> dict[str, Any]:
            return await server.verify(session.id, body)

        session_id, episode = request.session.get("session_id"), current_episode()
        scored = await participant.call(session_id, episode, "verify", score, replay=server.verify_replays)
        if not request.headers.get(headers.CLOSE_FOLLOWS):
            await participant.close(str(session_id), episode)
        return {**body, "mask_sample": False, **scored}

    @app.post("/aggregate_metrics")
    async def aggregate_metrics(request: Request) -> dict[str, Any]:
        return aggregate((await _json(request)).get("verify_responses") or [])

    @app.post("/{tool}")
    async def call_tool(tool: str, request: Request) -> Response:
        handler = tools.get(tool)
        if handler is None:
            return JSONResponse({"error": f"unknown tool {tool}; there are {', '.join(sorted(tools))}"}, 404)
        arguments = await _json(request)
        call_id = request.headers.get(headers.TOOL_CALL)

        async def work(session: ToolSession) -> Any:
            return await handler(ToolCall(session, tool, call_id, journal, instance), arguments)

        try:
            reply = await participant.call(
                request.session.get("session_id"),
                current_episode(),
                tool,
                work,
                call_id=call_id,
                digest=digest_of([tool, arguments]),
            )
        except ValueError as error:
            return JSONResponse({"error": str(error)}, 422)
        return JSONResponse(reply)

    return app


async def _json(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise ProtocolError("invalid_request", "the body is not JSON") from error
    if not isinstance(body, Mapping):
        raise ProtocolError("invalid_request", "the body is not a JSON object")
    return dict(body)
