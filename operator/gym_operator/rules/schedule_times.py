"""The times of a schedule. Pure: whoever asks says what time it is, in Unix seconds.

Cron's fields are read as cron itself does: where a zone's clock is put forward, a time that does not exist comes as
soon as the clock goes on; where it is put back, a time that comes twice counts once. Fields with a `*` for minutes or
hours just go on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from typing import Final, Protocol

from cronsim import CronSim

from gym_operator.api.cron import zone_of
from gym_operator.api.schedule import ScheduleSpec
from gym_servers.stack.durations import parse_duration

LOOKS_BACK: Final = (3600.0, 86400.0, 32 * 86400.0)
"""How far back the newest time is looked for first: a schedule that is often due is not walked through for years."""


class Times(Protocol):
    """When a schedule is due."""

    def latest(self, after: float, until: float) -> float | None:
        """The newest time in (after, until]."""
        ...

    def following(self, after: float) -> float | None:
        """The first time after `after`; None where there is none for decades."""
        ...


@dataclass(frozen=True)
class Every:
    """Each `seconds`, counted from `anchor`."""

    seconds: int
    anchor: float

    def latest(self, after: float, until: float) -> float | None:
        time = self._nth(math.floor((until - self.anchor) / self.seconds))
        return time if time > max(after, self.anchor) else None

    def following(self, after: float) -> float | None:
        return self._nth(max(1, math.floor((after - self.anchor) / self.seconds) + 1))

    def _nth(self, n: int) -> float:
        return self.anchor + n * self.seconds


@dataclass(frozen=True)
class Cron:
    """Cron's fields, read in a zone."""

    fields: str
    zone: tzinfo

    def latest(self, after: float, until: float) -> float | None:
        for width in (*LOOKS_BACK, math.inf):
            begin = max(after, until - width)
            found = None
            for time in self._after(begin):
                if time > until:
                    break
                found = time
            if found is not None or begin == after:
                return found
        return None

    def following(self, after: float) -> float | None:
        return next(self._after(after), None)

    def _after(self, begin: float) -> Iterator[float]:
        """All times after `begin`, in order."""
        last = begin
        for moment in CronSim(self.fields, datetime.fromtimestamp(begin, self.zone)):
            time = moment.timestamp()
            # In the hour that a clock goes through twice, local times do not say which one is meant.
            if time > last:
                last = time
                yield time


def times_of(spec: ScheduleSpec, created: float) -> Times:
    """The times of a schedule that was created at `created`."""
    if spec.every is not None:
        return Every(parse_duration(spec.every), created)
    assert spec.schedule is not None  # the spec has exactly one of the two
    return Cron(spec.schedule, zone_of(spec.time_zone) if spec.time_zone is not None else UTC)
