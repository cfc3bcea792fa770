"""Episodes that a test runs itself, in a cell that nobody else drives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig
from gym_rig.wire import foreign, post, serving
from gym_servers.http.peers import Peers, Reply

TASK = {
    "task_input": {
        "responses_create_params": {"input": "add 5 then add 7 then get the count"},
        "task_data": {"initial_count": 10, "expected_count": 22},
    },
}


def run_body(rollout: str = "x", attempt: int = 0) -> dict[str, Any]:
    return {"episode_id": {"rollout_id": rollout, "attempt": attempt}, "task": TASK}


def running(rig: Rig, rollout: str = "x", attempt: int = 0) -> asyncio.Task[dict[str, Any]]:
    """An episode on its way to its answer."""

    async def go() -> dict[str, Any]:
        answer: dict[str, Any] = (await post(rig, "env", "/run", run_body(rollout, attempt))).json()
        return answer

    return asyncio.create_task(go())


@asynccontextmanager
async def configured(folder: Path, rate: float = 100.0, **config: Any) -> AsyncIterator[Rig]:
    """A cell that only the test drives, whose environment has this `config`; its engine gives `rate` tokens a
    second."""
    servers = [
        {"name": "env", "kind": "environment", "server": "single-agent-turn", "config": config},
        {"name": "policy", "kind": "model", "server": "scripted", "config": {"base_url": "http://engine"}},
        {"name": "agent", "kind": "agent", "server": "simple-agent"},
        {"name": "counter", "kind": "resources", "server": "counter", "config": {"journal": str(folder / "j")}},
    ]
    async with foreign(folder, rate=rate, servers=servers) as rig:
        await serving(rig)
        yield rig


def empty(rig: Rig) -> bool:
    """Nobody holds a session any more."""
    return not any(rig.participant(name).survey().counts["sessions"] for name in ("agent", "counter"))


def tampered(monkeypatch: pytest.MonkeyPatch, change: Callable[[str, str, Reply], Awaitable[Reply]]) -> None:
    """Every answer of a peer passes through `change(name, path, reply)`."""
    original = Peers.post

    async def posted(self: Peers, name: str, path: str, body: Any, **options: Any) -> Reply:
        return await change(name, path, await original(self, name, path, body, **options))

    monkeypatch.setattr(Peers, "post", posted)
