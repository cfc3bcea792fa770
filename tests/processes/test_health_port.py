"""The operator's one open port: health for the kubelet, numbers for Prometheus."""

from __future__ import annotations

import aiohttp
import pytest

from gym_kit.ports import free_ports
from gym_operator.effects.metrics import Metrics
from gym_operator.handlers.health import serving_health


@pytest.mark.parametrize("ok", [True, False])
async def test_it_has_health_and_numbers(ok: bool) -> None:
    (port,) = free_ports(1)
    found = {"ok": ok, "stacks": 0, "stuck": [], "silentWatches": []}
    metrics = Metrics()
    metrics.watch(lambda: iter(()), lambda: found, lambda: iter(()))
    async with serving_health(port, lambda: found, metrics), aiohttp.ClientSession() as client:
        async with client.get(f"http://127.0.0.1:{port}/healthz") as healthz:
            assert (healthz.status, await healthz.json()) == (200 if ok else 503, found)
        async with client.get(f"http://127.0.0.1:{port}/metrics") as numbers:
            assert (numbers.status, numbers.content_type) == (200, "text/plain")
            assert "gym_operator_stuck_stacks 0.0" in await numbers.text()
