"""The phases of a GymCheckpoint: those of each cell's part, as one table, and what the parts come to. Terminal is
final.

The whole stands where the part stands that has the furthest to go, so that it never goes back however many parts
follow each other; it succeeds if every part does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gym_operator.api.checkpoint import (
    MAX_BLOCKERS,
    MAX_PART_MESSAGE,
    MAX_RESTARTS,
    TERMINAL,
    Blocker,
    CheckpointCell,
    CheckpointParticipant,
    CheckpointPhase,
    CheckpointStatus,
)
from gym_operator.api.conditions import AnyReason, ConditionReason, ConditionStatus, ConditionType
from gym_operator.api.objects import clip, format_time
from gym_operator.rules.conditions import put
from gym_servers.protocol.messages import Blocker as ProtocolBlocker
from gym_servers.protocol.messages import Status
from gym_servers.protocol.phases import Phase
from gym_servers.stack.settings import ParticipantKind
from gym_servers.storage.manifest import Publication

MAX_NAMED: Final = 10
"""How many blockers an event names."""
OPEN: Final[frozenset[CheckpointPhase]] = frozenset({"Preparing", "Committing", "Publishing"})
"""Phases in which a coordinator is at work, or was when it ended."""

TABLE: Final[Mapping[CheckpointPhase, frozenset[CheckpointPhase]]] = {
    # One that is adopted succeeds at once: it was taken by somebody else.
    "Pending": frozenset({"Preparing", "Succeeded", "Failed"}),
    "Preparing": frozenset({"Committing", "Failed"}),
    # An operator that finds everything durable publishes it, however far the one before had come in writing so.
    "Committing": frozenset({"Publishing", "Succeeded", "Failed"}),
    "Publishing": frozenset({"Succeeded", "Failed"}),
}
"""Which phase of a part may follow which."""

_WHAT_GOES_ON: Final[Mapping[CheckpointPhase, str]] = {
    "Preparing": "rollouts are brought to where they can continue from",
    "Committing": "records are being frozen and written",
    "Publishing": "all records are durable; the checkpoint is being published",
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


@dataclass(frozen=True)
class Origin:
    """The stack that a checkpoint is of, and how its storage is reached: both are needed when the stack is gone."""

    stack_uid: str
    storage: Mapping[str, Any]


@dataclass(frozen=True)
class Which:
    """A part: the cell, all cells that the checkpoint is about, and where it comes from."""

    index: int
    among: Collection[int] = (0,)
    origin: Origin | None = None


@dataclass(frozen=True)
class At:
    """When something is written, in Unix seconds, and for which generation of the spec."""

    generation: int
    now: float


def checkpoint_id(name: str, uid: str) -> str:
    """The id that participants and storage know a GymCheckpoint by, the same in every cell: unique, and recognisable
    for people."""
    return f"{name[:100]}-{uid.replace('-', '')[:8]}"


def part_of(status: CheckpointStatus, index: int) -> CheckpointCell:
    """A cell's part; one that was not begun where the status does not name it."""
    return next((part for part in status.cells if part.index == index), CheckpointCell(index=index))


def is_left_behind(status: CheckpointStatus, origin: Origin | None) -> bool:
    """Whether it was begun in another place than where its stack keeps checkpoints by now."""
    if status.storage is None or origin is None:
        return False
    return _place(status.storage) != _place(origin.storage)


def _place(storage: Mapping[str, Any]) -> tuple[Any, ...]:
    s3 = storage.get("s3") or {}
    return storage.get("directory"), s3.get("bucket"), s3.get("prefix") or ""


def has_begun(status: CheckpointStatus) -> bool:
    """Whether any part was taken, or tried."""
    return any(part.phase in OPEN or part.uri is not None for part in status.cells)


def waiting(status: CheckpointStatus, which: Which, reason: AnyReason, message: str, at: At) -> CheckpointStatus:
    """A part cannot begin yet, and why. The whole says so while no other part has begun."""
    if has_begun(status):
        return _with(status, which, _moved(part_of(status, which.index), "Pending", reason=reason, message=message))
    return _told(status, "Pending", reason, message, at)


def under_way(
    status: CheckpointStatus,
    which: Which,
    phase: CheckpointPhase,
    id: str,
    uri: str,
    attempt: int,
    pinned: Sequence[Pinned],
    phases: Mapping[str, str],
    at: At,
) -> CheckpointStatus:
    """A part in one of the open phases; `phases` is where each participant stands."""
    participants = tuple(
        CheckpointParticipant(
            name=each.name,
            kind=each.kind,
            pod=each.pod,
            pod_uid=each.pod_uid,
            session=each.session,
            phase=phases.get(each.name),
        )
        for each in pinned
    )
    part = _moved(
        part_of(status, which.index),
        phase,
        reason=None,
        message=None,
        attempt=attempt,
        uri=uri,
        participants=participants,
    )
    if phase != "Preparing":
        status = _with_blockers(status, which.index, ())
    begun = status.model_copy(update={"checkpoint_id": id, "start_time": status.start_time or format_time(at.now)})
    if which.origin is not None:
        begun = begun.model_copy(update={"stack_uid": which.origin.stack_uid, "storage": dict(which.origin.storage)})
    return _concluded(_with(begun, which, part), at)


