"""`scratch-agent`: an agent that builds its own application and does not opt in to checkpoints.

Its sessions keep their conversation in a folder of their own on this machine, which no record can carry: a stand-in
for a sandbox. So its episodes start over after a death, and a retire removes the folder. An example of how little an
existing agent needs to take part.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request

from gym_servers.agent.app import CloseRequest, SeedRequest
from gym_servers.agent.server import AgentServer, AgentSetup
from gym_servers.agent.tools import ask_model, call_tool, function_calls, items_of
from gym_servers.http.apps import install_errors, json_object
from gym_servers.http.episode_path import required_episode
from gym_servers.http.peers import ADMISSION_RETRY_SECONDS, PeerFailed, PeerUnreachable
from gym_servers.http.sessions import unsign
from gym_servers.participants.agent_state import Activation, Session
from gym_servers.protocol.errors import ProtocolError


class ScratchAgent(AgentServer):
    """`config.folder`: where sessions' folders are made; a temporary one by default."""

    def __init__(self, setup: AgentSetup) -> None:
        super().__init__(setup)
        self._model = setup.peers.only("model", setup.config.get("model"))
        self._root = Path(setup.config.get("folder") or tempfile.mkdtemp(prefix="scratch-agent-"))
        self._root.mkdir(parents=True, exist_ok=True)
        self._sessions: dict[str, Session] = {}

    def setup_webserver(self) -> FastAPI:
        app = FastAPI(title="scratch-agent", docs_url=None, redoc_url=None)
        install_errors(app)

        @app.post("/v1/agent_sessions")
        async def seed(body: SeedRequest) -> dict[str, Any]:
            episode = required_episode()
            accesses = [
                {
                    "peer": self.setup.peers.name_of(access.base_url),
                    "jar": unsign(access.cookies, self.setup.secret),
                }
                for access in body.tool_accesses
                if access.kind == "direct_http"
            ]
            self._folder(episode.key).mkdir(exist_ok=True)
            self._sessions[episode.key] = Session(body.agent_session_id, episode, accesses)
            return {"agent_session_id": body.agent_session_id}

        @app.post("/v1/agent_sessions/close")
        async def close(body: CloseRequest) -> dict[str, Any]:
            await self.retire_agent_session(required_episode().key)
            return {"agent_session_id": body.agent_session_id}

        @app.post("/v1/responses")
        async def responses(request: Request) -> dict[str, Any]:
            session = self._sessions.get(required_episode().key)
            if session is None:
                raise ProtocolError("session_lost", "no session here; seed one first")
            try:
                return await self._loop(session, await json_object(request))
            except (PeerFailed, PeerUnreachable) as error:
                raise ProtocolError("checkpoint_error", f"the activation failed: {error}") from error

        return app

    async def _loop(self, session: Session, params: dict[str, Any]) -> dict[str, Any]:
        peers, given = self.setup.peers, items_of(params.get("input"))
        activation = Activation(1, "", 0.0)
        while True:
            response = await self._ask(session, activation, params, given)
            calls = function_calls(response)
            activation.model_calls += 1
            if not calls:
                return {**response, "output": [*activation.items, *response["output"]]}
            results = [await call_tool(peers, session, call) for call in calls]
            activation.items += [*response["output"], *results]
            log = self._folder(session.episode.key) / "conversation.json"
            await asyncio.to_thread(log.write_text, json.dumps(activation.items))

    async def _ask(
        self, session: Session, activation: Activation, params: dict[str, Any], given: list[dict[str, Any]]
    ) -> dict[str, Any]:
        while True:
            try:
                return await ask_model(self.setup.peers, self._model, session, activation, params, given)
            except ProtocolError as refusal:
                if refusal.code != "admission_closed":
                    raise
            await asyncio.sleep(ADMISSION_RETRY_SECONDS)

    async def retire_agent_session(self, key: str) -> None:
        self._sessions.pop(key, None)
        await asyncio.to_thread(shutil.rmtree, self._folder(key), ignore_errors=True)

    def _folder(self, key: str) -> Path:
        return self._root / key
