"""Deletes the GymCheckpoints that nobody keeps any more. What becomes of their data is their deletionPolicy's matter.

The watches say which might go; before one goes, the API server is asked what its stack needs.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final, NamedTuple

from gym_operator.api import names
from gym_operator.api.event_reasons import Afterwards
from gym_operator.api.schedule import GymCheckpointSchedule
from gym_operator.effects.cache import Cache, Key
from gym_operator.effects.events import Events, Subject
from gym_operator.effects.kube import CHECKPOINTS, STACKS, Conflict, Kube, KubeError, NotFound
from gym_operator.rules import retention as rules
from gym_operator.rules.checkpoint_entries import Entry
from gym_operator.rules.restores import held_by
from gym_servers.stack.spec import SpecError

log = logging.getLogger(__name__)

_SURPLUS = "its schedule keeps newer ones, or none as old as this"
_EXPIRED = "its ttl is over"


CALM_SECONDS: Final = 30.0
"""Between looks while nothing is told: a checkpoint may grow too old meanwhile."""
KEPT_SECONDS: Final = 600.0
"""A stack that needed all that might go is not asked again for so long: a newer checkpoint is told."""


class Kept(NamedTuple):
    """Of a stack nothing could go: its candidates, all its checkpoints, what there was of restores, and when."""

    candidates: frozenset[tuple[str, int]]
    known: frozenset[tuple[str, int]]
    restores: int
    at: float


class Retention:
    """`step` lets go of what may go."""

    def __init__(self, kube: Kube, cache: Cache, events: Events, wall: Callable[[], float]) -> None:
        self._kube, self._cache, self._events, self._wall = kube, cache, events, wall
        self._seen: tuple[int, ...] = ()
        self._looked = float("-inf")
        self._kept: dict[Key, Kept] = {}

    async def step(self) -> None:
        now, cache = self._wall(), self._cache
        seen = (cache.entry_changes, cache.schedules.changes, cache.restores.changes)
        if seen == self._seen and 0 <= now - self._looked < CALM_SECONDS:
            return
        self._seen, self._looked = seen, now
        entries = cache.entries()
        reasons = {each.uid: _EXPIRED for each in rules.expired(entries, self._wall())}
        reasons |= {each.uid: _SURPLUS for each in self._surplus(entries)}
        by_stack: defaultdict[Key, list[Entry]] = defaultdict(list)
        for entry in entries:
            by_stack[Key(entry.namespace, entry.stack)].append(entry)
        self._kept = {stack: kept for stack, kept in self._kept.items() if stack in by_stack}
        for stack, known in by_stack.items():
            candidates = [each for each in known if each.uid in reasons]
            if not candidates or self._are_kept(stack, candidates, known, now):
                continue
            try:
                expendable = await self._expendable(stack, candidates, known)
                for entry in expendable:
                    await self._delete(entry, reasons[entry.uid])
            except (KubeError, ValueError) as error:
                log.warning("retention of stack %s/%s: %s", *stack, error)
                self._looked = float("-inf")  # again soon
            else:
                if not expendable:
                    self._kept[stack] = Kept(_versions(candidates), _versions(known), cache.restores.changes, now)

    def _are_kept(self, stack: Key, candidates: list[Entry], known: list[Entry], now: float) -> bool:
        """Whether these were found to be needed a while ago, and nothing is new about their stack's checkpoints."""
        kept = self._kept.get(stack)
        return (
            kept is not None
            and kept[:3] == (_versions(candidates), _versions(known), self._cache.restores.changes)
            and 0 <= now - kept.at < KEPT_SECONDS
        )

    def _surplus(self, entries: Iterable[Entry]) -> list[Entry]:
        of_schedule: defaultdict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            if entry.schedule_uid is not None:
                of_schedule[entry.schedule_uid].append(entry)
        found = []
        for body in self._cache.schedules.values():
            # One that is not there any more keeps everything: deleting a schedule costs nobody a checkpoint.
            with suppress(SpecError):
                schedule = GymCheckpointSchedule.parse(body)
                found += rules.surplus(of_schedule[schedule.metadata.uid], schedule.spec.keep, self._wall())
        return found

    async def _expendable(self, stack: Key, candidates: list[Entry], known: list[Entry]) -> list[Entry]:
        try:
            needs = rules.needs_of(await self._kube.get(STACKS, stack.namespace, stack.name))
        except NotFound:
            needs = None
        held = rules.Held(*held_by(self._cache.restores.values()))
        return rules.expendable(candidates, known, needs, held)

    async def _delete(self, entry: Entry, why: str) -> None:
        try:
            await self._kube.delete(CHECKPOINTS, entry.namespace, entry.name, entry.uid)
        except (NotFound, Conflict):
            return  # gone already, or another one has its name: the watch will tell
        subject = Subject(names.CHECKPOINT_KIND, entry.namespace, entry.name, entry.uid)
        self._events.say(subject, "Normal", Afterwards.LET_GO, f"it is deleted: {why}")


def _versions(entries: Iterable[Entry]) -> frozenset[tuple[str, int]]:
    return frozenset((each.uid, each.version) for each in entries)
