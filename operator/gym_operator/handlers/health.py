"""The health port: `/healthz` is 200 while passes end and watches tell, 503 and the reason otherwise; `/metrics` is
for Prometheus."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from gym_operator.effects.metrics import CONTENT_TYPE, Metrics


@asynccontextmanager
async def serving_health(port: int, health: Callable[[], Mapping[str, Any]], metrics: Metrics) -> AsyncIterator[None]:
    """Serve both on all addresses. Raises OSError where the port is taken."""

    async def answer(_: web.Request) -> web.Response:
        found = health()
        return web.json_response(found, status=200 if found["ok"] else 503)

    async def numbers(_: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    application = web.Application()
    application.router.add_get("/healthz", answer)
    application.router.add_get("/metrics", numbers)
    runner = web.AppRunner(application, access_log=None, handle_signals=False)
    await runner.setup()
    try:
        await web.TCPSite(runner, "0.0.0.0", port).start()
        yield
    finally:
        await runner.cleanup()
