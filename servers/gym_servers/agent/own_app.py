"""Takes an agent's own application into a cell: its sessions are known by watching its calls.

    guarded(app, participant, name)

Seeds, closes and calls pass through the participant, so they wait for a checkpoint, are fenced, are found by a
retire, and are carried out once: a repeat joins what runs, or gets the reply that was kept. Health and errors are the
framework's, every other route is the application's alone.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse

from gym_servers.agent.app import activation_index
from gym_servers.http.apps import base_app
from gym_servers.http.episode_path import current_episode
from gym_servers.http.row_identity import without_attempt
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.agent_state import Session
from gym_servers.participants.calls import Calls
from gym_servers.protocol import headers
from gym_servers.protocol.digests import digest_of, sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

SEED, CLOSE, RUN = "/v1/agent_sessions", "/v1/agent_sessions/close", "/run"
WORK = frozenset({"/v1/responses", "/v1/chat/completions", RUN})

# Of JSON values, since it may become part of a record: status, headers, and the body as latin-1.
Reply = dict[str, Any]


def guarded(app: FastAPI, participant: AgentParticipant, name: str) -> FastAPI:
    """The application to serve in `app`'s place. With checkpointing off it only adds health and the episode path."""
    outer = base_app(name, lambda: participant.gate.is_open or participant.gate.checkpoint_open)
    outer.mount("/", _Guard(app, participant, name) if participant.gate.enabled else app)
    return outer


class _Guard:
    def __init__(self, app: ASGIApp, participant: AgentParticipant, name: str) -> None:
        self._app, self._participant, self._name = app, participant, name
        self._seeds = Calls(participant.gate)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or scope["method"] != "POST" or path not in {SEED, CLOSE, *WORK}:
            await self._app(scope, receive, send)
            return
        try:
            episode = current_episode()
            if episode is None:
                raise ProtocolError("rollout_id_required", "call below /ng-rollout/<rollout id>/")
            asked = _Asked(self._app, scope, await Request(scope, receive).body(), receive)
            reply = await self._pass(path, episode, asked)
        except _Refused as refusal:
            reply = refusal.reply
        except ProtocolError as refusal:
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)
            return
        except ClientDisconnect:
            return  # it left before it had said what it wants
        await _send(reply, send)

    async def _pass(self, path: str, episode: Episode, asked: _Asked) -> Reply:
        participant = self._participant
        if path == SEED:
            seed = self._seeds.find(episode, SEED, asked.digest) or self._seeds.begin(
                episode, SEED, asked.digest, lambda: self._seed(episode, asked), restart=False
            )
            seeded: Reply = await self._seeds.join(seed)
            return seeded
        if path == CLOSE:
            return await self._close(episode, asked)
        index = activation_index(asked.headers.get(headers.ACTIVATION))
        known = participant.session_of(episode)
        if index is None and known is None:
            return await self._without_session(path, episode, asked)
        session = participant.session(known.id if known is not None else None, episode)
        # A row is the first activation of its session, whether its caller counts or not.
        index = 1 if path == RUN and index is None else index
        return await participant.exclusive(session, index, asked.digest, asked.served)

    async def _seed(self, episode: Episode, asked: _Asked) -> Reply:
        reply: Reply = {}

        async def begin(_: Session) -> None:
            nonlocal reply
            reply = await asked.served()

        await self._participant.seed(episode.key, episode, [], begin=begin)
        if not self._participant.exportable:
            reply = {**reply, "headers": [*reply["headers"], [headers.RESTART, self._name]]}
        return reply

    async def _close(self, episode: Episode, asked: _Asked) -> Reply:
        known = self._participant.session_of(episode)
        reply = await self._participant.close(known.id if known else episode.key, episode, asked.get)
        return reply or await asked.get()  # not known here: what a close of nothing says is the application's

    async def _without_session(self, path: str, episode: Episode, asked: _Asked) -> Reply:
        """Nothing continues it: a checkpoint calls its episode a restart."""
        if path != RUN:
            return await self._participant.direct(episode, asked.get)

        async def serve() -> Reply:
            reply = await asked.served()
            self._participant.remember(episode, asked.digest, reply)
            return reply

        return await self._participant.row(episode, asked.digest, serve, restart=True)


class _Refused(Exception):
    """The application did not do what it was asked for; its reply says why."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"answered {reply['status']}")
        self.reply = reply


class _Asked:
    """One request, whole, and the application to answer it."""

    def __init__(self, app: ASGIApp, scope: Scope, body: bytes, receive: Receive) -> None:
        self._app, self._scope, self._body, self._receive = app, scope, body, receive
        self.headers = Headers(scope=scope)
        self.digest = _digest(scope["path"], body)

    async def get(self) -> Reply:
        """The application's reply, kept until it is known whether it may go out."""
        status, sent, parts, given = 500, list[tuple[bytes, bytes]](), list[bytes](), False

        async def receive() -> Message:
            nonlocal given
            if given:
                return await self._receive()
            given = True
            return {"type": "http.request", "body": self._body, "more_body": False}

        async def keep(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status, sent = int(message["status"]), list(message.get("headers", []))
            elif message["type"] == "http.response.body":
                parts.append(message.get("body", b""))

        await self._app(self._scope, receive, keep)
        fields = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in sent]
        return {"status": status, "headers": fields, "body": b"".join(parts).decode("latin-1")}

    async def served(self) -> Reply:
        """As `get`. Raises _Refused for an error: it is no reply to be given again."""
        reply = await self.get()
        if not 200 <= reply["status"] < 300:
            raise _Refused(reply)
        return reply


def _digest(path: str, body: bytes) -> str:
    """What tells one request from another: a row's later attempts bring the same one."""
    try:
        given = json.loads(body)
        return digest_of([path, without_attempt(given) if isinstance(given, dict) else given])
    except (ValueError, RecursionError):
        return digest_of([path, sha256(body)])  # whatever it is, the application has to say


async def _send(reply: Reply, send: Send) -> None:
    sent = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in reply["headers"]]
    await send({"type": "http.response.start", "status": reply["status"], "headers": sent})
    await send({"type": "http.response.body", "body": reply["body"].encode("latin-1")})
