"""Tools over the Model Context Protocol: JSON-RPC at `/mcp`, one stateless POST per message.

Whoever calls has no path of its own to name its episode by: the token from the seed's reply does. It names one
attempt, so once that is replaced or retired it stops working like every other call of it.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from itsdangerous import BadSignature, URLSafeSerializer

from gym_servers.participants.tool_sessions import ToolSession
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, InvalidIdentity, parse_key

PATH = "/mcp"
TOKEN_HEADER = "X-NeMo-Gym-Session-Token"
VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")  # spoken here, the newest first
_SALT = "gym-tool-token"  # a session cookie of the same secret is no token
_METHOD_NOT_FOUND, _INVALID_REQUEST = -32601, -32600

CallTool = Callable[[str, Episode | None, str, dict[str, Any]], Awaitable[Any]]


@dataclass(frozen=True)
class Tokens:
    """Signs and reads tool tokens."""

    secret: str

    def grant(self, server: str, session: ToolSession) -> dict[str, Any]:
        """What a seed's reply says of it."""
        key = session.episode.key if session.episode is not None else None
        token = self._serializer().dumps([session.id, key])
        return {"server_name": server, "url_path": PATH, "headers": {TOKEN_HEADER: token}}

    def read(self, token: str) -> tuple[str, Episode | None]:
        """Session and episode of a token. Raises `unauthorized`."""
        try:
            session_id, key = self._serializer().loads(token)
            return str(session_id), parse_key(key) if key is not None else None
        except (BadSignature, InvalidIdentity, TypeError, ValueError) as error:
            raise ProtocolError("unauthorized", f"send the seed's tool token as {TOKEN_HEADER}") from error

    def _serializer(self) -> URLSafeSerializer:
        return URLSafeSerializer(self.secret, salt=_SALT)


def add_mcp(
    app: FastAPI, server: str, tokens: Tokens, tools: Mapping[str, Mapping[str, Any]], call: CallTool
) -> None:
    """Add the route. `tools`: name -> JSON schema of its arguments; `call` runs one, ValueError is for the model."""

    async def call_tool(session: tuple[str, Episode | None], params: Mapping[str, Any]) -> dict[str, Any]:
        name, arguments = params.get("name"), params.get("arguments") or {}
        if not isinstance(name, str) or name not in tools or not isinstance(arguments, dict):
            return _content({"error": f"unknown tool; there are {', '.join(sorted(tools))}"}, failed=True)
        try:
            return _content(await call(*session, name, arguments))
        except ValueError as error:
            return _content({"error": str(error)}, failed=True)

    @app.post(PATH)
    async def mcp(request: Request) -> Response:
        session = tokens.read(request.headers.get(TOKEN_HEADER, ""))
        try:
            message = await request.json()
        except ValueError:
            message = None
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            return JSONResponse(_error(None, _INVALID_REQUEST, "one JSON-RPC request per POST"), 400)
        params = message.get("params")
        params = params if isinstance(params, dict) else {}
        if "id" not in message:
            return Response(status_code=202)  # a notification: nothing here depends on one
        match message["method"]:
            case "initialize":
                asked = params.get("protocolVersion")
                result: dict[str, Any] = {
                    "protocolVersion": asked if asked in VERSIONS else VERSIONS[0],
                    "capabilities": {"tools": {}},
                    "serverInfo": {"name": server, "version": "1"},
                }
            case "ping":
                result = {}
            case "tools/list":
                result = {"tools": [{"name": name, "inputSchema": dict(schema)} for name, schema in tools.items()]}
            case "tools/call":
                result = await call_tool(session, params)
            case method:
                return JSONResponse(_error(message["id"], _METHOD_NOT_FOUND, f"no method {method[:80]}"))
        return JSONResponse({"jsonrpc": "2.0", "id": message["id"], "result": result})


def _content(reply: Any, *, failed: bool = False) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": json.dumps(reply)}], "isError": failed}


def _error(message_id: Any, code: int, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": message_id, "error": {"code": code, "message": text}}
