"""How much is measured, from environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gym_kit.errors import KitError


@dataclass(frozen=True)
class Options:
    """`rest_seconds`: for how long the operator is watched while nothing happens; `changes`: of specs, one after the
    other, whose way into the status is timed."""

    stacks: int = 200
    checkpoints: int = 2000
    schedules: int = 50
    rest_seconds: int = 60
    changes: int = 50


def from_environment(environment: Mapping[str, str]) -> Options:
    """STACKS=, CHECKPOINTS=, SCHEDULES=, REST=, CHANGES=. Raises KitError for what is not a count."""

    def count(name: str, default: int, least: int) -> int:
        text = environment.get(name) or str(default)
        if not text.isdecimal() or int(text) < least:
            raise KitError(f"{name}={text} is not a whole number from {least} on")
        return int(text)

    usual = Options()
    found = Options(
        stacks=count("STACKS", usual.stacks, 1),
        checkpoints=count("CHECKPOINTS", usual.checkpoints, 10),
        schedules=count("SCHEDULES", usual.schedules, 0),
        rest_seconds=count("REST", usual.rest_seconds, 1),
        changes=count("CHANGES", usual.changes, 1),
    )
    if found.schedules > found.stacks:
        raise KitError(f"SCHEDULES={found.schedules} is more than STACKS={found.stacks}: each is of another stack")
    return found
