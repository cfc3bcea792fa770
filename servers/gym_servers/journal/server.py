"""A journal server: takes entries from many processes, keeps each once, gives them back in order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response

from gym_servers.http.apps import base_app


def create_app(path: Path) -> FastAPI:
    """Keeps entries in `path`, one JSON object a line."""
    app = base_app("journal", lambda: True)
    path.parent.mkdir(parents=True, exist_ok=True)
    seen = {json.loads(line)["id"] for line in path.read_bytes().splitlines()} if path.exists() else set()
    file = path.open("ab", buffering=0)

    @app.post("/entries")
    async def append(entries: list[dict[str, Any]]) -> dict[str, int]:
        fresh = [entry for entry in entries if entry["id"] not in seen]
        file.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in fresh))
        seen.update(entry["id"] for entry in fresh)
        return {"kept": len(fresh)}

    @app.get("/entries")
    async def entries() -> Response:
        return Response(await asyncio.to_thread(path.read_bytes), media_type="application/jsonl")

    return app
