"""The control API as routes: who may call, and HTTP to the control plane and back. Nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from gym_servers.control.plane import ControlPlane
from gym_servers.control.tokens import ControlTokens, only
from gym_servers.http.apps import install_errors
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class BearerOnly:
    """Answers 401 before a body is looked at: whoever has no token learns nothing, not even what would be valid."""

    def __init__(self, app: ASGIApp, tokens: ControlTokens) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("authorization", "").encode() if scope["type"] == "http" else b""
        if scope["type"] == "http" and not self._tokens.admits(given):
            refusal = ProtocolError("unauthorized", "send the stack's control token as a bearer token")
            await JSONResponse(refusal.body(), refusal.status)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def control_app(plane: ControlPlane, tokens: ControlTokens | str) -> FastAPI:
    """The application for the control port. Everything on it needs a bearer token that is good."""
    app = FastAPI(title="ng-control v1", docs_url=None, redoc_url=None)
    install_errors(app)
    app.add_middleware(BearerOnly, tokens=only(tokens) if isinstance(tokens, str) else tokens)
    prefix = m.PREFIX

    @app.get(f"{prefix}/status")
    async def status() -> m.Status:
        return plane.status()

    @app.post(f"{prefix}/prepare")
    async def prepare(body: m.PrepareRequest) -> m.PhaseReply:
        return await plane.prepare(body)

    @app.post(f"{prefix}/renew")
    async def renew(body: m.RenewRequest) -> m.RenewReply:
        return plane.renew(body)

    @app.post(f"{prefix}/commit")
    async def commit(body: m.CommitRequest) -> m.CommitReply:
        return await plane.commit(body)

    @app.post(f"{prefix}/restore")
    async def restore(body: m.RestoreRequest) -> m.RestoreReply:
        return await plane.restore(body)

    @app.post(f"{prefix}/resume")
    async def resume(body: m.ResumeRequest) -> m.PhaseReply:
        return await plane.resume(body)

    @app.post(f"{prefix}/end")
    async def end(body: m.EndRequest) -> m.PhaseReply:
        return plane.end(body)

    @app.post(f"{prefix}/retire")
    async def retire(body: m.RetireRequest) -> m.RetireReply:
        return await plane.retire(body)

    @app.post(f"{prefix}/forget")
    async def forget(body: m.ForgetRequest) -> m.ForgetReply:
        return await plane.forget(body)

    return app
