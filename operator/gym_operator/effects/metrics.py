"""What the operator counts for Prometheus: a few numbers, each worth an alert or a panel.

What stands in a status is read from the cache when somebody asks; only what passes is counted as it happens.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gym_operator.api import names
from gym_operator.api.conditions import ConditionType
from gym_operator.api.event_reasons import Afterwards
from gym_operator.api.objects import parse_time
from gym_operator.effects.cache import Key
from gym_operator.rules.generations import Series
from gym_servers.capture.reasons import TOKENS

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
RECOVERING: Final = "Recovering"
"""The reason of the Event that says that a cell's processes are being replaced."""
EXPECTED: Final = frozenset({404, 409, 410})
"""Answers of the API server that are part of the work: not there yet, changed meanwhile, too long ago."""
BUCKETS: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
AT_REST: Final = frozenset({"Completed", "Stopped", "Suspended"})
"""Phases in which no checkpoint is missed, however old the newest is."""
SHOWN: Final = (ConditionType.READY, ConditionType.STORAGE_READY, ConditionType.RECOVERING, ConditionType.STALLED)

Stacks = Callable[[], Iterator[Mapping[str, Any]]]
Counts = Callable[[], Iterator[tuple[Key, Mapping[Series, int]]]]


class Metrics:
    """One operator's numbers."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._recoveries = Counter(
            "gym_stack_recoveries", "Recoveries that were begun.", ("namespace",), registry=self._registry
        )
        self._checkpoints = Counter(
            "gym_checkpoints",
            "Checkpoints that are final, by result.",
            ("namespace", "result"),
            registry=self._registry,
        )
        self._passes = Histogram(
            "gym_operator_pass_seconds",
            "How long a look at everything that belongs to a stack takes.",
            buckets=BUCKETS,
            registry=self._registry,
        )
        self._api_errors = Counter(
            "gym_operator_api_errors",
            "Requests that the API server refused, or did not answer (status 0).",
            ("verb", "status"),
            registry=self._registry,
        )

    def said(self, kind: str, namespace: str, level: str, reason: str) -> None:
        """An Event was said about an object."""
        if kind == names.STACK_KIND and reason == RECOVERING:
            self._recoveries.labels(namespace).inc()
        elif kind == names.CHECKPOINT_KIND and reason not in set(Afterwards):
            self._checkpoints.labels(namespace, "succeeded" if level == "Normal" else "failed").inc()

    def passed(self, seconds: float) -> None:
        """A worker has looked at everything of its stack."""
        self._passes.observe(seconds)

    def refused(self, verb: str, status: int) -> None:
        """The API server refused a request, or did not answer it."""
        if status not in EXPECTED:
            self._api_errors.labels(verb, str(status)).inc()

    def watch(self, stacks: Stacks, health: Callable[[], Mapping[str, Any]], generations: Counts) -> None:
        """Show these stacks, how the operator itself is, and what policy servers count."""
        self._registry.register(_Standing(stacks, health))
        self._registry.register(_Generations(generations))

    def text(self) -> bytes:
        """All of it in Prometheus' format."""
        return generate_latest(self._registry)


class _Standing(Collector):
    """What stands in the statuses of stacks, and in the operator's health."""

    def __init__(self, stacks: Stacks, health: Callable[[], Mapping[str, Any]]) -> None:
        self._stacks, self._health = stacks, health

    def collect(self) -> Iterator[GaugeMetricFamily]:
        phases: Tally[str] = Tally()
        where = ("namespace", "stack")
        conditions = GaugeMetricFamily(
            "gym_stack_condition", "Whether a condition of a stack holds.", labels=(*where, "condition")
        )
        taken = GaugeMetricFamily(
            "gym_stack_last_checkpoint_timestamp_seconds",
            "When the newest checkpoint of a stack at work was published.",
            labels=where,
        )
        attempts = GaugeMetricFamily("gym_stack_attempt", "The highest attempt of any cell.", labels=where)
        for body in self._stacks():
            status = body.get("status") or {}
            place = (body["metadata"]["namespace"], body["metadata"]["name"])
            phases[status.get("phase") or "Pending"] += 1
            attempts.add_metric(place, status.get("attempt") or 0)
            for condition in status.get("conditions") or ():
                if condition["type"] in SHOWN:
                    conditions.add_metric((*place, condition["type"]), float(condition["status"] == "True"))
            if (last := status.get("lastCheckpoint")) and status.get("phase") not in AT_REST:
                taken.add_metric(place, parse_time(last["time"]))
        stacks = GaugeMetricFamily("gym_stacks", "Stacks by phase.", labels=("phase",))
        for phase, count in sorted(phases.items()):
            stacks.add_metric((phase,), count)
        yield from (stacks, conditions, attempts, taken, *self._own())

    def _own(self) -> Iterator[GaugeMetricFamily]:
        health = self._health()
        for name, about, value in (
            ("gym_operator_stuck_stacks", "Stacks whose worker does not come to the end of a pass.", health["stuck"]),
            ("gym_operator_silent_watches", "Watches that do not tell what lists show.", health["silentWatches"]),
        ):
            yield GaugeMetricFamily(name, about, value=len(value))


class _Generations(Collector):
    """What became of model calls. The counts are the stacks' workers' and go with them."""

    def __init__(self, generations: Counts) -> None:
        self._generations = generations

    def collect(self) -> Iterator[CounterMetricFamily]:
        where = ("namespace", "stack", "what")
        calls = CounterMetricFamily("gym_generations", "What became of model calls.", labels=(*where, "reason"))
        tokens = CounterMetricFamily(
            "gym_generation_tokens", "Tokens that cuts have kept, and that calls went on behind.", labels=where
        )
        for key, totals in self._generations():
            for (what, reason), count in totals.items():
                if what in TOKENS:
                    tokens.add_metric((*key, what), count)
                else:
                    calls.add_metric((*key, what, reason or ""), count)
        yield from (calls, tokens)
