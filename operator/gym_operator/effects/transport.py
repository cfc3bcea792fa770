"""HTTP to pods that fails at once where a pod is known to have ended.

An address without a pod behind it does not refuse a connection, it swallows it: a request under way would hold up the
recovery until its timeout, although the API server has said long since that the pod is gone.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

import httpx


class PodTransport(httpx.AsyncBaseTransport):
    """Sends requests by `inner`. Addresses are reused, so each is held by one incarnation at a time."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self._holders: dict[str, str] = {}
        self._gone: set[str] = set()
        self._under_way: defaultdict[str, set[asyncio.Task[httpx.Response]]] = defaultdict(set)

    def alive(self, address: str, holder: str) -> None:
        """`holder` answers at this address from now on."""
        self._holders[address] = holder
        self._gone.discard(address)

    def ended(self, address: str, holder: str) -> None:
        """`holder` has ended: requests to its address fail, those under way too."""
        if self._holders.get(address) != holder:
            return
        self._gone.add(address)
        for task in self._under_way.get(address, ()):
            task.cancel()

    def forget(self, address: str, holder: str) -> None:
        """The pod is gone for good; its address means nothing any more."""
        if self._holders.get(address) == holder:
            self.ended(address, holder)
            del self._holders[address]
            self._gone.discard(address)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        address = request.url.host
        if address in self._gone:
            raise httpx.ConnectError("the pod has ended", request=request)
        task = asyncio.ensure_future(self._inner.handle_async_request(request))
        self._under_way[address].add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise  # the caller was cancelled, not the request
            raise httpx.ConnectError("the pod has ended", request=request) from None
        finally:
            self._under_way[address].discard(task)
            if not self._under_way[address]:
                del self._under_way[address]

    async def aclose(self) -> None:
        await self._inner.aclose()


def pod_client() -> tuple[httpx.AsyncClient, PodTransport]:
    """The client for all participants of all stacks, and its transport."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=1000, keepalive_expiry=30.0)
    # Without certificates: control traffic is plain HTTP inside the cluster, and loading a CA bundle takes time.
    transport = PodTransport(httpx.AsyncHTTPTransport(limits=limits, verify=False))
    return httpx.AsyncClient(transport=transport, trust_env=False), transport
