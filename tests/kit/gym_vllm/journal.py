"""What the engine has really generated, kept where no killed server can write: ASGI middleware for vLLM.

    vllm serve ... --middleware gym_vllm.journal.TokenJournal

Writes one JSON object a line to the file named by `GYM_TOKEN_JOURNAL`: a stream's prompt when it begins, its tokens
as they pass, and its end.

It also holds the engine in the middle of a generation: `POST /test-hold?tokens=N&key=K` has it paused, as trainers
pause it, when so many tokens have passed; a POST without tokens takes that back, and `GET /test-hold` says whether it
has come to that. Whoever looks from outside may look too late: an engine is through with a generation while a busy
machine does something else.

`OneBehind`, as the last --middleware, makes sure that there is something on its way.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from gym_servers.capture.chunks import NoChunk, delta_of
from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.identity import parse_key

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

JOURNAL = "GYM_TOKEN_JOURNAL"
HOLD = "/test-hold"
BEHIND = "/test-behind"


class Hold:
    """When the engine is to be held: once, `tokens` after it was told to, or when streams of a `key` have so many in
    all; and in the middle of a generation. Pure."""

    def __init__(self) -> None:
        self.held = False
        self._seen: Counter[str] = Counter()  # under "" of all keys since it was told
        self._armed: tuple[int, str] | None = None

    def told(self, query: Mapping[str, str]) -> None:
        """What it is asked for: `tokens` and maybe a `key`, or nothing more."""
        tokens = query.get("tokens")
        self._armed = (int(tokens), query.get("key", "")) if tokens is not None else None
        self.held, self._seen[""] = False, 0

    def passed(self, key: str, tokens: int, last: bool) -> bool:
        """So many tokens of a stream have passed, `last` if it ends with them; whether it is to be held now."""
        for each in (key, ""):
            self._seen[each] += tokens
        if self._armed is None or last or not tokens:
            return False
        goal, whose = self._armed
        if (whose and whose != key) or self._seen[whose] < goal:
            return False
        self._armed = None
        return True


class TokenJournal:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._path = Path(os.environ[JOURNAL])
        self._count = 0
        self._hold = Hold()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == HOLD:
            await (await self._answer(Request(scope, receive)))(scope, receive, send)
            return
        if scope["type"] != "http" or scope["path"] != "/v1/completions":
            await self._app(scope, receive, send)
            return
        at_first = dict(scope)  # a router adds to it
        self._count += 1
        stream, asked, rest = self._count, b"", b""
        request = dict(scope["headers"]).get(b"x-request-id", b"-").decode()
        key = request.partition("/")[0]

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
                        if self._hold.passed(key, len(delta.ids), delta.finish_reason is not None):
                            await self._pause(at_first)
            await send(message)

        try:
            await self._app(scope, reading, passing)
        finally:
            self._write({"kind": "end", "stream": stream})

    async def _answer(self, request: Request) -> JSONResponse:
        if request.method == "POST":
            self._hold.told(request.query_params)
        return JSONResponse({"held": self._hold.held})

    async def _pause(self, scope: Scope) -> None:
        """By the engine's own route, from inside."""
        path = {"path": "/pause", "raw_path": b"/pause", "query_string": b"mode=keep"}

        async def nothing() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._hold.held = message["status"] == 200

        await self._app({**scope, **path, "headers": []}, nothing, answered)

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps({**entry, "time": time.time()}).encode() + b"\n")


class OneBehind:
    """The way to whoever reads: from `POST /test-behind?streams=1` on the last message of each stream that has not
    ended is still under way, until the next one follows. `streams=0` takes that back."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._on = app, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == BEHIND:
            request = Request(scope, receive)
            self._on = request.query_params["streams"] == "1"
            await JSONResponse({})(scope, receive, send)
            return
        under_way: Message | None = None

        async def passing(message: Message) -> None:
            nonlocal under_way
            if under_way is not None:
                await send(under_way)
                under_way = None
            if self._on and message["type"] == "http.response.body" and message.get("more_body"):
                under_way = message
            else:
                await send(message)

        await self._app(scope, receive, passing)


@dataclass
class Generated:
    """One stream: whose it was, what it was given, and what it said. `key` is a capture key, `-` for none; `finish`
    is None where it was broken off; `times`: when how many tokens passed."""

    key: str
    position: str
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    ended: bool = False
    finish: str | None = None
    times: list[tuple[float, int]] = field(default_factory=list)

    @property
    def but_last_message(self) -> list[int]:
        """What it had said before its last message."""
        return self.ids[: len(self.ids) - self.times[-1][1]] if self.times else []


class Streams:
    """All streams of a journal so far, in the order in which they began. Reads on from where it stood."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._streams: dict[int, Generated] = {}

    def look(self) -> list[Generated]:
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._at += len(whole)
            for line in whole.splitlines():
                self._take(json.loads(line))
        return list(self._streams.values())

    def _take(self, entry: Mapping[str, Any]) -> None:
        if entry["kind"] == "begin":
            key, _, rest = entry["request"].partition("/")
            self._streams[entry["stream"]] = Generated(key, rest.partition("/")[0], entry["prompt"])
            return
        stream = self._streams.get(entry["stream"])
        if stream is None:  # a request that was no JSON
            return
        if entry["kind"] == "tokens":
            stream.ids += entry["ids"]
            stream.times.append((entry["time"], len(entry["ids"])))
            stream.finish = entry["finish"]
        else:
            stream.ended = True


def as_entries(streams: Sequence[Generated]) -> list[dict[str, Any]]:
    """The streams as the scripted engine journals its own: a stream that goes on behind what another one had said is
    of that one's prompt, and begins where it goes on."""
    begun: dict[str, list[tuple[Generated, list[int]]]] = {}  # with the prompt that each began with
    entries = []
    for stream in streams:
        rollout = parse_key(stream.key).rollout_id if stream.key != "-" else stream.key
        known = begun.setdefault(rollout, [])
        first = next((prompt for one, prompt in known if _goes_on(stream, one)), stream.prompt)
        known.append((stream, first))
        at, prompt = len(stream.prompt) - len(first), digest_of(first)
        request = f"{stream.key}/{stream.position}"
        for when, count in stream.times:
            entry = {"kind": "tokens", "request": request, "prompt": prompt, "from": at, "count": count, "time": when}
            entries.append({**entry, "last": False})
            at += count
    return entries


def _goes_on(stream: Generated, other: Generated) -> bool:
    """Whether it was given the other's prompt and some of what that one had said."""
    size = len(other.prompt)
    behind = stream.prompt[size:]
    return stream.prompt[:size] == other.prompt and bool(behind) and other.ids[: len(behind)] == behind
