"""The agent server's routes: sessions, activations, closing, and row-shaped `/run`."""

from __future__ import annotations

import uuid
from typing import Any, Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.middleware.sessions import SessionMiddleware

from gym_servers.agent.row_run import PARAMS, RowRuns
from gym_servers.agent.server import AgentServer
from gym_servers.agent.tools import items_of
from gym_servers.http.apps import base_app, json_object
from gym_servers.http.episode_path import current_episode
from gym_servers.http.peers import PeerFailed, PeerUnreachable
from gym_servers.http.row_identity import row_episode, without_attempt
from gym_servers.http.sessions import cookie_name, unsign
from gym_servers.participants.agent_state import Activation, Session
from gym_servers.protocol import headers
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.resources.metrics import AggregateRequest, aggregate


class ToolAccess(BaseModel):
    """A grant of tools. `tools`: the names it is for; without it, for every tool of that server."""

    kind: Literal["direct_http", "mcp"] = "direct_http"
    base_url: str = ""
    cookies: dict[str, str] = {}
    headers: dict[str, str] = {}
    tools: list[str] | None = None


class SeedRequest(BaseModel):
    agent_session_id: str
    episode_id: dict[str, Any] | None = None
    task_id: dict[str, Any] | None = None
    tool_accesses: list[ToolAccess] = []


class CloseRequest(BaseModel):
    agent_session_id: str
    episode_id: dict[str, Any] | None = None


def create_app(agent: AgentServer, rows: RowRuns | None, resources: str | None) -> FastAPI:
    """`rows` serves `/run`; `resources` is the tool server of calls without a session. None where several could be
    meant."""
    setup = agent.setup
    participant, peers, secret = setup.participant, setup.peers, setup.secret
    app = base_app(type(agent).__name__, lambda: participant.gate.is_open or participant.gate.checkpoint_open)
    cookie = cookie_name(type(agent).__name__, setup.name)
    app.add_middleware(SessionMiddleware, secret_key=secret, session_cookie=cookie, max_age=None)

    def required(episode: Episode | None) -> tuple[Episode, bool]:
        """The episode of work, and whether its name is made up."""
        if episode is None and participant.gate.enabled:
            raise ProtocolError("rollout_id_required", "call below /ng-rollout/<rollout id>/ with checkpointing on")
        return episode or Episode(f"anonymous.{uuid.uuid4().hex}", 0), episode is None

    @app.post("/v1/agent_sessions")
    async def seed(body: SeedRequest, request: Request, response: Response) -> dict[str, Any]:
        direct = [access for access in body.tool_accesses if access.kind == "direct_http"]
        accesses = [
            {
                "peer": peers.name_of(access.base_url),
                "jar": unsign(access.cookies, secret),
                "headers": access.headers,
                "tools": access.tools,
            }
            for access in direct
        ]
        # A header may be a secret, and an MCP grant is one: neither goes into a record.
        restart = len(direct) < len(body.tool_accesses) or any(access.headers for access in direct)
        episode, anonymous = required(current_episode())
        await participant.seed(body.agent_session_id, episode, accesses, restart=restart, anonymous=anonymous)
        request.session["session_id"] = body.agent_session_id
        if participant.gate.enabled and (restart or not participant.exportable):
            response.headers[headers.RESTART] = setup.name
        return {"agent_session_id": body.agent_session_id}

    @app.post("/v1/agent_sessions/close")
    async def close(body: CloseRequest) -> dict[str, Any]:
        await participant.close(body.agent_session_id, current_episode())
        return {"agent_session_id": body.agent_session_id}

    @app.post("/v1/responses")
    async def responses(request: Request) -> dict[str, Any]:
        params = await json_object(request)
        items_of(params.get("input"))  # refused before anything is begun
        session_id, episode = request.session.get("session_id"), current_episode()
        try:
            index = activation_index(request.headers.get(headers.ACTIVATION))
            counted = index is not None and participant.gate.enabled
            # A cookie that was lost on the way is no call without a session: the episode has one, or its caller
            # counts the activations of one.
            if session_id is None and not counted and (episode is None or participant.session_of(episode) is None):
                return await direct(params, *required(episode), request.cookies)
            session = participant.session(session_id, episode)

            async def drive(activation: Activation) -> dict[str, Any]:
                return await agent.turn(session, activation, params)

            return await participant.activate(session, index, digest_of(params), drive)
        except (PeerFailed, PeerUnreachable) as error:
            raise ProtocolError("checkpoint_error", f"the activation failed: {error}") from error

    async def direct(
        params: dict[str, Any], episode: Episode, anonymous: bool, cookies: dict[str, str]
    ) -> dict[str, Any]:
        jar = unsign({name: value for name, value in cookies.items() if name != cookie}, secret)
        accesses = [{"peer": resources, "jar": jar, "tools": None}] if resources is not None else []
        session = Session("", episode, accesses, anonymous=anonymous)
        activation = Activation(None, "", participant.gate.clock(), ordinal=0)
        return await participant.direct(episode, lambda: agent.turn(session, activation, params))

    @app.post("/run")
    async def run(request: Request) -> Any:
        row = await json_object(request)
        if not isinstance(row.get(PARAMS), dict):
            raise ProtocolError("invalid_request", f"a row needs `{PARAMS}`")
        items_of(row[PARAMS].get("input"))
        if rows is None:
            raise ProtocolError("invalid_request", "there are several resources servers: name one in `config`")
        episode, anonymous = required(row_episode(row))
        digest = digest_of(without_attempt(row))
        try:
            return await participant.row(episode, digest, lambda: rows.run(episode, row, digest, anonymous=anonymous))
        except (PeerFailed, PeerUnreachable) as error:
            # No row, and no refusal that a caller could take for one: the work was done in vain.
            return JSONResponse({"failure": {"failure_reason": str(error), "terminal": False}}, 502)

    @app.post("/aggregate_metrics")
    async def aggregate_metrics(body: AggregateRequest) -> dict[str, Any]:
        return aggregate(body.verify_responses)

    return app


def activation_index(given: str | None) -> int | None:
    """The activation that a header names, None without one. Raises `invalid_request`."""
    if given is None:
        return None
    if not given.isdigit() or given == "0":
        raise ProtocolError("invalid_request", f"{headers.ACTIVATION} counts from 1")
    return int(given)
