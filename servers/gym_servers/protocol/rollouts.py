"""What an environment server answers to a driver that asks where its rollouts stand, or is done with them.

    GET /ng-rollout-state              all that it knows, in pages
    GET /ng-rollout-state/<rollout>    one
    POST /ng-rollout-forget            these are over: a driver of the stack's own says so by its status instead

On the data port, in every phase, without a token: whoever may send `/run` may ask.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gym_servers.protocol.messages import Answer, Origin, RolloutId

STATE_PATH = "/ng-rollout-state"
FORGET_PATH = "/ng-rollout-forget"
PAGE = 100
MAX_PAGE = 1000


class Standing(Answer):
    """Where a rollout stands.

    restored   it waits for its `/run` under `attempt`, and continues then
    running    a `/run` under `attempt` joins it
    answered   a `/run` under `attempt` is answered again
    unknown    it has to be sent from its input

    `stage`: of a rollout that is restored or running. `next_attempt`: the lowest attempt under which it may be
    started over; a driver that has used higher ones goes on above them.
    """

    rollout_id: str
    state: Literal["restored", "running", "answered", "unknown"]
    attempt: int | None = None
    stage: str = ""
    next_attempt: int


class CellState(Answer):
    """The cell as its environment sees it. While it is not `in_service` its rollouts may not all be known yet.

    `cell_attempt` counts the cell's recoveries; with `attempt_floor` nothing below it is admitted. `origin`: the
    checkpoint that it was restored from, None for a start from the input. `leaving`: the cell is to go, and waits for
    what it has begun; what has not begun belongs elsewhere."""

    cell: int
    in_service: bool
    leaving: bool = False
    cell_attempt: int
    attempt_floor: bool
    origin: Origin | None = None


class RolloutState(CellState):
    """One rollout."""

    rollout: Standing


class RolloutPage(CellState):
    """Some rollouts, by their ids. `next`: ask again with `after` set to it; None on the last page."""

    rollouts: list[Standing]
    next: str | None = None


class Forget(BaseModel):
    """Rollouts whose answers the driver has, or does not want any more."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rollout_ids: Annotated[list[RolloutId], Field(min_length=1, max_length=MAX_PAGE)]


class Forgetting(Answer):
    """The cell forgets these: what stands of them is retired first. Nobody has to wait for it."""

    cell: int
    rollout_ids: list[str]
