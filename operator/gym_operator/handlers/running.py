"""Runs the operator until a signal: health first, then the fleet, and the watches that feed it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from gym_operator.effects.cache import Cache
from gym_operator.effects.cluster import cluster_id
from gym_operator.effects.events import Events
from gym_operator.effects.fleet import Fleet
from gym_operator.effects.kube import (
    CHECKPOINTS,
    NODES,
    RESTORES,
    SCHEDULES,
    STACKS,
    ApiKube,
    KubeError,
    NotFound,
    connect,
)
from gym_operator.effects.metrics import Metrics
from gym_operator.effects.services import Services
from gym_operator.effects.transport import pod_client
from gym_operator.handlers.health import serving_health
from gym_operator.handlers.watching import Watching

log = logging.getLogger(__name__)

STORAGE_THREADS: Final = 64
"""Each may wait a minute for a storage that does not answer; other stacks need some meanwhile."""


PATIENCE_SECONDS: Final = 45.0
"""For an API server that is away when the operator starts: less than its liveness probe gives it."""
RETRY_SECONDS: Final = 2.0

T = TypeVar("T")


class StartError(Exception):
    """The operator cannot start; the message says what to change."""


async def operate(
    namespaces: Sequence[str], health_port: int, kubeconfig: str | None, operator_namespace: str
) -> None:
    """Run until SIGTERM or SIGINT. Raises StartError, KubeConfigError."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(STORAGE_THREADS, thread_name_prefix="storage"))
    metrics = Metrics()
    kube = await connect(kubeconfig, metrics.refused)
    http, transport = pod_client()
    try:
        await _check(kube, namespaces)
        cluster = await _identify(kube)
        nodes = not namespaces and await _may_watch_nodes(kube)
        cache, events = Cache(transport), Events(kube, said=metrics.said)
        services = Services(
            kube, cache, events, http, operator_namespace, cluster=cluster, metrics=metrics, watches_nodes=nodes
        )
        watching = Watching(lambda *told: fleet.event(*told), kubeconfig, namespaces, nodes=nodes)
        fleet = Fleet(services, namespaces, watching.reopen)
        metrics.watch(lambda: iter(cache.stacks.values()), fleet.health, fleet.generations)
        async with serving_health(health_port, fleet.health, metrics):
            log.info("watching %s", ", ".join(namespaces) or "all namespaces")
            beside = [asyncio.create_task(fleet.run()), asyncio.create_task(watching.run())]
            told = asyncio.create_task(_told_to_end())
            try:
                await asyncio.wait([told, *beside], return_when=asyncio.FIRST_COMPLETED)
            finally:
                told.cancel()
                await fleet.close()
                for task in beside:
                    task.cancel()
                await asyncio.wait(beside)
            for task in beside:
                if not task.cancelled():
                    task.result()  # neither ends but by a fault of ours: better begun anew than half alive
    except OSError as error:
        raise StartError(f"cannot serve health on port {health_port}: {error.strerror}") from error
    finally:
        await http.aclose()
        await kube.close()


async def _told_to_end() -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    await ended.wait()


async def _check(kube: ApiKube, namespaces: Sequence[str]) -> None:
    """Say at once what would otherwise show as an operator that does nothing."""
    places: Sequence[str | None] = list(namespaces) or [None]
    for resource in (STACKS, CHECKPOINTS, SCHEDULES, RESTORES):
        for namespace in places:
            try:
                await _patiently(partial(kube.try_list, resource, namespace))
            except NotFound as error:
                raise StartError("the CRDs of gymops.dev are not installed: apply the folder crds/ first") from error
            except KubeError as error:
                raise StartError(f"cannot list {resource.plural}: {error}") from error


async def _identify(kube: ApiKube) -> str | None:
    try:
        return await _patiently(partial(cluster_id, kube))
    except KubeError as error:
        raise StartError(f"cannot ask which cluster this is: {error}") from error


async def _may_watch_nodes(kube: ApiKube) -> bool:
    """Whether it can see that a node is cordoned. Without that it moves no cell off a node, and evictions are let
    through, which are deletions like any other."""
    try:
        await _patiently(partial(kube.try_list, NODES, None))
    except KubeError as error:
        if error.status == 403:
            log.info("nodes may not be watched: cells are not moved off a node that is cordoned")
            return False
        raise StartError(f"cannot list nodes: {error}") from error
    return True


async def _patiently(ask: Callable[[], Awaitable[T]]) -> T:
    """The answer of an API server that may be away for a moment, as while a control plane comes up. Raises
    KubeError."""
    give_up = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while True:
        try:
            return await ask()
        except KubeError as error:
            if 0 < error.status < 500 or asyncio.get_running_loop().time() > give_up:
                raise
            log.warning("%s; trying again", error)
        await asyncio.sleep(RETRY_SECONDS)


def run(namespaces: Sequence[str], health_port: int, kubeconfig: str | None, operator_namespace: str) -> None:
    """As `operate`, in a loop of its own."""
    with suppress(asyncio.CancelledError):
        asyncio.run(operate(namespaces, health_port, kubeconfig, operator_namespace))
