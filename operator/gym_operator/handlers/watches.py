"""What kopf is for here: reliable watches. Handlers put what they are told into the fleet, and decide nothing.

Only raw events are handled: no finalizer, no annotation and no status is written by the framework, so that a stack
can be deleted while the operator is away.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from gym_operator.api import names
from gym_operator.effects.fleet import Fleet
from gym_operator.handlers.login import connection_info


def registry(
    fleet: Fleet, kubeconfig: str | None, end: Callable[[], Awaitable[None]], *, cluster_wide: bool
) -> kopf.OperatorRegistry:
    """The handlers, bound to a fleet. `end` ends its work; it may be called again after it."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.startup(registry=handlers)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        set_up(settings, cluster_wide=cluster_wide)

    @kopf.on.login(registry=handlers, retries=10, backoff=2)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection_info(kubeconfig)

    @kopf.on.cleanup(registry=handlers)
    async def clean_up(**_: Any) -> None:
        # Ours to end before the framework looks: it waits five seconds for any task it does not know.
        await end()

    @kopf.on.event(names.GROUP, names.VERSION, names.STACK_PLURAL, registry=handlers)
    async def stack(event: kopf.RawEvent, **_: Any) -> None:
        fleet.stack_event(event["type"] == "DELETED", event["object"])

    @kopf.on.event(names.GROUP, names.VERSION, names.CHECKPOINT_PLURAL, registry=handlers)
    async def checkpoint(event: kopf.RawEvent, **_: Any) -> None:
        fleet.checkpoint_event(event["type"] == "DELETED", event["object"])

    @kopf.on.event(names.GROUP, names.VERSION, names.SCHEDULE_PLURAL, registry=handlers)
    async def schedule(event: kopf.RawEvent, **_: Any) -> None:
        fleet.schedule_event(event["type"] == "DELETED", event["object"])

    @kopf.on.event(names.GROUP, names.VERSION, names.RESTORE_PLURAL, registry=handlers)
    async def restore(event: kopf.RawEvent, **_: Any) -> None:
        fleet.restore_event(event["type"] == "DELETED", event["object"])

    @kopf.on.event("", "v1", "pods", labels={names.STACK_LABEL: kopf.PRESENT}, registry=handlers)
    async def pod(event: kopf.RawEvent, **_: Any) -> None:
        fleet.pod_event(event["type"] == "DELETED", event["object"])

    return handlers


def set_up(settings: kopf.OperatorSettings, *, cluster_wide: bool) -> None:
    """The framework's settings, each with its reason."""
    settings.posting.enabled = False  # our Events say what happened, the framework's say how
    settings.posting.loggers = False
    settings.peering.standalone = True  # one replica, and every write is fenced by its resource version
    settings.watching.server_timeout = 300  # seconds; a watch that ends by itself cannot fall silent for longer
    settings.watching.client_timeout = 360
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 0.1
    settings.watching.label_selectors["v1", "pods"] = names.STACK_LABEL  # other pods are not even sent to us
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.scanning.disabled = not cluster_wide  # a namespaced role may not list CRDs and namespaces
    settings.process.ultimate_exiting_timeout = 30  # as long as a pod has to end
    settings.persistence.finalizer = names.FINALIZER  # none is ever added; should one be, it has our name
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=names.GROUP)
