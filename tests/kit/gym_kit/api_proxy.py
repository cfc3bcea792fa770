"""A way to an API server that counts what passes, and fails as networks and API servers do.

    with ApiProxy(kubeconfig, folder) as way:
        ... an operator uses way.kubeconfig ...
        way.fault = Fault.AWAY      # connections are cut; None: all is well again
        way.silence()               # watches that are open now deliver nothing any more, and stay open
    reached = way.stop_at(...)  # the next write of a kind is not answered: whoever waits for that may be killed there

It speaks plain HTTP to its user and brings the administrator's certificate itself, so that it sees each request.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeVar

import aiohttp
import yaml
from aiohttp import web

HOP_BY_HOP: Final = {"connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "host"}
LARGEST: Final = 64 * 1024 * 1024
ACCEPTED_TURNS: Final = 4
"""Of the loop, until a connection that was just accepted is one that the server knows, and ends."""
T = TypeVar("T")


class Fault(Enum):
    """AWAY: connections are cut, also those that are open. HUNG: nothing is answered, nothing is refused.
    UNAVAILABLE: 503, as from a load balancer without a server behind it; watches end."""

    AWAY = auto()
    HUNG = auto()
    UNAVAILABLE = auto()


class Call(NamedTuple):
    """Verb as Kubernetes names it, and the plural of the kind, with its subresource."""

    verb: str
    resource: str


class Stop(NamedTuple):
    """A write that is not answered, whether it has landed (`after`) or not."""

    here: Callable[[Call, Mapping[str, Any]], bool]
    after: bool
    reached: threading.Event


def call_of(method: str, path: str, *, watch: bool) -> Call:
    """What a request asks for."""
    parts = path.strip("/").split("/")
    rest = parts[2:] if parts[0] == "api" else parts[3:]
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        rest = rest[2:]
    if not rest or parts[0] not in ("api", "apis"):
        return Call("get", f"/{parts[0]}" if parts[0] not in ("api", "apis") else "discovery")
    resource = f"{rest[0]}/{rest[2]}" if len(rest) > 2 else rest[0]
    if method == "GET":
        return Call("watch" if watch else "get" if len(rest) > 1 else "list", resource)
    return Call({"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method], resource)


class ApiProxy:
    """`calls` counts requests as they come in, `fault` is what happens to them; both may be used in any thread.
    `kubeconfig` is for who goes through it."""

    def __init__(self, upstream: Path, folder: Path) -> None:
        self._upstream = yaml.safe_load(upstream.read_text())
        self.kubeconfig = folder / "through-proxy.kubeconfig"
        self.calls: Counter[Call] = Counter()
        self._fault: Fault | None = None
        self._healed = asyncio.Event()
        self._open: dict[int, web.Request] = {}
        self._watches: dict[web.StreamResponse, asyncio.Event] = {}
        self._stop_at: Stop | None = None
        self._asking: set[asyncio.Future[aiohttp.ClientResponse]] = set()
        self._loop = asyncio.new_event_loop()
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as building:
            thread = threading.Thread(target=self._loop.run_forever, daemon=True)
            thread.start()
            building.callback(self._end_loop, thread)
            runner, port = self._run(self._start())
            building.callback(lambda: self._run(self._stop(runner)))
            cluster = {"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{port}"}}
            context = {"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}
            config = {
                **{"apiVersion": "v1", "kind": "Config", "current-context": "proxy"},
                **{"clusters": [cluster], "contexts": [context], "users": [{"name": "proxy", "user": {}}]},
            }
            self.kubeconfig.write_text(yaml.safe_dump(config))
            self._exit = building.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._exit.close()

    @property
    def fault(self) -> Fault | None:
        return self._fault

    @fault.setter
    def fault(self, fault: Fault | None) -> None:
        self._run(self._set(fault))

    def silence(self) -> int:
        """Let the watches that are open deliver nothing any more; how many they are. Those that are opened later
        work."""
        return self._run(self._silence())

    def tell(self, event: Mapping[str, Any]) -> int:
        """Put an event into the watches that are open; how many they are."""
        return self._run(self._tell(json.dumps(event).encode() + b"\n"))

    def stop_at(self, here: Callable[[Call, Mapping[str, Any]], bool], *, after: bool) -> threading.Event:
        """Set once the next request with a body of which `here` says so is there, or has landed; it is never
        answered."""
        stop = Stop(here, after, threading.Event())
        self._stop_at = stop
        return stop.reached

    # ---- in the loop --------------------------------------------------------------------------------------

    async def _set(self, fault: Fault | None) -> None:
        self._fault = fault
        if fault is None:
            self._healed.set()
            return
        self._healed.clear()
        for request in list(self._open.values()):
            if fault is not Fault.HUNG and request.transport is not None:
                request.transport.abort()

    async def _silence(self) -> int:
        for silent in self._watches.values():
            silent.set()
        return len(self._watches)

    async def _tell(self, line: bytes) -> int:
        for answer in list(self._watches):
            await answer.write(line)
        return len(self._watches)

    async def _start(self) -> tuple[web.AppRunner, int]:
        user, cluster = self._upstream["users"][0]["user"], self._upstream["clusters"][0]["cluster"]
        trust = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        for key in ("client-certificate-data", "client-key-data"):
            file = self.kubeconfig.with_name(key)
            file.touch(mode=0o600)
            file.write_bytes(base64.b64decode(user[key]))
        names = (str(self.kubeconfig.with_name(f"client-{part}-data")) for part in ("certificate", "key"))
        trust.load_cert_chain(*names)
        self._server = cluster["server"]
        connector = aiohttp.TCPConnector(ssl=trust, limit=0, enable_cleanup_closed=True)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        application = web.Application(client_max_size=LARGEST)
        application.router.add_route("*", "/{path:.*}", self._answer)
        options: dict[str, Any] = {"handler_cancellation": True, "shutdown_timeout": 0.1}
        runner = web.AppRunner(application, access_log=None, handle_signals=False, **options)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, int(runner.addresses[0][1])

    async def _stop(self, runner: web.AppRunner) -> None:
        await self._set(None)
        await self._set(Fault.AWAY)  # who is connected still has nothing to wait for
        for site in list(runner.sites):
            await site.stop()
        for _ in range(ACCEPTED_TURNS):
            await asyncio.sleep(0)
        await runner.cleanup()
        await asyncio.gather(*self._asking, return_exceptions=True)
        await self._session.close()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        watch = _watches(request)
        self.calls[_call(request)] += 1
        self._open[id(request)] = request
        try:
            return await self._pass_on(request, watch=watch)
        except ConnectionError:  # who has asked is gone
            return web.Response(status=499)
        finally:
            del self._open[id(request)]

    async def _pass_on(self, request: web.Request, *, watch: bool) -> web.StreamResponse:
        body = await request.read()
        while self._fault is not None:
            if self._fault is Fault.UNAVAILABLE:
                return web.json_response({"kind": "Status", "code": 503, "message": "no server"}, status=503)
            if self._fault is Fault.AWAY:
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError
            await self._healed.wait()
        stop = self._stop_at
        if stop is not None and body and stop.here(_call(request), json.loads(body)):
            self._stop_at = None
            if not stop.after:
                await self._leave_waiting(stop)
        else:
            stop = None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        headers["Accept-Encoding"] = "identity"
        url = f"{self._server}{request.path_qs}"
        async with await self._ask(request.method, url, data=body or None, headers=headers) as found:
            kept = {name: value for name, value in found.headers.items() if name.lower() not in HOP_BY_HOP}
            if not watch:
                whole = await found.read()
                if stop is not None:
                    await self._leave_waiting(stop)
                return await self._whole(whole, found.status, kept)
            answer = web.StreamResponse(status=found.status, headers=kept)
            await answer.prepare(request)
            await self._deliver(found, answer)
            return answer

    async def _leave_waiting(self, stop: Stop) -> None:
        stop.reached.set()
        await asyncio.Event().wait()  # until who waits for it is gone

    async def _ask(self, method: str, url: str, **options: Any) -> aiohttp.ClientResponse:
        """Who is cancelled while a connection is made leaves its socket open (asyncio's TLS): nobody is."""
        asking = asyncio.ensure_future(self._session.request(method, url, **options))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            asking.add_done_callback(_let_go)
            raise

    async def _whole(self, data: bytes, status: int, headers: dict[str, str]) -> web.Response:
        while self._fault is Fault.HUNG:
            await self._healed.wait()  # the answer to what was done already is lost as well
        return web.Response(status=status, headers=headers, body=data)

    async def _deliver(self, found: aiohttp.ClientResponse, answer: web.StreamResponse) -> None:
        silent = asyncio.Event()
        self._watches[answer] = silent
        try:
            async for chunk in found.content.iter_any():
                while self._fault is Fault.HUNG:
                    await self._healed.wait()
                if not silent.is_set():
                    await answer.write(chunk)
            if silent.is_set():
                await asyncio.Event().wait()  # until who waits for it gives up
        finally:
            del self._watches[answer]

    # ---- the loop -----------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def _end_loop(self, thread: threading.Thread) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        thread.join(10)
        with suppress(RuntimeError):
            self._loop.close()


def _watches(request: web.Request) -> bool:
    return request.query.get("watch") in ("1", "true")


def _call(request: web.Request) -> Call:
    return call_of(request.method, request.path, watch=_watches(request))


def _let_go(asked: asyncio.Future[aiohttp.ClientResponse]) -> None:
    """Of an answer that nobody waits for any more."""
    if not asked.cancelled() and asked.exception() is None:
        asked.result().close()