def waited_for(statuses: Mapping[str, Status], id: str) -> list[tuple[str, ProtocolBlocker]]:
    """What the participants that a checkpoint is preparing say that they wait for."""
    return [
        (name, blocker)
        for name, status in statuses.items()
        if status.phase == Phase.PREPARING and status.checkpoint_id == id
        for blocker in status.report.blockers
    ]


def held_up(
    status: CheckpointStatus, which: Which, blockers: Sequence[tuple[str, ProtocolBlocker]], at: At
) -> CheckpointStatus:
    """What a part that is being prepared waits for. Another status only where that is something else than before:
    it says since when, and need not be written for each second that goes by."""
    if part_of(status, which.index).phase != "Preparing":
        return status
    known = {_identity(each): each for each in status.blockers}
    mine = [
        _blocker(which.index, participant, blocker, since=format_time(at.now - max(0.0, blocker.age_seconds)))
        for participant, blocker in blockers
    ]
    told = _with_blockers(status, which.index, [known.get(_identity(each), each) for each in mine])
    return status if {_identity(each) for each in told.blockers} == known.keys() else told


def part_succeeded(
    status: CheckpointStatus,
    which: Which,
    publication: Publication,
    uri: str,
    digest: str,
    pause_seconds: float | None,
    at: At,
) -> CheckpointStatus:
    """A part is published: from now on it can be restored, and nothing about it changes."""
    before = part_of(status, which.index)
    if before.phase == "Succeeded":
        return status
    known = {each.name: each for each in before.participants}
    participants = []
    for member in publication.members:
        one = known.get(member.instance) or CheckpointParticipant.model_validate(
            {"name": member.instance, "kind": member.kind}
        )
        kept = {"session": member.session, "phase": "committed", "records": member.records, "bytes": member.bytes}
        participants.append(one.model_copy(update=kept))
    part = _moved(
        before,
        "Succeeded",
        reason=None,
        message=None,
        attempt=publication.cell_attempt,
        uri=uri,
        digest=digest,
        episodes=len(publication.episodes),
        bytes=sum(member.bytes for member in publication.members),
        pause_seconds=None if pause_seconds is None else round(pause_seconds, 3),
        participants=tuple(participants),
    )
    restarts = _with_blockers(status, which.index, ()).model_copy(
        update={
            "restart_count": status.restart_count + len(publication.restarts),
            "restarts": (*status.restarts, *publication.restarts)[:MAX_RESTARTS],
        }
    )
    return _concluded(_with(restarts, which, part), at)


def blocked_by(blockers: Sequence[tuple[str, ProtocolBlocker]]) -> str:
    """What a checkpoint waited for, for an event: who, where, and for how long."""
    named = [
        f"{blocker.id} is in {blocker.where} at {participant} for {blocker.age_seconds:.1f} s"
        for participant, blocker in blockers[:MAX_NAMED]
    ]
    return "; ".join([*named, *([f"and {len(blockers) - MAX_NAMED} more"] if len(blockers) > MAX_NAMED else [])])


def part_failed(
    status: CheckpointStatus,
    which: Which,
    reason: str,
    message: str,
    at: At,
    blockers: Sequence[tuple[str, ProtocolBlocker]] = (),
) -> CheckpointStatus:
    """A part was given up, and why. It does not exist in storage, or only as a tombstone."""
    before = part_of(status, which.index)
    if before.phase == "Failed":
        return status
    part = _moved(before, "Failed", reason=reason[:128], message=clip(message, MAX_PART_MESSAGE))
    named = [
        _blocker(which.index, participant, blocker, age_seconds=round(max(0.0, blocker.age_seconds), 3))
        for participant, blocker in blockers
    ]
    return _concluded(_with(_with_blockers(status, which.index, named), which, part), at)


def _blocker(cell: int, participant: str, blocker: ProtocolBlocker, **age: Any) -> Blocker:
    return Blocker(cell=cell, participant=participant, id=blocker.id[:256], where=blocker.where[:256], **age)


def _identity(blocker: Blocker) -> tuple[int, str, str, str]:
    """What makes it the same, however long it has been there."""
    return blocker.cell, blocker.participant, blocker.id, blocker.where


def _with_blockers(status: CheckpointStatus, cell: int, blockers: Sequence[Blocker]) -> CheckpointStatus:
    """The status with these of a cell, and those of the others."""
    others = (each for each in status.blockers if each.cell != cell)
    return status.model_copy(update={"blockers": (*others, *blockers)[:MAX_BLOCKERS]})


def failed(status: CheckpointStatus, reason: str, message: str, at: At) -> CheckpointStatus:
    """The whole is given up; what its cells have published stays."""
    parts = tuple(
        part if part.phase in TERMINAL else _moved(part, "Failed", reason=reason[:128], message=None)
        for part in status.cells
    )
    waited_for_in_vain = tuple(each for each in status.blockers if each.since is None)
    left = status.model_copy(update={"cells": parts, "blockers": waited_for_in_vain})
    told = _told(left, "Failed", reason, message, at)
    return told.model_copy(update={"completion_time": format_time(at.now)})


