"""Durations as people write them in a manifest: a whole number and one unit, such as `60s`, `2m` or `1h`.

One unit only, so that every duration has one spelling and the schema's pattern is the whole grammar.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import StringConstraints

from gym_servers.stack.wire import Checked, rule

LONGEST_SECONDS: Final = 24 * 3600
_PATTERN = r"^[1-9][0-9]{0,4}(s|m|h)$"
_PATTERN_OR_ZERO = r"^(0|[1-9][0-9]{0,4})(s|m|h)$"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_HINT = "write a whole number and a unit: 60s, 2m or 1h"
_HINT_OR_ZERO = "write a whole number and a unit: 60s, 2m or 1h, or 0s for none"
_TOO_LONG = "a duration is at most 24h"


def parse_duration(text: str) -> int:
    """Seconds of a duration such as `60s`. Raises ValueError that says how to write one."""
    return _parse(text, _PATTERN, _HINT)


def parse_duration_or_zero(text: str) -> int:
    """As `parse_duration`, and 0 for `0s`."""
    return _parse(text, _PATTERN_OR_ZERO, _HINT_OR_ZERO)


def _parse(text: str, pattern: str, hint: str) -> int:
    if not re.fullmatch(pattern, text):
        raise ValueError(hint)
    seconds = int(text[:-1]) * _SECONDS[text[-1]]
    if seconds > LONGEST_SECONDS:
        raise ValueError(_TOO_LONG)
    return seconds


_AGE_PATTERN = r"^[1-9][0-9]{0,3}(s|m|h|d)$"
_AGE_HINT = "write a whole number of at most four digits and a unit: 90m, 12h or 7d"


def parse_age(text: str) -> int:
    """Seconds of an age such as `7d`. Raises ValueError that says how to write one."""
    if not re.fullmatch(_AGE_PATTERN, text):
        raise ValueError(_AGE_HINT)
    return int(text[:-1]) * _SECONDS[text[-1]]


def age_seconds(text: str | None) -> int | None:
    """Seconds of an age that may be left out. Raises as `parse_age`."""
    return None if text is None else parse_age(text)


def _rules(pattern: str, hint: str) -> tuple[dict[str, Any], ...]:
    return (
        rule(f"self.matches(r'{pattern}')", hint),
        # What is no duration has been refused by the first rule; converting it would only add noise.
        rule(f"!self.matches(r'{pattern}') || duration(self) <= duration('24h')", _TOO_LONG),
    )


Duration = Annotated[str, StringConstraints(max_length=6), Checked(parse_duration, _rules(_PATTERN, _HINT))]
"""A duration in a manifest; `parse_duration` gives its seconds."""

DurationOrZero = Annotated[
    str,
    StringConstraints(max_length=6),
    Checked(parse_duration_or_zero, _rules(_PATTERN_OR_ZERO, _HINT_OR_ZERO)),
]
"""A duration in a manifest, or `0s` for none; `parse_duration_or_zero` gives its seconds."""

Age = Annotated[
    str,
    StringConstraints(max_length=16),
    Checked(parse_age, (rule(f"self.matches(r'{_AGE_PATTERN}')", _AGE_HINT),)),
]
"""How long something is kept: as a duration, and in days; `parse_age` gives its seconds."""
