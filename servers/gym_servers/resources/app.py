"""A resources server's routes: seed, tools, verify, close. The session id rides in the signed session cookie."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.middleware.sessions import SessionMiddleware

from gym_servers.http.apps import base_app, json_object
from gym_servers.http.episode_path import current_episode
from gym_servers.http.sessions import cookie_name
from gym_servers.journal.client import Journal
from gym_servers.participants.gate import Gate
from gym_servers.participants.resources import Hooks, ResourcesParticipant
from gym_servers.participants.tool_sessions import ToolSession
from gym_servers.protocol import headers
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, InvalidIdentity
from gym_servers.resources.mcp import Tokens, add_mcp
from gym_servers.resources.metrics import AggregateRequest, aggregate
from gym_servers.resources.server import ResourcesServer, ToolCall, journal_identity

MAX_SESSION_ID = 256
# What differs between two attempts over the same row: a seed that is replayed after a restore is the same seed.
OF_THE_ATTEMPT = frozenset({"resources_session_id", "episode_id", "_ng_rollout_id", "_ng_attempt_index"})


def participant_of(gate: Gate, server: ResourcesServer) -> ResourcesParticipant:
    """The participant that carries `server`'s sessions."""
    hooks = Hooks(
        server.export_session_states,
        server.restore_session_states,
        server.retire_session_state,
        server.park_session_states,
        server.unpark_session_states,
    )
    return ResourcesParticipant(gate, server.checkpoint_mode, hooks)


def create_app(
    participant: ResourcesParticipant,
    server: ResourcesServer,
    journal: Journal,
    instance: str,
    secret: str,
    *,
    mcp: bool = False,
) -> FastAPI:
    """The data application. With `mcp` each seed grants a tool token, which no checkpoint can carry on: its episodes
    start over."""
    gate = participant.gate
    app = base_app(server.name, lambda: gate.is_open or gate.checkpoint_open)
    cookie = cookie_name(type(server).__name__, instance)
    app.add_middleware(SessionMiddleware, secret_key=secret, session_cookie=cookie, max_age=None)
    tools = server.tools()
    tokens = Tokens(secret)

    def episode_of(body: Mapping[str, Any]) -> Episode | None:
        # With checkpointing off calls need not name their episode, so a session must not be bound to one by its body.
        return _episode(body) if gate.enabled else current_episode()

    @app.post("/seed_session")
    async def seed_session(request: Request, response: Response) -> dict[str, Any]:
        body = await json_object(request)
        row = body["task_data"] if isinstance(body.get("task_data"), dict) else body

        async def begin(session_id: str) -> None:
            try:
                await server.seed(session_id, row)
            except ValueError as error:
                raise ProtocolError("invalid_request", f"the task's row: {error}") from error

        async def begun(session: ToolSession) -> None:
            await journal.append([{"kind": "seed", "server": instance, **journal_identity(session)}])

        session = await participant.seed(
            _session_id(body),
            episode_of(body),
            begin,
            digest=digest_of({name: value for name, value in row.items() if name not in OF_THE_ATTEMPT}),
            fresh_id=uuid.uuid4().hex,
            begun=begun,
        )
        request.session["session_id"] = session.id
        if gate.enabled and (server.checkpoint_mode == "restart_only" or mcp):
            response.headers[headers.RESTART] = server.name
        if gate.enabled and server.verify_replays:
            response.headers[headers.VERIFY] = "replay"
        granted = {"mcp": tokens.grant(instance, session)} if mcp else {}
        return {"resources_session_id": session.id, "resources_tools": None, "sandbox_access": None, **granted}

    @app.post("/close_session")
    async def close_session(request: Request) -> dict[str, Any]:
        body = await json_object(request)
        session_id = str(_session_id(body) or request.session.get("session_id") or "")
        await participant.close(session_id, episode_of(body))
        return {"resources_session_id": session_id}

    @app.post("/verify")
    async def verify(request: Request) -> dict[str, Any]:
        body = await json_object(request)

        async def score(session: ToolSession) -> dict[str, Any]:
            try:
                return await server.verify(session.id, body)
            except ValueError as error:
                raise ProtocolError("invalid_request", f"the row to verify: {error}") from error

        session_id, episode, digest = request.session.get("session_id"), current_episode(), digest_of(body)
        # A name that no header can spell: the same verify again is answered, another one is another call.
        call_id = None if server.verify_replays else f" verify {digest}"
        scored = await participant.call(
            session_id, episode, "verify", score, call_id=call_id, digest=digest, replay=server.verify_replays
        )
        if not request.headers.get(headers.CLOSE_FOLLOWS):
            await participant.close(str(session_id), episode)
        return {**body, "mask_sample": False, **scored}

    @app.post("/aggregate_metrics")
    async def aggregate_metrics(body: AggregateRequest) -> dict[str, Any]:
        return aggregate(body.verify_responses)

    async def call_by_token(session_id: str, episode: Episode | None, tool: str, arguments: dict[str, Any]) -> Any:
        async def work(session: ToolSession) -> Any:
            return await tools[tool](ToolCall(session, tool, None, journal, instance), arguments)

        return await participant.call(session_id, episode, tool, work)

    if mcp:
        add_mcp(app, instance, tokens, server.tool_schemas(), call_by_token)

    @app.post("/{tool}")
    async def call_tool(tool: str, request: Request) -> Response:
        handler = tools.get(tool)
        if handler is None:
            return JSONResponse({"error": f"unknown tool {tool}; there are {', '.join(sorted(tools))}"}, 404)
        arguments = await json_object(request)
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


def _session_id(body: Mapping[str, Any]) -> str | None:
    """The session a body names. Raises `invalid_request`: names go into records."""
    given = body.get("resources_session_id")
    if given is None or given == "":
        return None
    if not isinstance(given, str) or len(given) > MAX_SESSION_ID:
        raise ProtocolError("invalid_request", f"resources_session_id: a text of at most {MAX_SESSION_ID} characters")
    return given


def _episode(body: Mapping[str, Any]) -> Episode | None:
    """The episode of a call: its path's, else its body's. Raises `invalid_request` where they differ."""
    episode, given = current_episode(), body.get("episode_id")
    if not isinstance(given, dict):
        return episode
    try:
        named = Episode(str(given.get("rollout_id")), int(given.get("attempt", 0)))
    except (InvalidIdentity, TypeError, ValueError) as error:
        raise ProtocolError("invalid_request", "episode_id: {rollout_id, attempt} of an episode") from error
    if episode is not None and named != episode:
        raise ProtocolError("invalid_request", f"the path names episode {episode.key}, the body {named.key}")
    return named
