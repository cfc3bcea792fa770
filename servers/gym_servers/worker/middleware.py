"""ASGI middleware for an engine's API server: `vllm serve --middleware gym_servers.worker.middleware.GenerationCut`.

It follows the tokens of every stream that carries a ticket, and answers `POST /ng-control/v1/generation-cut`. The
engine makes the middleware, so its settings come from the environment: `GYM_CUT_STORAGE`, where checkpoints are
kept (a folder, or s3://bucket/prefix; `GYM_CUT_S3` is how the bucket is reached, as JSON), and the stack's
control token as `GYM_CONTROL_TOKEN`, or in the file that `GYM_CONTROL_TOKEN_FILE` names.
"""

from __future__ import annotations

import json
import os
import uuid
from typing import TYPE_CHECKING

from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse

from gym_servers.capture.inventory import PATH, Inventory
from gym_servers.control.tokens import ControlTokens, tokens_of_process
from gym_servers.protocol import headers
from gym_servers.protocol.errors import ProtocolError
from gym_servers.stack.settings import S3Settings, SettingsError, describe
from gym_servers.storage.locate import open_store
from gym_servers.storage.store import ObjectStore, StorageError
from gym_servers.worker.cut import Cutter
from gym_servers.worker.streams import Streams

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LARGEST_BODY = 32 * 1024 * 1024


class GenerationCut:
    """Raises SettingsError at start-up where a setting is missing or cannot be used."""

    def __init__(self, app: ASGIApp, store: ObjectStore | None = None, tokens: ControlTokens | None = None) -> None:
        self._app = app
        self._streams = Streams()
        self._tokens = tokens or tokens_of_process()
        self._cutter = Cutter(self._streams, store or _store(), f"{os.getpid()}-{uuid.uuid4().hex[:12]}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == PATH:
            await (await self._answer(Request(scope, receive)))(scope, receive, send)
        elif ticket := Headers(scope=scope).get(headers.TICKET):
            await self._follow(ticket, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _follow(self, ticket: str, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._streams.begin(ticket)

        async def passing(message: Message) -> None:
            # Before it is sent: what a reader has is never missing from a cut.
            if message["type"] == "http.response.body":
                stream.feed(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, receive, passing)
        finally:
            self._streams.end(ticket)

    async def _answer(self, request: Request) -> JSONResponse:
        try:
            if not self._tokens.admits(request.headers.get("authorization", "").encode()):
                raise ProtocolError("unauthorized", "send the stack's control token as a bearer token")
            if request.method != "POST":
                raise ProtocolError("invalid_request", "POST an inventory")
            receipt = await self._cutter.cut(await _inventory(request))
        except ProtocolError as refusal:
            return JSONResponse(refusal.body(), refusal.status)
        return JSONResponse(receipt.model_dump(mode="json"))


async def _inventory(request: Request) -> Inventory:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise ProtocolError("invalid_request", "the inventory is too large")
    try:
        return Inventory.model_validate_json(body)
    except ValidationError as error:
        raise ProtocolError("invalid_request", describe(error)[:2000]) from error


def _store() -> ObjectStore:
    where = os.environ.get("GYM_CUT_STORAGE", "").strip()
    if not where:
        raise SettingsError("set GYM_CUT_STORAGE to where checkpoints are kept, as a folder or s3:// URI")
    s3 = os.environ.get("GYM_CUT_S3", "").strip()
    try:
        return open_store(where, S3Settings.model_validate(json.loads(s3)) if s3 else None)
    except (ValueError, StorageError) as error:
        words = describe(error) if isinstance(error, ValidationError) else str(error)
        raise SettingsError(f"GYM_CUT_STORAGE or GYM_CUT_S3 cannot be used: {words}") from error
