"""What kopf is for here: reliable watches. Handlers hand on what they are told, and decide nothing.

Only raw events are handled: no finalizer, no annotation and no status is written by the framework, so that a stack
can be deleted while the operator is away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import kopf

from gym_operator.api import names
from gym_operator.effects.kube import PAGE, Resource
from gym_operator.effects.resync import watched
from gym_operator.handlers.login import connection_info

Tell = Callable[[Resource, bool, Mapping[str, Any]], None]


def registry(tell: Tell, kubeconfig: str | None, *, cluster_wide: bool, nodes: bool) -> kopf.OperatorRegistry:
    """The handlers. `tell` is told of each event: kind, whether the object is deleted, the object. `nodes`: they
    may be watched."""
    handlers = kopf.OperatorRegistry()

    @kopf.on.startup(registry=handlers)
    async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        set_up(settings, cluster_wide=cluster_wide)

    @kopf.on.login(registry=handlers, retries=10, backoff=2)
    async def login(**_: Any) -> kopf.ConnectionInfo:
        return await connection_info(kubeconfig)

    for resource, label in watched(nodes=nodes).items():
        _hand_on(resource, label, tell, handlers)
    return handlers


def _hand_on(resource: Resource, label: str, tell: Tell, handlers: kopf.OperatorRegistry) -> None:
    labels = {label: kopf.PRESENT} if label else None

    @kopf.on.event(*resource, id=resource.plural, labels=labels, registry=handlers)
    async def hand_on(event: kopf.RawEvent, **_: Any) -> None:
        tell(resource, event["type"] == "DELETED", event["object"])


class Backoffs:
    """Seconds between tries to reach the API server: soon, then calmly, for ever. An end would end the framework."""

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.5, 1.0, 2.0), itertools.repeat(3.0))


def set_up(settings: kopf.OperatorSettings, *, cluster_wide: bool) -> None:
    """The framework's settings, each with its reason."""
    settings.posting.enabled = False  # our Events say what happened, the framework's say how
    settings.posting.loggers = False
    settings.peering.standalone = True  # one replica, and every write is fenced by its resource version
    settings.watching.server_timeout = 300  # seconds; a watch that ends by itself cannot fall silent for longer
    settings.watching.client_timeout = 360
    settings.watching.connect_timeout = 10
    settings.watching.inactivity_timeout = 70  # seconds; bookmarks come each minute
    settings.watching.reconnect_backoff = 0.1
    settings.watching.chunk_size = PAGE
    settings.watching.label_selectors["v1", "pods"] = names.STACK_LABEL  # other pods are not even sent to us
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = Backoffs()
    settings.queueing.idle_timeout = 0.1  # seconds; meanwhile it holds a task, a queue and the object: thousands
    settings.scanning.disabled = not cluster_wide  # a namespaced role may not list CRDs and namespaces
    settings.process.ultimate_exiting_timeout = None  # it would end the whole process where its own thread hangs
    settings.persistence.finalizer = names.FINALIZER  # none is ever added; should one be, it has our name
    settings.persistence.progress_storage = kopf.AnnotationsProgressStorage(prefix=names.GROUP)
    settings.persistence.diffbase_storage = kopf.AnnotationsDiffBaseStorage(prefix=names.GROUP)
