"""The phases of a GymCheckpoint, as one table, and its status in each of them. Terminal is final."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gym_operator.api.checkpoint import (
    MAX_BLOCKERS,
    MAX_RESTARTS,
    Blocker,
    CheckpointCell,
    CheckpointParticipant,
    CheckpointPhase,
    CheckpointStatus,
)
from gym_operator.api.conditions import ConditionReason, ConditionStatus, ConditionType
from gym_operator.api.objects import clip, format_time, parse_time
from gym_operator.rules.conditions import put
from gym_servers.protocol.messages import Blocker as ProtocolBlocker
from gym_servers.stack.settings import ParticipantKind
from gym_servers.storage.manifest import Publication

OPEN: Final[frozenset[CheckpointPhase]] = frozenset({"Preparing", "Committing", "Publishing"})
"""Phases in which a coordinator is at work, or was when it ended."""

TABLE: Final[Mapping[CheckpointPhase, frozenset[CheckpointPhase]]] = {
    "Pending": frozenset({"Preparing", "Failed"}),
    "Preparing": frozenset({"Committing", "Failed"}),
    # An operator that finds everything durable publishes it, however far the one before had come in writing so.
    "Committing": frozenset({"Publishing", "Succeeded", "Failed"}),
    "Publishing": frozenset({"Succeeded", "Failed"}),
}

_SUCCEEDED: Final[Mapping[CheckpointPhase, ConditionStatus]] = {"Succeeded": "True", "Failed": "False"}


@dataclass(frozen=True)
class Pinned:
    """A process that takes part: where it runs and what it calls itself."""

    name: str
    kind: ParticipantKind
    pod: str | None
    pod_uid: str | None
    session: str | None


def checkpoint_id(name: str, uid: str) -> str:
    """The id that participants and storage know a GymCheckpoint by: unique, and recognisable for people."""
    return f"{name[:100]}-{uid.replace('-', '')[:8]}"


def waiting(
    status: CheckpointStatus, reason: ConditionReason, message: str, generation: int, now: float
) -> CheckpointStatus:
    """Pending, and why."""
    return _told(status, "Pending", reason, message, generation, now)


def under_way(
    status: CheckpointStatus,
    phase: CheckpointPhase,
    id: str,
    uri: str,
    attempt: int,
    pinned: Sequence[Pinned],
    phases: Mapping[str, str],
    generation: int,
    now: float,
) -> CheckpointStatus:
    """In one of the open phases; `phases` is where each participant stands."""
    message = {
        "Preparing": "rollouts are brought to where they can continue from",
        "Committing": "records are frozen and written",
        "Publishing": "all records are durable; the checkpoint is being published",
    }[phase]
    told = _told(_moved(status, phase), phase, ConditionReason.IN_PROGRESS, message, generation, now)
    return told.model_copy(
        update={
            "checkpoint_id": id,
            "uri": uri,
            "start_time": status.start_time or format_time(now),
            "cells": (CheckpointCell(index=0, phase=phase, attempt=attempt, uri=uri),),
            "participants": tuple(
                CheckpointParticipant(
                    name=each.name,
                    kind=each.kind,
                    pod=each.pod,
                    pod_uid=each.pod_uid,
                    session=each.session,
                    phase=phases.get(each.name),
                )
                for each in pinned
            ),
        }
    )


def succeeded(
    status: CheckpointStatus,
    publication: Publication,
    uri: str,
    digest: str,
    pause_seconds: float | None,
    generation: int,
    now: float,
) -> CheckpointStatus:
    """Published: from now on it can be restored, and nothing about it changes."""
    known = {each.name: each for each in status.participants}
    size = sum(member.bytes for member in publication.members)
    episodes = len(publication.episodes)
    told = _told(
        _moved(status, "Succeeded"),
        "Succeeded",
        ConditionReason.PUBLISHED,
        f"{episodes} rollouts continue from it",
        generation,
        now,
    )
    participants = []
    for member in publication.members:
        before = known.get(member.instance) or CheckpointParticipant.model_validate(
            {"name": member.instance, "kind": member.kind}
        )
        participants.append(
            before.model_copy(
                update={
                    "session": member.session,
                    "phase": "committed",
                    "records": member.records,
                    "bytes": member.bytes,
                }
            )
        )
    return told.model_copy(
        update={
            "uri": uri,
            "digest": digest,
            "cells": (
                CheckpointCell(
                    index=publication.cell,
                    phase="Succeeded",
                    attempt=publication.cell_attempt,
                    uri=uri,
                    digest=digest,
                    episodes=episodes,
                    bytes=size,
                ),
            ),
            "participants": tuple(participants),
            "blockers": (),
            "restart_count": len(publication.restarts),
            "restarts": tuple(publication.restarts[:MAX_RESTARTS]),
            "episodes": episodes,
            "bytes": size,
            "pause_seconds": None if pause_seconds is None else round(pause_seconds, 3),
            "completion_time": format_time(now),
        }
    )


def failed(
    status: CheckpointStatus,
    reason: str,
    message: str,
    generation: int,
    now: float,
    blockers: Sequence[tuple[str, ProtocolBlocker]] = (),
) -> CheckpointStatus:
    """Given up, and why. It does not exist in storage, or only as a tombstone."""
    told = _told(_moved(status, "Failed"), "Failed", reason, message, generation, now)
    return told.model_copy(
        update={
            "completion_time": format_time(now),
            "cells": tuple(cell.model_copy(update={"phase": "Failed"}) for cell in status.cells),
            "blockers": tuple(
                Blocker(
                    participant=participant,
                    id=blocker.id[:256],
                    where=blocker.where[:256],
                    age_seconds=round(max(0.0, blocker.age_seconds), 3),
                )
                for participant, blocker in blockers[:MAX_BLOCKERS]
            ),
        }
    )


def _moved(status: CheckpointStatus, phase: CheckpointPhase) -> CheckpointStatus:
    """Raises ValueError for a move that is not in the table: a fault of ours."""
    before = status.phase or "Pending"
    if before != phase and phase not in TABLE.get(before, frozenset()):
        raise ValueError(f"a checkpoint does not go from {before} to {phase}")
    return status


def _told(
    status: CheckpointStatus, phase: CheckpointPhase, reason: str, message: str, generation: int, now: float
) -> CheckpointStatus:
    value = _SUCCEEDED.get(phase, "Unknown")
    conditions = put(status.conditions, ConditionType.SUCCEEDED, value, reason, message, generation, now)
    if phase == "Failed":
        conditions = put(conditions, ConditionType.STALLED, "True", reason, message, generation, now)
    return status.model_copy(
        update={
            "observed_generation": generation,
            "phase": phase,
            "reason": reason,
            "message": clip(message),
            "conditions": conditions,
        }
    )


def age_seconds(creation_timestamp: str, now: float) -> float:
    """How long ago an object was created; 0 where its time is not known."""
    return max(0.0, now - parse_time(creation_timestamp)) if creation_timestamp else 0.0
