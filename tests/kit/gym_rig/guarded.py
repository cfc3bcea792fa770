"""An engine with our middleware before it, and a cell that uses both."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from gym_rig.cell import TOKEN, Rig, cell
from gym_rig.network import Alive
from gym_servers.capture.inventory import PATH
from gym_servers.control.tokens import only
from gym_servers.engine.app import create_app as engine_app
from gym_servers.engine.rows import counter_rows
from gym_servers.protocol import headers
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import StorageError
from gym_servers.worker.middleware import GenerationCut

RATE = 20.0
CELL = "rig-uid/cell-0"
BEARER = {"authorization": f"Bearer {TOKEN}"}


class FaultyStore(DirectoryStore):
    """A disk that is full while `full`, and keeps what `spoil` makes of data; nothing where that is None."""

    full = False
    spoil: Callable[[bytes], bytes | None] = staticmethod(lambda data: data)

    def create(self, key: str, data: bytes) -> None:
        if self.full:
            raise StorageError("no space left")
        kept = self.spoil(data)
        if kept is not None:
            super().create(key, kept)


class Guarded:
    """An engine behind the middleware."""

    def __init__(self, rig: Rig) -> None:
        alive = Alive("engine")
        self.store = FaultyStore(rig.folder / "checkpoints")
        inner = engine_app(RATE, rig.journal_file.of(alive))
        self.app = GenerationCut(inner, self.store, only(TOKEN))
        rig.network.listen("engine", self.app, alive)
        self.rig = rig

    async def ask(self, ticket: str, words: str = "add 5", **extra: str) -> httpx.Response:
        prompt = list(json.dumps([{"role": "user", "content": words}]).encode() + b"\n")
        async with self.rig.network.client(timeout=None) as client:
            return await client.post(
                "http://engine/v1/completions", json={"prompt": prompt}, headers={headers.TICKET: ticket, **extra}
            )

    async def say(self, path: str, body: Any, extra: Mapping[str, str] = BEARER) -> httpx.Response:
        async with self.rig.network.client(timeout=None) as client:
            return await client.post(f"http://engine{path}", json=body, headers=dict(extra))

    def generated(self, ticket: str) -> int:
        """Tokens that have passed of a stream."""
        stream = self.app._streams.find(ticket)
        return len(stream.frozen().ids) if stream is not None else 0

    async def cut(self, body: Any, extra: dict[str, str] = BEARER, method: str = "POST") -> httpx.Response:
        async with self.rig.network.client(timeout=None) as client:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            return await client.request(method, f"http://engine{PATH}", content=content, headers=extra)


@asynccontextmanager
async def guarded(tmp_path: Path, **spec: Any) -> AsyncIterator[tuple[Rig, Guarded]]:
    config = {"base_url": "http://engine", "cut_at_engine": True}
    servers = [
        {"name": "env", "kind": "environment", "server": "single-agent-turn"},
        {"name": "policy", "kind": "model", "server": "scripted", "config": config},
        {"name": "agent", "kind": "agent", "server": "simple-agent"},
        {
            "name": "counter",
            "kind": "resources",
            "server": "counter",
            "config": {"journal": str(tmp_path / "journal.jsonl")},
        },
    ]
    async with cell(tmp_path, counter_rows(3, 1), rate=RATE, servers=servers, **spec) as rig:
        yield rig, Guarded(rig)
