"""What the engine has really generated, kept where no killed server can write: ASGI middleware for vLLM.

    vllm serve ... --middleware gym_vllm.journal.TokenJournal

Writes one JSON object a line to the file named by `GYM_TOKEN_JOURNAL`: a stream's prompt when it begins, its tokens
as they pass, and its end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_servers.capture.chunks import NoChunk, delta_of

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

JOURNAL = "GYM_TOKEN_JOURNAL"


class TokenJournal:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._path = Path(os.environ[JOURNAL])
        self._count = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/v1/completions":
            await self._app(scope, receive, send)
            return
        self._count += 1
        stream, asked, rest = self._count, b"", b""
        request = dict(scope["headers"]).get(b"x-request-id", b"-").decode()

        async def reading() -> Message:
            nonlocal asked
            message = await receive()
            if message["type"] == "http.request":
                asked += message.get("body", b"")
                if not message.get("more_body"):
                    prompt = json.loads(asked)["prompt"]
                    self._write({"kind": "begin", "stream": stream, "request": request, "prompt": prompt})
            return message

        async def passing(message: Message) -> None:
            nonlocal rest
            if message["type"] == "http.response.body":
                *lines, rest = (rest + message.get("body", b"")).split(b"\n")
                for line in lines:
                    try:
                        delta = delta_of(line.decode())
                    except NoChunk:
                        continue
                    if delta is not None:
                        said = {"ids": list(delta.ids), "finish": delta.finish_reason}
                        self._write({"kind": "tokens", "stream": stream, **said})
            await send(message)

        try:
            await self._app(scope, reading, passing)
        finally:
            self._write({"kind": "end", "stream": stream})

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(entry).encode() + b"\n")


@dataclass
class Generated:
    """One stream: whose it was, what it was given, and what it said. `key` is a capture key, `-` for none; `finish`
    is None where it was broken off."""

    key: str
    position: str
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    ended: bool = False
    finish: str | None = None


def read_journal(path: Path) -> list[Generated]:
    """All streams so far, in the order in which they began."""
    streams: dict[int, Generated] = {}
    text = path.read_text() if path.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        entry = json.loads(line)
        if entry["kind"] == "begin":
            key, _, rest = entry["request"].partition("/")
            streams[entry["stream"]] = Generated(key, rest.partition("/")[0], entry["prompt"])
        elif entry["kind"] == "tokens":
            streams[entry["stream"]].ids += entry["ids"]
            streams[entry["stream"]].finish = entry["finish"]
        elif entry["stream"] in streams:
            streams[entry["stream"]].ended = True
    return list(streams.values())
