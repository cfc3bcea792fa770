"""What the workers of all stacks share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from gym_operator.effects.accesses import Accesses
from gym_operator.effects.cache import Cache
from gym_operator.effects.events import Events
from gym_operator.effects.kube import Kube
from gym_operator.effects.metrics import Metrics


@dataclass(frozen=True)
class Services:
    """Ways to the API server and to the pods, and the clocks. `wall` is Unix time, `monotonic` measures."""

    kube: Kube
    cache: Cache
    events: Events
    http: httpx.AsyncClient
    operator_namespace: str
    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    cluster: str | None = None
    """The cluster's id, None where it may not be read."""
    watches_nodes: bool = False
    """Whether it is told when a node is cordoned."""
    metrics: Metrics = field(default_factory=Metrics)
    accesses: Accesses = field(default_factory=Accesses)
