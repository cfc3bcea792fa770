"""Runs the framework in a thread and a loop of its own, again and again.

It takes every task of its loop for its own and cancels them all when it ends, and it ends on answers of an API server
that pass, such as an error inside of a watch. Nothing that is under way for a stack may end with it; and watches that
have fallen silent are opened anew by ending it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import kopf

from gym_operator.effects.kube import Resource
from gym_operator.handlers.watches import registry

log = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 2.0
"""After the framework has ended by itself."""
END_SECONDS: Final = 15.0
"""It waits for what it takes to hang; longer, and it is left alone: what it tells is not listened to any more."""

LAST_SECONDS: Final = 3.0
"""As above, where the operator itself ends: what is under way for a stack was brought to its end before."""


class Watching:
    """`run` watches until it is cancelled; `tell` is called in the loop of `run`. `nodes`: of those too."""

    def __init__(
        self,
        tell: Callable[[Resource, bool, Mapping[str, Any]], None],
        kubeconfig: str | None,
        namespaces: Sequence[str],
        *,
        nodes: bool = False,
    ) -> None:
        self._tell, self._kubeconfig, self._namespaces = tell, kubeconfig, list(namespaces)
        self._nodes = nodes
        self._stop: concurrent.futures.Future[None] | None = None

    def reopen(self) -> None:
        """Open all watches anew."""
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(None)

    async def run(self) -> None:
        """Never ends by itself."""
        while True:
            if await self._round():
                await asyncio.sleep(PAUSE_SECONDS)

    async def _round(self) -> bool:
        """Run the framework once; whether it has ended without being asked to."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        stop = self._stop = concurrent.futures.Future()

        def tell(resource: Resource, deleted: bool, body: Mapping[str, Any]) -> None:
            if not stop.done():
                loop.call_soon_threadsafe(self._tell, resource, deleted, body)

        def work() -> None:
            try:
                handlers = registry(tell, self._kubeconfig, cluster_wide=not self._namespaces, nodes=self._nodes)
                asyncio.run(self._operate(handlers, stop))
            except BaseException as error:
                log.warning("the watches have ended (%s: %s); they are opened anew", type(error).__name__, error)
            finally:
                with suppress(RuntimeError):  # the operator has ended meanwhile
                    loop.call_soon_threadsafe(ended.set)

        # A daemon: a framework that hangs does not keep the process from ending.
        threading.Thread(target=work, name="watches", daemon=True).start()
        waited, asked = asyncio.create_task(ended.wait()), asyncio.create_task(_raised(stop))
        try:
            await asyncio.wait([asked, waited], return_when=asyncio.FIRST_COMPLETED)
            by_itself = not stop.done()
            await asyncio.wait([waited], timeout=END_SECONDS)
            return by_itself
        finally:
            self.reopen()  # whoever is broken off is not told of anything any more
            await asyncio.wait([waited], timeout=LAST_SECONDS)
            for task in (waited, asked):
                task.cancel()

    async def _operate(self, handlers: kopf.OperatorRegistry, stop: concurrent.futures.Future[None]) -> None:
        loop, flag = asyncio.get_running_loop(), asyncio.Event()

        def raise_flag(_: concurrent.futures.Future[None]) -> None:
            with suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(flag.set)

        stop.add_done_callback(raise_flag)
        await kopf.operator(
            registry=handlers,
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=flag,
            memo=(),  # it keeps a copy for every object there is, and nobody reads it
        )


async def _raised(stop: concurrent.futures.Future[None]) -> None:
    await asyncio.wrap_future(stop)
