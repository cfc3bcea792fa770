"""Runs a verb: gives it the cluster and the screen, and turns its end into an exit code."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from gym_operator.plugin.cluster import Cluster, connected
from gym_operator.plugin.screen import Screen
from gym_servers.local.children import Told, until_told

SIGNALLED = 128

InCluster = Callable[[Cluster, Screen], Awaitable[None]]


def in_cluster(kubeconfig: Path | None, context: str | None, namespace: str | None, verb: InCluster) -> None:
    """Do what needs a cluster. Raises what the verb raises."""

    async def work() -> None:
        async with connected(str(kubeconfig) if kubeconfig else None, context, namespace) as cluster:
            await verb(cluster, Screen())

    alone(work)


def alone(work: Callable[[], Awaitable[None]]) -> None:
    """Do what needs none. A signal cancels it, and once it has cleaned up after itself the process ends with 128 and
    the signal's number."""

    async def doing() -> None:
        await work()

    async def run() -> None:
        try:
            await until_told(doing())
        except Told as told:
            _end(SIGNALLED + told.number)

    asyncio.run(run())


def _end(code: int) -> NoReturn:
    """At once: a thread may be reading from a storage that does not answer, and nobody wants its answer any more."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    atexit._run_exitfuncs()
    os._exit(code)
