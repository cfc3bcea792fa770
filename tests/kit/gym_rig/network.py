"""HTTP without sockets: hosts are ASGI applications in the running event loop, and they can die.

A call that reaches a dying process breaks off; a dead process's own calls never go out. So nothing of a killed
process has an effect any more, although its tasks are still in the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

Asgi = Callable[..., Any]


@dataclass(eq=False)
class Alive:
    """The life of one process: who calls and who is called holds it."""

    died: asyncio.Event = field(default_factory=asyncio.Event)
    handling: set[asyncio.Task[httpx.Response]] = field(default_factory=set)

    def kill(self) -> None:
        self.died.set()
        for task in self.handling:
            task.cancel()


class Network:
    """Hosts by name. `calls` counts the requests that each host has got, by path."""

    def __init__(self) -> None:
        self._hosts: dict[str, tuple[Asgi, Alive]] = {}

    def listen(self, host: str, app: Asgi, alive: Alive) -> None:
        self._hosts[host] = (app, alive)

    def client(self, caller: Alive | None = None, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=self.transport(caller), base_url="http://none", **options)

    def transport(self, caller: Alive | None = None) -> httpx.AsyncBaseTransport:
        return _Transport(self._hosts, caller or Alive())


class _Transport(httpx.AsyncBaseTransport):
    def __init__(self, hosts: dict[str, tuple[Asgi, Alive]], caller: Alive) -> None:
        self._hosts, self._caller = hosts, caller

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._caller.died.is_set():
            await _never()
        app, alive = self._hosts.get(request.url.host, (None, None))
        if app is None or alive is None or alive.died.is_set():
            raise httpx.ConnectError(f"nothing listens at {request.url.host}")
        handler = httpx.ASGITransport(app, raise_app_exceptions=False).handle_async_request(request)
        # A task and a context of its own, as behind a socket: a caller that leaves does not end it, and no context
        # variable of the caller is seen by it.
        task = asyncio.get_running_loop().create_task(handler, context=contextvars.Context())
        alive.handling.add(task)
        task.add_done_callback(alive.handling.discard)
        ended = [asyncio.ensure_future(one.died.wait()) for one in (alive, self._caller)]
        try:
            await asyncio.wait([task, *ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in ended:
                one.cancel()
        if self._caller.died.is_set():
            await _never()
        if alive.died.is_set():
            raise httpx.ReadError(f"{request.url.host} died")
        return task.result()


async def _never() -> None:
    await asyncio.get_running_loop().create_future()
