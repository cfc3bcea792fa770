"""Kubernetes Events: what happened, for people who look at a stack or a checkpoint.

Posted in the background, since nobody's recovery waits for an Event, and said once: a condition that lasts is seen in
the status.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from gym_operator.api import names
from gym_operator.api.objects import clip
from gym_operator.effects.kube import EVENTS, Kube, KubeError

log = logging.getLogger(__name__)

Level = Literal["Normal", "Warning"]
QUIET_SECONDS: Final = 300.0
"""The same words about the same object are not repeated for so long."""
MAX_QUEUE: Final = 1000
"""Events are dropped beyond: they explain, nothing depends on them."""


@dataclass(frozen=True)
class Subject:
    """The object an Event is about."""

    kind: str
    namespace: str
    name: str
    uid: str


class Events:
    """A queue of Events and the task that posts them. `said` is told of each: kind, namespace, level, reason."""

    def __init__(
        self,
        kube: Kube,
        monotonic: Callable[[], float] = time.monotonic,
        said: Callable[[str, str, str, str], None] = lambda *_: None,
    ) -> None:
        self._kube, self._monotonic, self._told = kube, monotonic, said
        self._queue: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue(MAX_QUEUE)
        self._said: dict[tuple[str, str, str], float] = {}

    def say(self, subject: Subject, level: Level, reason: str, message: str) -> None:
        """Post an Event soon, unless the same was said a moment ago."""
        now = self._monotonic()
        said = (subject.uid, reason, message)
        if now - self._said.get(said, float("-inf")) < QUIET_SECONDS:
            return
        self._said = {key: at for key, at in self._said.items() if now - at < QUIET_SECONDS}
        self._said[said] = now
        log.log(
            logging.WARNING if level == "Warning" else logging.INFO,
            "%s %s/%s: %s: %s",
            subject.kind,
            subject.namespace,
            subject.name,
            reason,
            message,
        )
        self._told(subject.kind, subject.namespace, level, reason)
        if not self._queue.full():
            self._queue.put_nowait((subject.namespace, _event(subject, level, reason, message)))

    async def run(self) -> None:
        """Post for ever."""
        while True:
            namespace, event = await self._queue.get()
            try:
                await self._kube.create(EVENTS, namespace, event)
            except KubeError as error:
                log.info("an Event was not posted: %s", error)
            except Exception:
                log.exception("an Event could not be posted")  # the next one may be another matter


def _event(subject: Subject, level: Level, reason: str, message: str) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{subject.name[:200]}.{secrets.token_hex(8)}", "namespace": subject.namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": subject.kind,
            "namespace": subject.namespace,
            "name": subject.name,
            "uid": subject.uid,
        },
        "type": level,
        "reason": reason,
        "message": clip(message),
        "source": {"component": names.OPERATOR_NAME},
        "reportingComponent": names.OPERATOR_NAME,
        "reportingInstance": names.OPERATOR_NAME,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
