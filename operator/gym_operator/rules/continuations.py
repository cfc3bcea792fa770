"""What a stack's status says of its last recovery to a driver outside of it: what continues, and what it had handed
over."""

from __future__ import annotations

from gym_operator.api.driver import (
    MAX_ROLLOUTS,
    Continuation,
    ContinuedRollout,
    KeptDriverState,
    RestoredCheckpoint,
)
from gym_servers.coordination.continuation import Continuation as Found


def continuation_of(found: Found | None, before: Continuation | None, attempt: int) -> Continuation | None:
    """What the cell attempt continues: as its controller found it, else as it was written by an operator before this
    one. None while the recovery goes on, and where there was none."""
    if found is None or found.attempt != attempt:
        return before if before is not None and before.attempt == attempt else None
    return Continuation(
        attempt=attempt,
        checkpoint=found.checkpoint_id,
        continued_count=len(found.continued),
        continued=tuple(
            ContinuedRollout(rollout=episode.rollout_id, attempt=episode.attempt)
            for episode in found.continued[:MAX_ROLLOUTS]
        ),
        started_over_count=len(found.started_over),
        started_over=found.started_over[:MAX_ROLLOUTS],
    )


def restored_of(
    found: Found | None, before: RestoredCheckpoint | None, continuation: Continuation | None
) -> RestoredCheckpoint | None:
    """What was handed over with the checkpoint that `continuation` continues from."""
    if continuation is None or continuation.checkpoint is None:
        return None
    if found is None or found.checkpoint_id != continuation.checkpoint:
        return before if before is not None and before.id == continuation.checkpoint else None
    return RestoredCheckpoint(
        name=found.name,
        id=continuation.checkpoint,
        labels=dict(found.labels),
        driver_state=None if found.driver_state is None else KeptDriverState.model_validate(found.driver_state),
    )
