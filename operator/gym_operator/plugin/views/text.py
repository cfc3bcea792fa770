"""Numbers and lists as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

NAMED: Final = 10
"""Names that an error lists; of more it says how many."""
NOTHING: Final = "-"
"""What stands in a table where there is nothing."""

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def age(seconds: float) -> str:
    """How long ago, to the unit that matters. A clock that is ahead gives 0s."""
    whole = max(int(seconds), 0)
    if whole < 2 * _MINUTE:
        return f"{whole}s"
    if whole < 2 * _HOUR:
        return f"{whole // _MINUTE}m"
    return f"{whole // _HOUR}h" if whole < 2 * _DAY else f"{whole // _DAY}d"


def size(count: int) -> str:
    """Bytes, in the unit that leaves three digits."""
    if count < 1024:
        return f"{count} B"
    value = float(count)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1024:
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def some_of(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def count_of(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
