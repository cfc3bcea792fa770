"""The FastAPI application every server starts from: health routes, the episode in the path, errors as JSON."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from gym_servers.http.episode_path import EpisodePathMiddleware
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.strict_json import read_json

log = logging.getLogger("gym_servers")


def base_app(title: str, ready: Callable[[], bool]) -> FastAPI:
    """An application with the ecosystem's health routes; `/readyz` is 503 until `ready()`."""
    app = FastAPI(title=title, docs_url=None, redoc_url=None)
    install_errors(app)
    app.add_middleware(EpisodePathMiddleware)

    async def alive() -> dict[str, str]:
        return {"status": "ok"}

    for path in ("/livez", "/healthz", "/health", "/"):
        app.add_api_route(path, alive, methods=["GET"], include_in_schema=False)

    @app.get("/readyz", include_in_schema=False)
    async def readyz() -> JSONResponse:
        return JSONResponse({"ready": ready()}, 200 if ready() else 503)

    return app


def install_errors(app: FastAPI) -> None:
    """Every error is JSON with a reason; a fault of ours is logged here and never shown to a caller."""

    @app.exception_handler(ProtocolError)
    async def refused(_: Request, error: ProtocolError) -> JSONResponse:
        return JSONResponse(error.body(), error.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        # Never the input itself: it may hold a trajectory or a credential.
        detail = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return JSONResponse(ProtocolError("invalid_request", detail[:2000]).body(), 422)

    @app.exception_handler(RecursionError)
    async def too_deep(_: Request, error: RecursionError) -> JSONResponse:
        refusal = ProtocolError("invalid_request", "the body is nested too deeply")
        return JSONResponse(refusal.body(), refusal.status)

    @app.exception_handler(Exception)
    async def fault(request: Request, error: Exception) -> JSONResponse:
        log.error("fault in %s %s", request.method, request.url.path, exc_info=error)
        return JSONResponse({"error": {"code": "internal", "detail": "see the server's log"}}, 500)


async def json_object(request: Request) -> dict[str, Any]:
    """The body of a request that has no fixed form. Raises `invalid_request` where it is not a JSON object, or holds
    what could not be passed on."""
    try:
        body = read_json(await request.body())
    except ValueError as error:
        raise ProtocolError("invalid_request", f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ProtocolError("invalid_request", "the body is not a JSON object")
    return body
