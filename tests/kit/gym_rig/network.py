"""A fake network: hosts are ASGI applications in the running event loop, and they can die.

A call that reaches a dying process breaks off; a dead process's own calls never go out. So nothing of a killed
process has an effect any more, although its tasks are still in the loop.

A stream of events reaches its reader part by part; an application may learn of a caller that has gone away.

`faults` are what a test wants to go wrong, each for the next so many calls to a host. `latency` is how long a
message is on its way, in seconds of the loop's time; calls overtake each other where one of them is delayed.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from gym_rig.virtual import lives

Asgi = Callable[..., Any]
Kind = Literal["unreachable", "lose request", "lose reply", "break off", "cut reply", "delay", "duplicate"]

BREAK_SECONDS = 0.05  # after which a connection breaks whose request is being worked on


@dataclass(eq=False)
class Alive:
    """The life of one process: who calls and who is called holds it. `name` is for those who look on."""

    name: str = ""
    died: asyncio.Event = field(default_factory=asyncio.Event)
    handling: set[asyncio.Task[httpx.Response]] = field(default_factory=set)
    calls: set[asyncio.Future[str]] = field(default_factory=set)  # that end with it

    def context(self) -> contextvars.Context:
        """Of a task of this process: it sees no context variable of anybody else."""
        context = contextvars.Context()
        context.run(lives.set, lambda: not self.died.is_set())
        return context

    def kill(self) -> None:
        self.died.set()
        for task in self.handling:
            task.cancel()
        for call in self.calls:
            end(call, "a process died")


def end(call: asyncio.Future[str], why: str) -> None:
    """End a call under way."""
    if not call.done():
        call.set_result(why)


@dataclass(eq=False)
class Fault:
    """What happens to the next `calls` calls to `host` (`*`: any) whose path holds `path`.

    unreachable    no connection           lose request   broken before anything was done
    lose reply     broken after the work   break off      broken while the work goes on
    cut reply      half of the body        delay          the request arrives `seconds` later
    duplicate      it arrives again `seconds` later
    """

    kind: Kind
    host: str = "*"
    path: str = ""
    calls: int = 1
    seconds: float = 1.0

    def meets(self, request: httpx.Request) -> bool:
        return self.calls > 0 and self.host in ("*", request.url.host) and self.path in request.url.path


@dataclass(frozen=True)
class Seen:
    """A request as it went over the wire. `caller` is the name of the process that sent it."""

    caller: str
    host: str
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Network:
    """Hosts by name. `on_request` sees every request that is sent, `on_reply` every status that came back whole;
    `may_arrive_late` says whether a copy of a request may still arrive."""

    def __init__(self) -> None:
        self._hosts: dict[str, tuple[Asgi, Alive]] = {}
        self.faults: list[Fault] = []
        self.latency = 0.0
        self.on_request: Callable[[Seen], None] = lambda seen: None
        self.on_reply: Callable[[Seen, int], None] = lambda seen, status: None
        self.harmed = 0  # calls that met a fault
        self.may_arrive_late: Callable[[Seen], bool] = lambda seen: True
        self.under_way: dict[asyncio.Future[str], Seen] = {}
        self.crashes: list[str] = []  # errors that came out of an application: never wanted

    def listen(self, host: str, app: Asgi, alive: Alive) -> None:
        self._hosts[host] = (app, alive)

    def client(self, caller: Alive | None = None, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self.transport(caller), base_url="http://none", **options)

    def transport(self, caller: Alive | None = None) -> httpx.AsyncBaseTransport:
        return _Transport(self, caller or Alive())

    def find(self, host: str) -> tuple[Asgi, Alive]:
        """Raises ConnectError where nobody listens."""
        app, alive = self._hosts.get(host, (None, None))
        if app is None or alive is None or alive.died.is_set():
            raise httpx.ConnectError(f"nothing listens at {host}")
        return app, alive

    def fault(self, request: httpx.Request) -> Fault | None:
        """The fault that this call meets, used up by one."""
        met = next((fault for fault in self.faults if fault.meets(request)), None)
        if met is not None:
            self.harmed += 1
            met.calls -= 1
            if met.calls == 0:
                self.faults.remove(met)
        return met

    def break_off(self, which: int) -> bool:
        """Break one of the calls under way, as its client going away does: what it asked for goes on."""
        calls = list(self.under_way)
        if calls:
            self.harmed += 1
            end(calls[which % len(calls)], "the connection broke")
        return bool(calls)


class _Transport(httpx.AsyncBaseTransport):
    def __init__(self, network: Network, caller: Alive) -> None:
        self._network, self._caller = network, caller

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        network = self._network
        if self._caller.died.is_set():
            await _never()
        body = await request.aread()
        headers = {name: value for name, value in request.headers.items() if name != "content-length"}
        seen = Seen(self._caller.name, request.url.host, request.method, request.url.path, headers, body)
        network.on_request(seen)
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        network.under_way[ended] = seen
        self._caller.calls.add(ended)
        response = None
        try:
            response = await self._send(request, body, seen, ended)
            return response
        finally:
            if response is None or not isinstance(response.stream, _Events):
                self.over(ended)

    def over(self, ended: asyncio.Future[str]) -> None:
        """A call is at its end, or its reader has gone away."""
        del self._network.under_way[ended]
        self._caller.calls.discard(ended)
        end(ended, "it is over")

    async def _send(
        self, request: httpx.Request, body: bytes, seen: Seen, ended: asyncio.Future[str]
    ) -> httpx.Response:
        network, host, loop = self._network, request.url.host, asyncio.get_running_loop()
        fault = network.fault(request)
        kind = fault.kind if fault is not None else None
        seconds = fault.seconds if fault is not None else 0.0
        if kind == "unreachable":
            raise httpx.ConnectError(f"no way to {host}")
        await self._travel(network.latency + (seconds if kind == "delay" else 0.0), ended)
        if kind == "lose request":
            raise httpx.ReadError(f"the request to {host} was lost")
        app, alive = network.find(host)
        sent = _Sent(loop.create_future())
        ended.add_done_callback(lambda _: sent.left.set())
        task = self._handle(app, alive, request, body, sent)
        if kind == "duplicate":
            loop.call_later(seconds, self._again, request, body, seen)
        if kind == "break off":
            loop.call_later(BREAK_SECONDS, end, ended, "the connection broke")
        alive.calls.add(ended)
        try:
            timeout = (request.extensions.get("timeout") or {}).get("read")
            async with asyncio.timeout(timeout):
                await self._until(sent.started, ended)
            if sent.is_events and kind not in ("lose reply", "cut reply"):
                return httpx.Response(
                    sent.status, headers=sent.headers, stream=_Events(self, alive, sent, task, seen, ended)
                )
            await self._until(task, ended)
            await self._travel(network.latency, ended)
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"{host} has not answered") from error
        finally:
            if not sent.is_events or ended.done():
                alive.calls.discard(ended)
        if kind == "lose reply":
            raise httpx.ReadError(f"the reply of {host} was lost")
        response = task.result()
        if kind == "cut reply":
            # Still of the announced length: whoever reads it sees that it ends too early.
            return httpx.Response(response.status_code, headers=response.headers, stream=_Cut(response.content))
        network.on_reply(seen, response.status_code)
        return response

    async def _travel(self, seconds: float, ended: asyncio.Future[str]) -> None:
        if seconds:
            loop = asyncio.get_running_loop()
            arrived: asyncio.Future[None] = loop.create_future()
            timer = loop.call_later(seconds, arrived.set_result, None)
            try:
                await self._until(arrived, ended)
            finally:
                timer.cancel()

    async def _until(self, work: asyncio.Future[Any], ended: asyncio.Future[str], *or_: asyncio.Future[Any]) -> None:
        """Until `work`, or another, is done. Raises ReadError where the call ended before; a dead caller never comes
        back from here."""
        await asyncio.wait([work, ended, *or_], return_when=asyncio.FIRST_COMPLETED)
        if self._caller.died.is_set():
            await _never()
        if ended.done():
            raise httpx.ReadError(ended.result())

    def _again(self, request: httpx.Request, body: bytes, seen: Seen) -> None:
        try:
            app, alive = self._network.find(request.url.host)
        except httpx.ConnectError:
            return
        if self._network.may_arrive_late(seen):
            self._handle(app, alive, request, body, _Sent(asyncio.get_running_loop().create_future()))

    def _handle(
        self, app: Asgi, alive: Alive, request: httpx.Request, body: bytes, sent: _Sent
    ) -> asyncio.Task[httpx.Response]:
        """A task of its own, as behind a socket: a caller that leaves does not end it."""
        work = _answer(app, request, body, sent, self._network.crashes)
        task = asyncio.get_running_loop().create_task(work, context=alive.context())
        alive.handling.add(task)
        task.add_done_callback(alive.handling.discard)
        return task


async def _answer(app: Asgi, request: httpx.Request, body: bytes, sent: _Sent, crashes: list[str]) -> httpx.Response:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.split(b"?")[0],
        "query_string": request.url.query,
        "server": (request.url.host, request.url.port),
        "client": ("127.0.0.1", 123),
        "root_path": "",
    }
    given = False

    async def receive() -> dict[str, Any]:
        nonlocal given
        if given:
            await sent.left.wait()
            return {"type": "http.disconnect"}
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            sent.status, sent.headers = message["status"], list(message.get("headers", []))
            if not sent.started.done():
                sent.started.set_result(None)
        elif message["type"] == "http.response.body":
            sent.parts.append(message.get("body", b""))
            sent.more.set()

    try:
        await app(scope, receive, send)
    except Exception as error:
        # It has answered with 500, or not at all: then that is the answer.
        crashes.append(f"{request.url.host}{request.url.path}: {type(error).__name__}: {error}")
    if not sent.started.done():
        sent.started.set_result(None)
    return httpx.Response(sent.status, headers=sent.headers, content=b"".join(sent.parts))


@dataclass(eq=False)
class _Sent:
    """What an application has sent so far of one reply. `left`: its caller has gone away, or has it all."""

    started: asyncio.Future[None]
    status: int = 500
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)
    more: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_events(self) -> bool:
        return any(name.lower() == b"content-type" and b"event-stream" in value for name, value in self.headers)


class _Events(httpx.AsyncByteStream):
    """A stream of events on its way: each part when it was sent and has travelled."""

    def __init__(
        self,
        transport: _Transport,
        alive: Alive,
        sent: _Sent,
        task: asyncio.Task[httpx.Response],
        seen: Seen,
        ended: asyncio.Future[str],
    ) -> None:
        self._transport, self._alive, self._sent, self._task = transport, alive, sent, task
        self._seen, self._ended, self._closed = seen, ended, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        network, read = self._transport._network, 0
        while True:
            self._sent.more.clear()
            if read < len(self._sent.parts):
                await self._transport._travel(network.latency, self._ended)
                yield self._sent.parts[read]
                read += 1
                continue
            if self._task.done():
                break
            more = asyncio.ensure_future(self._sent.more.wait())
            try:
                await self._transport._until(more, self._ended, self._task)
            finally:
                more.cancel()
        network.on_reply(self._seen, self._sent.status)

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            self._alive.calls.discard(self._ended)
            self._transport.over(self._ended)


class _Cut(httpx.AsyncByteStream):
    def __init__(self, content: bytes) -> None:
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._content[: len(self._content) // 2]
        raise httpx.ReadError("the reply was cut short")


async def _never() -> None:
    await asyncio.get_running_loop().create_future()
