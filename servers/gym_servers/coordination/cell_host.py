"""What a cell's controller works with: where its processes live, how the cell is treated, and what it saw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gym_servers.coordination import decide as d
from gym_servers.coordination.record import KEPT_RECOVERIES, CellRecord, Choice


@dataclass(frozen=True)
class Process:
    """One expected participant as its host sees it. `leaving`: it runs, and somebody else is about to end it."""

    name: str
    kind: str
    incarnation: str | None
    alive: bool
    control_url: str | None
    detail: str = ""
    leaving: bool = False


class CellHost(Protocol):
    """What differs between Kubernetes and a local machine."""

    async def processes(self) -> Sequence[Process]:
        """Every expected participant, also those without a process."""
        ...

    async def end(self, processes: Mapping[str, str]) -> None:
        """End these incarnations and see to it that fresh ones come up. Repeatable."""
        ...

    async def save(self, record: CellRecord) -> None:
        """Make the record durable. Raises where another coordinator has written one since."""
        ...

    async def announce(self, level: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        """Tell people."""
        ...


@dataclass(frozen=True)
class CellSettings:
    """Which cell, and how it is treated. Times in seconds; the record keeps the last `kept_recoveries`.
    `max_checkpoint_age`: what was published longer ago is not restored after a death; None for any.
    `restart_blockers_after`: how many checkpoints in a row a rollout may hold up before it is restarted; 0 for any
    number. `any_code`: records of other code are tried too. `patient`: processes that are told to end wait for a last
    checkpoint, so they have to be told where none comes."""

    stack_uid: str
    cell: int
    token: str = field(repr=False)
    root: str
    policy: Literal["Restore", "Restart", "Manual"] = "Restore"
    max_checkpoint_age: float | None = None
    backoff_limit: int = 5
    prepare_timeout: float = 60.0
    commit_timeout: float = 120.0
    lease_grace: float = 60.0
    previous_token: str = field(default="", repr=False)
    kept_recoveries: int = KEPT_RECOVERIES
    restart_blockers_after: int = 0
    any_code: bool = False
    patient: bool = False


@dataclass(frozen=True)
class Wish:
    """A checkpoint to continue from. `by` is who asks, told apart from everybody else; `above` is the highest attempt
    that its rollouts may have used."""

    choice: Choice
    by: str
    above: int = 0


@dataclass(frozen=True)
class View:
    """The outcome of one look."""

    record: CellRecord
    seen: Mapping[str, d.Seen]
    kinds: Mapping[str, str]
    step: d.Step
