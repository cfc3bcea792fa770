"""Makes the GymCheckpoints of schedules: one for each time, found again by its name whoever made it and died since.

Times are what the pure rules say; here is only what it takes to keep to them. Each pass over a schedule can be lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, NamedTuple

from gym_operator.api import names
from gym_operator.api.conditions import ConditionReason
from gym_operator.api.objects import format_time, parse_time
from gym_operator.api.schedule import GymCheckpointSchedule, ScheduleStatus
from gym_operator.effects.cache import Cache, key_of, version_of
from gym_operator.effects.events import Events, Subject
from gym_operator.effects.kube import CHECKPOINTS, STACKS, Conflict, Kube, KubeError, NotFound
from gym_operator.effects.status_writers import Gone, ScheduleWriter, Superseded
from gym_operator.rules import schedules as rules
from gym_operator.rules.schedule_times import Times, times_of
from gym_servers.stack.spec import SpecError

log = logging.getLogger(__name__)


CALM_SECONDS: Final = 60.0
"""Between looks at a schedule of which nothing is due: whatever else could concern it comes with its next version."""


class Calm(NamedTuple):
    """Nothing is to be done about this version of a schedule. Unix seconds: a clock that is set back, or forth, ends
    it."""

    version: int
    since: float
    until: float


class Schedules:
    """All schedules. `step` looks at each of them once."""

    def __init__(self, kube: Kube, cache: Cache, events: Events, wall: Callable[[], float]) -> None:
        self._kube, self._cache, self._events, self._wall = kube, cache, events, wall
        self._writers: dict[str, ScheduleWriter] = {}
        self._calm: dict[str, Calm] = {}

    async def step(self) -> None:
        """See to every schedule that may have something to do; what goes wrong with one is tried again and keeps no
        other waiting."""
        bodies = [body for body in self._cache.schedules.values() if not body["metadata"].get("deletionTimestamp")]
        present = {body["metadata"]["uid"] for body in bodies}
        self._writers = {uid: writer for uid, writer in self._writers.items() if uid in present}
        self._calm = {uid: calm for uid, calm in self._calm.items() if uid in present}
        await asyncio.gather(*(self._see_to(body) for body in bodies if not self._is_calm(body)))

    def _is_calm(self, body: Mapping[str, Any]) -> bool:
        calm, now = self._calm.get(body["metadata"]["uid"]), self._wall()
        return calm is not None and calm.version == version_of(body) and calm.since <= now < calm.until

    async def _see_to(self, body: Mapping[str, Any]) -> None:
        place = key_of(body)
        try:
            self._calm[body["metadata"]["uid"]] = await self._pass(body)
        except Gone:
            self._cache.schedules.drop(place, body["metadata"]["uid"])
        except Superseded:
            self._writers.pop(body["metadata"]["uid"], None)  # an old view, or another operator: look anew
        except KubeError as error:
            log.warning("schedule %s/%s: %s", *place, error)
        except Exception:
            log.exception("schedule %s/%s: a pass failed", *place)

    async def _pass(self, body: Mapping[str, Any]) -> Calm:
        """One look; until when there is nothing to do."""
        writer, now = self._writer_of(body), self._wall()
        generation = int(body["metadata"].get("generation") or 0)
        try:
            schedule = GymCheckpointSchedule.parse({**body, "status": writer.status.document()})
        except SpecError as error:
            await self._refuse(writer, str(error), generation, now)
            return Calm(version_of(body), now, now + CALM_SECONDS)
        status = rules.counted(schedule, now)
        schedule = schedule.model_copy(update={"status": status})
        times = times_of(schedule.spec, parse_time(schedule.metadata.creation_timestamp))
        if rules.due(schedule, times, now) is not None:
            status = await self._deal_with(schedule, times, now)
        upcoming = None if schedule.spec.suspend else times.following(now)
        await writer.put(rules.told(status, generation, upcoming, schedule.spec.suspend, now))
        return Calm(version_of(body), now, min(now + CALM_SECONDS, upcoming or math.inf))

    async def _deal_with(self, schedule: GymCheckpointSchedule, times: Times, now: float) -> ScheduleStatus:
        """Make the GymCheckpoint of the time that has come, or let the time go by. The API server is asked for what
        this rests on: a watch that lags behind would let two of them overlap."""
        namespace, stack = schedule.metadata.namespace, schedule.spec.template.spec.stack_ref.name
        selector = f"{names.SCHEDULE_UID_LABEL}={schedule.metadata.uid}"
        children: list[Mapping[str, Any]] = []
        async for page in self._kube.pages(CHECKPOINTS, namespace, selector):
            children += [rules.in_short(child) for child in page.items]
        found = None
        with suppress(NotFound):
            found = await self._kube.get(STACKS, namespace, stack)
        move = rules.next_move(schedule, times, now, children, rules.obstacle_of(found, stack))
        match move:
            case rules.Make(time):
                return await self._make(schedule, time)
            case rules.Made(time, name):
                return rules.made(schedule.status, time, name)
            case rules.Skip():
                return self._skip(schedule, move)
            case rules.Rest():
                return schedule.status

    async def _make(self, schedule: GymCheckpointSchedule, time: float) -> ScheduleStatus:
        wanted = rules.child(schedule, time)
        name = wanted["metadata"]["name"]
        try:
            await self._kube.create(CHECKPOINTS, schedule.metadata.namespace, wanted)
        except Conflict:
            found = await self._kube.get(CHECKPOINTS, schedule.metadata.namespace, name)
            if not rules.is_child_of(found, schedule.metadata.uid):
                message = (
                    f"GymCheckpoint {name} exists and was not made by this schedule; delete it, or give this "
                    "schedule another name"
                )
                return self._skip(schedule, rules.Skip(time, ConditionReason.NAME_CONFLICT, message))
        self._say(schedule, "Normal", "CheckpointMade", f"GymCheckpoint {name} is for {format_time(time)}")
        return rules.made(schedule.status, time, name)

    def _skip(self, schedule: GymCheckpointSchedule, skip: rules.Skip) -> ScheduleStatus:
        message = f"no checkpoint for {format_time(skip.time)}: {skip.message}"
        self._say(schedule, "Warning" if rules.to_be_mended(skip.reason) else "Normal", skip.reason, message)
        return rules.skipped(schedule.status, skip)

    async def _refuse(self, writer: ScheduleWriter, message: str, generation: int, now: float) -> None:
        await writer.put(rules.refused(writer.status, message, generation, now))
        subject = Subject(names.SCHEDULE_KIND, writer.namespace, writer.name, writer.uid)
        self._events.say(subject, "Warning", ConditionReason.INVALID_SPEC, message)

    def _say(self, schedule: GymCheckpointSchedule, level: Any, reason: str, message: str) -> None:
        metadata = schedule.metadata
        subject = Subject(names.SCHEDULE_KIND, metadata.namespace, metadata.name, metadata.uid)
        self._events.say(subject, level, reason, message)

    def _writer_of(self, body: Mapping[str, Any]) -> ScheduleWriter:
        """The writer of this very object. It knows what was written last, which the cache may not yet."""
        uid = body["metadata"]["uid"]
        if uid not in self._writers:
            self._writers[uid] = ScheduleWriter(self._kube, body)
        return self._writers[uid]
