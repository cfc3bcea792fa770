"""Runs the operator until a signal: health first, then the fleet, then the watches that feed it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final

import kopf

from gym_operator.effects.cache import Cache
from gym_operator.effects.cluster import cluster_id
from gym_operator.effects.events import Events
from gym_operator.effects.fleet import Fleet
from gym_operator.effects.kube import CHECKPOINTS, RESTORES, SCHEDULES, STACKS, ApiKube, KubeError, NotFound, connect
from gym_operator.effects.metrics import Metrics
from gym_operator.effects.services import Services
from gym_operator.effects.transport import pod_client
from gym_operator.handlers.health import serving_health
from gym_operator.handlers.watches import registry

log = logging.getLogger(__name__)

STORAGE_THREADS: Final = 64
"""Each may wait a minute for a storage that does not answer; other stacks need some meanwhile."""


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
        cache, events = Cache(transport), Events(kube, said=metrics.said)
        services = Services(kube, cache, events, http, operator_namespace, cluster=cluster, metrics=metrics)
        fleet = Fleet(services, namespaces)
        metrics.watch(lambda: iter(cache.stacks.values()), fleet.health)
        async with serving_health(health_port, fleet.health, metrics):
            beside = asyncio.create_task(fleet.run())

            async def end() -> None:
                await fleet.close()
                beside.cancel()
                await asyncio.wait([beside])

            handlers = registry(fleet, kubeconfig, end, cluster_wide=not namespaces)
            try:
                log.info("watching %s", ", ".join(namespaces) or "all namespaces")
                await kopf.operator(
                    registry=handlers, standalone=True, clusterwide=not namespaces, namespaces=list(namespaces)
                )
            finally:
                await end()
    except OSError as error:
        raise StartError(f"cannot serve health on port {health_port}: {error.strerror}") from error
    finally:
        await http.aclose()
        await kube.close()


async def _check(kube: ApiKube, namespaces: Sequence[str]) -> None:
    """Say at once what would otherwise show as an operator that does nothing."""
    places: Sequence[str | None] = list(namespaces) or [None]
    for resource in (STACKS, CHECKPOINTS, SCHEDULES, RESTORES):
        for namespace in places:
            try:
                await kube.list_all(resource, namespace)
            except NotFound as error:
                raise StartError("the CRDs of gymops.dev are not installed: apply the folder crds/ first") from error
            except KubeError as error:
                raise StartError(f"cannot list {resource.plural}: {error}") from error


async def _identify(kube: ApiKube) -> str | None:
    try:
        return await cluster_id(kube)
    except KubeError as error:
        raise StartError(f"cannot ask which cluster this is: {error}") from error


def run(namespaces: Sequence[str], health_port: int, kubeconfig: str | None, operator_namespace: str) -> None:
    """As `operate`, in a loop of its own."""
    with suppress(asyncio.CancelledError):
        asyncio.run(operate(namespaces, health_port, kubeconfig, operator_namespace))
