"""Takes an agent's own application into a cell: its sessions are known by watching its calls.

    guarded(app, participant, name)

Seeds, closes and calls pass through the participant, so they wait for a checkpoint, are fenced, and are found by a
retire. Health and errors are the framework's, every other route is the application's alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.responses import JSONResponse

from gym_servers.http.apps import base_app
from gym_servers.http.episode_path import current_episode
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.agent_state import Session
from gym_servers.protocol import headers
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

SEED, CLOSE = "/v1/agent_sessions", "/v1/agent_sessions/close"
WORK = frozenset({"/v1/responses", "/v1/chat/completions", "/run"})


def guarded(app: FastAPI, participant: AgentParticipant, name: str) -> FastAPI:
    """The application to serve in `app`'s place. With checkpointing off it only adds health and the episode path."""
    outer = base_app(name, lambda: participant.gate.is_open or participant.gate.checkpoint_open)
    outer.mount("/", _Guard(app, participant, name) if participant.gate.enabled else app)
    return outer


class _Guard:
    def __init__(self, app: ASGIApp, participant: AgentParticipant, name: str) -> None:
        self._app, self._participant, self._name = app, participant, name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "POST" or path not in {SEED, CLOSE, *WORK}:
            await self._app(scope, receive, send)
            return
        answer = _Answer(self._app, scope, receive)
        try:
            episode = current_episode()
            if episode is None:
                raise ProtocolError("rollout_id_required", "call below /ng-rollout/<rollout id>/")
            await self._pass(path, episode, answer)
        except ProtocolError as refusal:
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)
            return
        for message in answer.messages:
            await send(message)

    async def _pass(self, path: str, episode: Episode, answer: _Answer) -> None:
        participant, key = self._participant, episode.key
        if path == SEED:

            async def begin(_: Session) -> None:
                await answer.get()
                if not answer.ok:
                    raise _NotSeeded

            try:
                await participant.seed(key, episode, [], begin=begin)
            except _NotSeeded:
                return
            if not participant.exportable:
                answer.add_header(headers.RESTART, self._name)
        elif path == CLOSE:
            await participant.close(key, episode, answer.get)
            if not answer.messages:
                await answer.get()  # not known here: what a close of nothing says is the application's
        elif participant.exportable and participant.session_of(episode) is not None:
            await participant.exclusive(episode, answer.get)
        else:
            await participant.direct(episode, answer.get)


class _NotSeeded(Exception):
    """The application refused the seed; its reply says why."""


class _Answer:
    """The application's reply, kept until it is known whether it may go out."""

    def __init__(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        self._app, self._scope, self._receive = app, scope, receive
        self.messages: list[Message] = []

    @property
    def ok(self) -> bool:
        return bool(self.messages) and 200 <= int(self.messages[0]["status"]) < 300

    async def get(self) -> None:
        async def keep(message: Message) -> None:
            self.messages.append(message)

        await self._app(self._scope, self._receive, keep)

    def add_header(self, name: str, value: str) -> None:
        self.messages[0]["headers"] = [*self.messages[0].get("headers", []), (name.encode(), value.encode())]
