"""How many cells a stack has, as its processes are told: by a file that whoever runs the stack keeps up to date.

    3      there are three
    2 3    there are to be two, and of a third one processes are still there

The highest cells go. While one goes, it begins nothing any more, and what it has begun is nobody else's: both numbers
stand in one file so that nobody ever reads one of before and one of after.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gym_servers.stack.settings import SettingsError


@dataclass(frozen=True)
class Cells:
    """Cells below `wanted` are to be; those from there on leave, and those from `present` on have no process left.
    `present` is never less than `wanted`."""

    wanted: int
    present: int

    @property
    def text(self) -> str:
        """As it stands in the file."""
        numbers = (self.wanted,) if self.wanted == self.present else (self.wanted, self.present)
        return " ".join(map(str, numbers)) + "\n"


def parse_cells(text: str) -> Cells:
    """The numbers in a file's text. Raises ValueError where there are none."""
    numbers = [int(word) for word in text.split()]
    if not numbers:
        raise ValueError("no number of cells")
    wanted = max(1, numbers[0])
    return Cells(wanted, max(wanted, *numbers))


def counted_in(file: Path) -> Callable[[], Cells]:
    """Reads the numbers from a file, which blocks; while it cannot be read, as in the moment in which it is replaced,
    they stay. Raises SettingsError where there are none to begin with."""

    def read() -> Cells:
        return parse_cells(file.read_text())

    try:
        last = read()
    except (OSError, ValueError) as error:
        raise SettingsError(f"cannot read the number of cells from {file}") from error

    def count() -> Cells:
        nonlocal last
        with suppress(OSError, ValueError):
            last = read()
        return last

    return count
