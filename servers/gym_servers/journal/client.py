"""Writing journal entries: to a journal server, to a file, or nowhere.

An entry is durable when `append` returns. Each has an id, so that a retry after a lost reply is kept once.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

RETRY_SECONDS = 0.2
Entry = Mapping[str, Any]


class Journal(Protocol):
    async def append(self, entries: Sequence[Entry]) -> None:
        """Keep the entries, in order; returns when they are kept."""


class NoJournal:
    async def append(self, entries: Sequence[Entry]) -> None:
        return None


class FileJournal:
    """Appends whole lines to a file; several processes may share it."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    async def append(self, entries: Sequence[Entry]) -> None:
        # Unbuffered: one write call per batch, so that lines of several writers do not mix.
        with self._path.open("ab", buffering=0) as file:
            file.write(b"".join(json.dumps(_with_id(e)).encode() + b"\n" for e in entries))


class HttpJournal:
    """Posts to a journal server and retries until it has the entries.

    Appends that come while a post is under way go together in the next one: many writers cost few requests.
    """

    def __init__(self, url: str) -> None:
        import httpx

        self._url = url.rstrip("/") + "/entries"
        self._client = httpx.AsyncClient(timeout=10.0, trust_env=False)
        self._errors = (httpx.TransportError, httpx.HTTPStatusError)
        self._waiting: list[tuple[list[dict[str, Any]], asyncio.Future[None]]] = []
        self._poster: asyncio.Task[None] | None = None

    async def append(self, entries: Sequence[Entry]) -> None:
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(([_with_id(entry) for entry in entries], kept))
        if self._poster is None:
            self._poster = asyncio.create_task(self._post_all())
        await kept

    async def _post_all(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            await self._post([entry for entries, _ in batch for entry in entries])
            for _, kept in batch:
                if not kept.done():
                    kept.set_result(None)
        self._poster = None

    async def _post(self, body: list[dict[str, Any]]) -> None:
        while True:
            try:
                (await self._client.post(self._url, json=body)).raise_for_status()
                return
            except self._errors:
                await asyncio.sleep(RETRY_SECONDS)


def _with_id(entry: Entry) -> dict[str, Any]:
    """`time` is Unix seconds where the entry was made."""
    return {"id": uuid.uuid4().hex, "time": time.time(), **entry}


def open_journal(target: str | None) -> Journal:
    """A journal from a URL, a file path, or None for none."""
    if not target:
        return NoJournal()
    return HttpJournal(target) if target.startswith("http") else FileJournal(Path(target))
