"""The control API as routes: who may call, and HTTP to the control plane and back. Nothing else."""

from __future__ import annotations

import hmac

from fastapi import Depends, FastAPI, Request

from gym_servers.control.plane import ControlPlane
from gym_servers.http.apps import install_errors
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError


def control_app(plane: ControlPlane, token: str) -> FastAPI:
    """The application for the control port. Every route needs the bearer token."""
    app = FastAPI(title="ng-control v1", docs_url=None, redoc_url=None)
    install_errors(app)
    expected = f"Bearer {token}".encode()

    async def authorized(request: Request) -> None:
        given = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, expected):
            raise ProtocolError("unauthorized", "send the stack's control token as a bearer token")

    guard = [Depends(authorized)]
    prefix = m.PREFIX

    @app.get(f"{prefix}/status", dependencies=guard)
    async def status() -> m.Status:
        return plane.status()

    @app.post(f"{prefix}/prepare", dependencies=guard)
    async def prepare(body: m.PrepareRequest) -> m.PhaseReply:
        return await plane.prepare(body)

    @app.post(f"{prefix}/renew", dependencies=guard)
    async def renew(body: m.RenewRequest) -> m.RenewReply:
        return plane.renew(body)

    @app.post(f"{prefix}/commit", dependencies=guard)
    async def commit(body: m.CommitRequest) -> m.CommitReply:
        return await plane.commit(body)

    @app.post(f"{prefix}/restore", dependencies=guard)
    async def restore(body: m.RestoreRequest) -> m.RestoreReply:
        return await plane.restore(body)

    @app.post(f"{prefix}/resume", dependencies=guard)
    async def resume(body: m.ResumeRequest) -> m.PhaseReply:
        return await plane.resume(body)

    @app.post(f"{prefix}/retire", dependencies=guard)
    async def retire(body: m.RetireRequest) -> m.RetireReply:
        return await plane.retire(body)

    @app.post(f"{prefix}/forget", dependencies=guard)
    async def forget(body: m.ForgetRequest) -> m.ForgetReply:
        return await plane.forget(body)

    return app
