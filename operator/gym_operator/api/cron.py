"""Cron's five fields and time zones, as texts of a manifest.

The API server checks their form; whether a field's numbers exist is checked by the library that reads them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from pydantic import StringConstraints

from gym_servers.stack.wire import Checked, rule

_FIELDS: Final = r"^[^ ]+( [^ ]+){4}$"
_FIELDS_HINT: Final = (
    "write five fields with a space between them: minute, hour, day of month, month, day of week, such as "
    "'*/10 * * * *'"
)
_ZONE: Final = r"^[A-Za-z][-A-Za-z0-9_+]*(/[A-Za-z0-9][-A-Za-z0-9_+]*)*$"
_ZONE_HINT: Final = "write a zone of the IANA database, such as Europe/Berlin or UTC"


def check_cron(text: str) -> None:
    """Raise ValueError that says what is wrong with a schedule."""
    if len(text.split(" ")) != 5 or not all(text.split(" ")):
        raise ValueError(_FIELDS_HINT)
    try:
        first = next(iter(CronSim(text, datetime(2000, 1, 1, tzinfo=UTC))), None)
    except CronSimError as error:
        raise ValueError(f"cron does not know this schedule ({error}); {_FIELDS_HINT}") from None
    if first is None:
        raise ValueError("this schedule never comes to a time; correct its day of month or its month")


def zone_of(name: str) -> ZoneInfo:
    """The zone of this name. Raises ValueError that says what to write."""
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ValueError(f"there is no time zone {name[:64]}; {_ZONE_HINT}") from None


CronText = Annotated[
    str,
    StringConstraints(max_length=100),
    Checked(check_cron, (rule(f"self.matches(r'{_FIELDS}')", _FIELDS_HINT),)),
]
ZoneText = Annotated[
    str,
    StringConstraints(max_length=64),
    Checked(zone_of, (rule(f"self.matches(r'{_ZONE}')", _ZONE_HINT),)),
]