def deleting(status: CheckpointStatus, reason: AnyReason, message: str, generation: int) -> CheckpointStatus:
    """On its way out, and where its data stands. What came of the checkpoint and its parts stays said. Raises
    ValueError for one that is not final: a fault of ours."""
    if status.phase not in TERMINAL and status.phase != "Deleting":
        raise ValueError(f"a checkpoint does not go from {status.phase} to Deleting")
    told = observed(status, generation)
    return told.model_copy(update={"phase": "Deleting", "reason": reason.value, "message": clip(message)})


def observed(status: CheckpointStatus, generation: int) -> CheckpointStatus:
    """As it is, for a spec that says anew how it is kept."""
    conditions = tuple(each.model_copy(update={"observed_generation": generation}) for each in status.conditions)
    return status.model_copy(update={"observed_generation": generation, "conditions": conditions})


def _concluded(status: CheckpointStatus, at: At) -> CheckpointStatus:
    """What the parts come to."""
    parts = status.cells
    if len(parts) == 1:
        status = status.model_copy(update={"uri": parts[0].uri, "digest": parts[0].digest})
    paused = [part.pause_seconds for part in parts if part.pause_seconds is not None]
    status = status.model_copy(
        update={
            "episodes": sum(part.episodes for part in parts),
            "bytes": sum(part.bytes for part in parts),
            "pause_seconds": max(paused, default=None),
        }
    )
    if unfinished := [part for part in parts if part.phase not in TERMINAL]:
        return _unfinished(status, unfinished, at)
    status = status.model_copy(update={"completion_time": format_time(at.now)})
    lost = [part for part in parts if part.phase == "Failed"]
    if lost:
        return _told(status, "Failed", lost[0].reason or "Unknown", _losses(parts, lost), at)
    message = f"{status.episodes} rollouts continue from it"
    return _told(status, "Succeeded", ConditionReason.PUBLISHED, message, at)


def _unfinished(status: CheckpointStatus, unfinished: Sequence[CheckpointCell], at: At) -> CheckpointStatus:
    if not has_begun(status):
        return _told(status, "Pending", ConditionReason.QUEUED, "waits for its cells", at)
    phase: CheckpointPhase = "Preparing"
    if all(part.phase == "Publishing" for part in unfinished):
        phase = "Publishing"
    elif all(part.phase in ("Committing", "Publishing") for part in unfinished):
        phase = "Committing"
    message = _WHAT_GOES_ON[phase]
    if len(status.cells) > 1:
        message = f"{len(status.cells) - len(unfinished)} of {len(status.cells)} cells are done; {message}"
    return _told(status, phase, ConditionReason.IN_PROGRESS, message, at)


def _losses(parts: Sequence[CheckpointCell], lost: Sequence[CheckpointCell]) -> str:
    """Why parts failed; cells with the same reason are named together."""
    if len(parts) == 1:
        return lost[0].message or ""
    by_message: dict[str, list[int]] = {}
    for part in lost:
        by_message.setdefault(part.message or part.reason or "", []).append(part.index)
    texts = [f"{_cells(indices)}: {message}" for message, indices in by_message.items()]
    if kept := [part.index for part in parts if part.phase == "Succeeded"]:
        texts.insert(0, f"{_cells(kept)} published what their own recovery continues from")
    return "; ".join(texts)


def _cells(indices: Sequence[int]) -> str:
    return f"cell{'s' if len(indices) > 1 else ''} {', '.join(map(str, indices))}"


def _with(status: CheckpointStatus, which: Which, part: CheckpointCell) -> CheckpointStatus:
    """The status with a part replaced. Which cells it is about is fixed with the first part that it names."""
    parts = {each.index: each for each in status.cells} or {i: CheckpointCell(index=i) for i in which.among}
    parts[which.index] = part
    return status.model_copy(update={"cells": tuple(parts[index] for index in sorted(parts))})


def _moved(part: CheckpointCell, phase: CheckpointPhase, **update: Any) -> CheckpointCell:
    """The part in its next phase. Raises ValueError for a move that is not in the table: a fault of ours."""
    if part.phase != phase and phase not in TABLE.get(part.phase, frozenset()):
        raise ValueError(f"a checkpoint does not go from {part.phase} to {phase}")
    return part.model_copy(update={"phase": phase, **update})


def _told(status: CheckpointStatus, phase: CheckpointPhase, reason: str, message: str, at: At) -> CheckpointStatus:
    if status.phase in TERMINAL and status.phase != phase:
        raise ValueError(f"a checkpoint does not go from {status.phase} to {phase}")
    value = _SUCCEEDED.get(phase, "Unknown")
    conditions = put(status.conditions, ConditionType.SUCCEEDED, value, reason, message, at.generation, at.now)
    if phase == "Failed":
        conditions = put(conditions, ConditionType.STALLED, "True", reason, message, at.generation, at.now)
    return status.model_copy(
        update={
            "observed_generation": at.generation,
            "phase": phase,
            "reason": reason[:128],
            "message": clip(message),
            "conditions": conditions,
        }
    )
