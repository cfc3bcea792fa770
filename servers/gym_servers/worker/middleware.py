"""ASGI middleware for an engine's API server: `vllm serve --middleware gym_servers.worker.middleware.GenerationCut`.

It follows the tokens of every stream that carries a ticket, and answers

    POST /ng-control/v1/generation-cut     an inventory: freezes the tokens of its calls
    POST /ng-control/v1/engine-attempt     {"folder", "attempt"}: stops what is of a lower attempt of that cell
    GET, POST /ng-control/v1/weight-version    {"version"}: of the weights, for what is generated from now on

all but the GET with the stack's control token. The engine makes the middleware, so its settings come from the
environment: `GYM_CUT_STORAGE`, where checkpoints are kept (a folder, or s3://bucket/prefix; `GYM_CUT_S3` is how the
bucket is reached, as JSON), and the control token as `GYM_CONTROL_TOKEN`, or in the file that
`GYM_CONTROL_TOKEN_FILE` names. All this is in one process's memory: one API server process.
"""

from __future__ import annotations

import json
import os
import uuid
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse

from gym_servers.capture.inventory import ATTEMPT_PATH, PATH, VERSION_PATH, EngineAttempt, Inventory, WeightVersion
from gym_servers.control.tokens import ControlTokens, tokens_of_process
from gym_servers.protocol import headers
from gym_servers.protocol.errors import ProtocolError
from gym_servers.stack.settings import S3Settings, SettingsError, describe
from gym_servers.storage.locate import open_store
from gym_servers.storage.store import ObjectStore, StorageError
from gym_servers.worker.attempts import Attempts, Caller, caller_of, until
from gym_servers.worker.cut import Cutter
from gym_servers.worker.streams import Streams
from gym_servers.worker.weights import TOLD_BY, Telling, Weights

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

T = TypeVar("T", bound=BaseModel)

LARGEST_BODY = 32 * 1024 * 1024
OWN_PATHS = (PATH, ATTEMPT_PATH, VERSION_PATH)


class GenerationCut:
    """Raises SettingsError at start-up where a setting is missing or cannot be used."""

    def __init__(self, app: ASGIApp, store: ObjectStore | None = None, tokens: ControlTokens | None = None) -> None:
        self._app = app
        self._streams, self._attempts, self._weights = Streams(), Attempts(), Weights()
        self._tokens = tokens or tokens_of_process()
        self._cutter = Cutter(self._streams, store or _store(), f"{os.getpid()}-{uuid.uuid4().hex[:12]}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] in OWN_PATHS:
            await (await self._answer(Request(scope, receive)))(scope, receive, send)
        elif scope["path"] in TOLD_BY and scope["method"] == "POST":
            await self._overhear(scope, receive, send)
        elif ticket := Headers(scope=scope).get(headers.TICKET):
            await self._fenced(ticket, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _fenced(self, ticket: str, scope: Scope, receive: Receive, send: Send) -> None:
        named = Headers(scope=scope).get(headers.ENGINE_ATTEMPT)
        if named is None:
            await self._follow(ticket, scope, receive, send)
            return
        try:
            stop = self._attempts.begin(caller_of(named))
        except ProtocolError as refusal:
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)
            return
        try:
            await self._follow(ticket, scope, until(stop, receive), send)
        finally:
            self._attempts.end(stop)

    async def _follow(self, ticket: str, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._streams.begin(ticket)
        telling = Telling(self._weights, send)

        async def passing(message: Message) -> None:
            # Before it is sent: what a reader has is never missing from a cut.
            if message["type"] == "http.response.body":
                stream.feed(message.get("body", b""), self._weights.version)
            await telling(message)

        try:
            await self._app(scope, receive, passing)
        finally:
            self._streams.end(ticket, stream)

    async def _overhear(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request of the engine's own that may name a version: it counts once it has succeeded."""
        asked = b""

        async def reading() -> Message:
            nonlocal asked
            message = await receive()
            if message["type"] == "http.request" and len(asked) <= LARGEST_BODY:
                asked += message.get("body", b"")
            return message

        async def passing(message: Message) -> None:
            # Before the answer is sent: whoever has it may go on at once.
            if message["type"] == "http.response.start" and message["status"] < 300:
                self._weights.take_from(scope["path"], asked)
            await send(message)

        await self._app(scope, reading, passing)

    async def _answer(self, request: Request) -> JSONResponse:
        path = request.url.path
        try:
            if path == VERSION_PATH and request.method == "GET":
                return JSONResponse({"version": self._weights.version})
            if not self._tokens.admits(request.headers.get("authorization", "").encode()):
                raise ProtocolError("unauthorized", "send the stack's control token as a bearer token")
            if request.method != "POST":
                raise ProtocolError("invalid_request", "POST a JSON object")
            return JSONResponse(await self._said(path, request))
        except ProtocolError as refusal:
            return JSONResponse(refusal.body(), refusal.status)

    async def _said(self, path: str, request: Request) -> dict[str, Any]:
        if path == ATTEMPT_PATH:
            attempt = await _read(request, EngineAttempt)
            return {"stopped": self._attempts.raise_to(Caller(attempt.folder, attempt.attempt))}
        if path == VERSION_PATH:
            said = await _read(request, WeightVersion)
            self._weights.take(said.version)
            return {"version": said.version}
        receipt = await self._cutter.cut(await _read(request, Inventory))
        return receipt.model_dump(mode="json")


async def _read(request: Request, kind: type[T]) -> T:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise ProtocolError("invalid_request", "the body is too large")
    try:
        return kind.model_validate_json(body)
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
