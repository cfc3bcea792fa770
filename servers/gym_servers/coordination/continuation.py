"""What a recovery continues and what it cannot, for whoever drives the rollouts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gym_servers.participants.base import plan_restore
from gym_servers.protocol.identity import Episode, parse_key
from gym_servers.storage.manifest import Publication


@dataclass(frozen=True)
class Continuation:
    """Of the cell attempt `attempt`. `checkpoint_id` is None where it began from the input.

    `continued`: the episodes, as they run from now on. `started_over`: rollouts that ran when the checkpoint was
    taken and that it does not continue; what began later starts over too, which only its driver knows. `labels` and
    `driver_state` came with the checkpoint."""

    attempt: int
    checkpoint_id: str | None = None
    name: str = ""
    continued: tuple[Episode, ...] = ()
    started_over: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    driver_state: Mapping[str, Any] | None = None


def continuation(publication: Publication | None, attempt: int) -> Continuation:
    """What becomes of the rollouts under a cell attempt that begins from this checkpoint, or from the input."""
    if publication is None:
        return Continuation(attempt)
    plan = plan_restore(publication.episodes, attempt, {}, publication.discontinued)
    continued = sorted(plan.episodes.values())
    others = {parse_key(key).rollout_id for key in publication.discontinued}
    return Continuation(
        attempt,
        publication.checkpoint_id,
        publication.name,
        tuple(continued),
        tuple(sorted(others - {episode.rollout_id for episode in continued})),
        publication.labels,
        publication.driver_state,
    )
