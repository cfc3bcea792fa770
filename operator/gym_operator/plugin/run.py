"""Runs a verb: gives it the cluster and the screen, and turns its end into an exit code."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NoReturn

from gym_operator.plugin.cluster import Cluster, connected
from gym_operator.plugin.exits import Unusable
from gym_operator.plugin.screen import Screen
from gym_operator.plugin.sources import Source, by_name, by_place
from gym_operator.plugin.views.places import is_place, s3_of
from gym_servers.local.children import Told, until_told

SIGNALLED = 128

InCluster = Callable[[Cluster, Screen], Awaitable[None]]
OfSources = Callable[[Screen, Sequence[Source]], Awaitable[None]]


def in_cluster(kubeconfig: Path | None, context: str | None, namespace: str | None, verb: InCluster) -> None:
    """Do what needs a cluster. Raises what the verb raises."""

    async def work() -> None:
        async with connected(str(kubeconfig) if kubeconfig else None, context, namespace) as cluster:
            await verb(cluster, Screen())

    alone(work)


def with_sources(
    kubeconfig: Path | None,
    context: str | None,
    namespace: str | None,
    wanted: str,
    digest: str | None,
    bucket: tuple[str | None, str | None, str],
    verb: OfSources,
) -> None:
    """Do what reads a checkpoint. `wanted`: the name of a GymCheckpoint, or a place, which needs no cluster.
    `bucket`: endpoint, region and addressing style of a place. Raises what the verb raises, and Unusable."""
    if is_place(wanted):
        sources = by_place(wanted, digest, s3_of(wanted, *bucket))
        alone(lambda: verb(Screen(), sources))
        return
    if digest is not None:
        raise Unusable("--digest is for a URI: leave it out, a GymCheckpoint knows its own")

    async def named(cluster: Cluster, screen: Screen) -> None:
        await verb(screen, await by_name(cluster, wanted))

    in_cluster(kubeconfig, context, namespace, named)


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
