"""The agent server's routes: sessions, activations, and closing."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.middleware.sessions import SessionMiddleware

from gym_servers.agent.simple_agent import SimpleAgent
from gym_servers.http.apps import base_app
from gym_servers.http.episode_path import current_episode
from gym_servers.http.peers import PeerFailed, Peers, PeerUnreachable
from gym_servers.http.sessions import cookie_name, unsign
from gym_servers.participants.agent import Activation, AgentParticipant
from gym_servers.protocol import headers
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode


class ToolAccess(BaseModel):
    kind: Literal["direct_http"]
    base_url: str
    cookies: dict[str, str] = {}
    headers: dict[str, str] = {}


class SeedRequest(BaseModel):
    agent_session_id: str
    episode_id: dict[str, Any] | None = None
    task_id: dict[str, Any] | None = None
    tool_accesses: list[ToolAccess] = []


class CloseRequest(BaseModel):
    agent_session_id: str
    episode_id: dict[str, Any] | None = None


def create_app(
    participant: AgentParticipant, agent: SimpleAgent, peers: Peers, instance: str, secret: str
) -> FastAPI:
    app = base_app("simple-agent", lambda: participant.gate.is_open or participant.gate.checkpoint_open)
    cookie = cookie_name("SimpleAgent", instance)
    app.add_middleware(SessionMiddleware, secret_key=secret, session_cookie=cookie, max_age=None)

    def episode_of(session_id: str) -> Episode:
        episode = current_episode()
        if episode is None and participant.gate.enabled:
            raise ProtocolError("rollout_id_required", "call below /ng-rollout/<rollout id>/ with checkpointing on")
        return episode or Episode(f"session.{digest_of(session_id)[:16]}", 0)

    @app.post("/v1/agent_sessions")
    async def seed(body: SeedRequest, request: Request) -> dict[str, Any]:
        accesses = [
            {
                "peer": peers.name_of(access.base_url),
                "jar": unsign(access.cookies, secret),
                "headers": access.headers,
            }
            for access in body.tool_accesses
        ]
        await participant.seed(body.agent_session_id, episode_of(body.agent_session_id), accesses)
        request.session["session_id"] = body.agent_session_id
        return {"agent_session_id": body.agent_session_id}

    @app.post("/v1/agent_sessions/close")
    async def close(body: CloseRequest) -> dict[str, Any]:
        await participant.close(body.agent_session_id, current_episode())
        return {"agent_session_id": body.agent_session_id}

    @app.post("/v1/responses")
    async def responses(request: Request) -> dict[str, Any]:
        try:
            params = await request.json()
        except ValueError as error:
            raise ProtocolError("invalid_request", "the body is not JSON") from error
        session = participant.session(request.session.get("session_id"), current_episode())

        async def drive(activation: Activation) -> dict[str, Any]:
            return await agent.run(session, activation, params)

        try:
            return await participant.activate(session, _index(request), digest_of(params), drive)
        except (PeerFailed, PeerUnreachable) as error:
            raise ProtocolError("checkpoint_error", f"the activation failed: {error}") from error

    return app


def _index(request: Request) -> int | None:
    given = request.headers.get(headers.ACTIVATION)
    if given is None:
        return None
    if not given.isdigit() or given == "0":
        raise ProtocolError("invalid_request", f"{headers.ACTIVATION} counts from 1")
    return int(given)
