"""Calls to a rig's servers as a client makes them, and what they answered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from gym_rig.cell import Rig, cell
from gym_servers.engine.rows import counter_rows


async def post(
    rig: Rig, server: str, path: str, body: Any, *, jar: Mapping[str, str] | None = None, **extra: str
) -> httpx.Response:
    sent = dict(extra)
    if jar:
        sent["cookie"] = "; ".join(f"{name}={value}" for name, value in jar.items())
    async with rig.network.client(timeout=None) as client:  # a rollout takes as long as it takes
        return await client.post(f"http://{server}{path}", json=body, headers=sent)


async def ok(rig: Rig, server: str, path: str, body: Any, **options: Any) -> tuple[Any, dict[str, str]]:
    response = await post(rig, server, path, body, **options)
    assert response.is_success, response.text
    return response.json(), dict(response.cookies)


def code(response: httpx.Response) -> str:
    return str(response.json()["error"]["code"])


async def serving(rig: Rig) -> None:
    await rig.until(rig.running)


def foreign(tmp_path: Path, **spec: Any) -> Any:
    """A cell that nobody drives but the test."""
    return cell(tmp_path, counter_rows(1, 1), collection=None, **spec)
