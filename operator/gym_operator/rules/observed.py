"""What one look at a stack and its cells has shown: all that its status says is decided from this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gym_operator.api.conditions import AnyReason
from gym_operator.api.stack import LastCheckpoint
from gym_operator.rules.drain import Drain
from gym_operator.rules.pod_state import PodState
from gym_operator.rules.rollouts import Cause
from gym_operator.rules.spec_check import Problem
from gym_servers.coordination.continuation import Continuation
from gym_servers.coordination.record import CellRecord
from gym_servers.protocol.messages import Status
from gym_servers.stack.spec import Participant


@dataclass(frozen=True)
class Storage:
    """Whether the stack's storage can be used; `ok` is None where nobody has looked or there is none to look at."""

    ok: bool | None
    reason: AnyReason
    message: str


@dataclass(frozen=True)
class Engine:
    """The engine of the inference block: how many there are to be, and the pods that there are."""

    wanted: int
    pods: Sequence[PodState] = ()


@dataclass(frozen=True)
class CellSeen:
    """One cell, as it was seen last. `waits` is what its controller waits for; `stopping`: the spec does not have it
    any more, and `drain` is how far it is with what it had begun; `continuation` is what its controller knows of its
    last recovery; `cause`: why its pods are to be replaced, and `trouble` what came of the last checkpoint before
    that, where it failed."""

    index: int
    pods: Mapping[str, PodState] = field(default_factory=dict)
    statuses: Mapping[str, Status] = field(default_factory=dict)
    record: CellRecord | None = None
    waits: str = ""
    stopping: bool = False
    drain: Drain | None = None
    continuation: Continuation | None = None
    cause: Cause | None = None
    trouble: str = ""


@dataclass(frozen=True)
class Observed:
    """All that a stack's status says. `cells` is empty where the spec was never readable; `waits` is what the stack
    as a whole waits for. `engine` is None without an inference block. `last_of` is what cells would continue from,
    None for the input; a cell that it does not name is as its status says. `after`: cells that others have to wait
    for before their own pods are replaced."""

    generation: int
    participants: Sequence[Participant]
    cells: Sequence[CellSeen] = ()
    waits: str = ""
    problem: Problem | None = None
    suspended: bool = False
    checkpoints_enabled: bool = True
    storage: Storage | None = None
    checkpoint: str | None = None
    engine: Engine | None = None
    last_of: Mapping[int, LastCheckpoint | None] = field(default_factory=dict)
    after: Sequence[int] = ()

    def name_of(self, cell: CellSeen) -> str:
        """How a message begins that is about one cell: without a number where there is only one."""
        return f"cell {cell.index}: " if len(self.cells) > 1 else ""
