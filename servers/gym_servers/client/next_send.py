"""What to do about a rollout whose call was refused or lost, from what its environment says. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from gym_servers.protocol.identity import next_attempt
from gym_servers.protocol.rollouts import RolloutState


@dataclass(frozen=True)
class Send:
    """Send it under this attempt: it continues, is joined or answered again, or starts from its input."""

    attempt: int


@dataclass(frozen=True)
class Wait:
    """Ask again in a moment: the cell does not know its rollouts yet."""


def next_send(state: RolloutState, done: int | None, spent: int | None) -> Send | Wait:
    """`done`: the highest attempt whose answer the driver has had; `spent`: the highest that may have run; None:
    none."""
    if not state.in_service:
        return Wait()
    standing = state.rollout
    if standing.attempt is not None and (done is None or standing.attempt > done):
        return Send(standing.attempt)
    return Send(next_attempt(spent, standing.next_attempt))
