"""What a GymRestore restores, whether it fits, how far it is, and what its status says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gym_operator.api.conditions import ConditionReason, ConditionStatus, ConditionType
from gym_operator.api.objects import clip, format_time
from gym_operator.api.restore import (
    MAX_CONTINUED,
    MAX_PASSED_OVER,
    RESTORE_TERMINAL,
    Continued,
    PassedOver,
    RestoreCell,
    RestoredCheckpoint,
    RestorePhase,
    RestoreSpec,
    RestoreStatus,
)
from gym_operator.rules.checkpoint_entries import Entry, entry_of
from gym_operator.rules.checkpoint_queue import PATIENCE_SECONDS
from gym_operator.rules.conditions import put
from gym_servers.coordination.record import CellRecord, Hold, Stage
from gym_servers.protocol.identity import next_attempt, parse_key
from gym_servers.stack.spec import COLLECTION, Participant
from gym_servers.storage.manifest import Publication


@dataclass(frozen=True)
class Place:
    """Where one cell's part is, and the digest that proves it. `cell` is None where only the part itself says."""

    uri: str
    digest: str
    cell: int | None = None


@dataclass(frozen=True)
class Found:
    """What is to be restored."""

    places: tuple[Place, ...]


@dataclass(frozen=True)
class Wait:
    """It is not there yet. `patient`: it is on its way, so that waiting has an end."""

    reason: ConditionReason
    message: str
    patient: bool


@dataclass(frozen=True)
class Refuse:
    """It cannot be restored."""

    reason: ConditionReason
    message: str


# ---- what is restored -----------------------------------------------------------------------------------------


def by_place(spec: RestoreSpec) -> Found | None:
    """The checkpoint that the spec itself places; None where a GymCheckpoint has to be asked."""
    if spec.uri is None or spec.digest is None:
        return None
    return Found((Place(spec.uri.rstrip("/"), spec.digest),))


def chosen(status: RestoreStatus) -> Found | None:
    """The checkpoint that an earlier look has chosen; None where none has yet."""
    if not status.cells:
        return None
    return Found(tuple(Place(cell.uri, cell.digest, cell.index) for cell in status.cells))


def by_checkpoint(body: Mapping[str, Any] | None, name: str) -> Found | Wait | Refuse:
    """The checkpoint that a GymCheckpoint stands for."""
    if body is None:
        message = (
            f"there is no GymCheckpoint {name} in this namespace; create it, or name another in a new GymRestore"
        )
        return Wait(ConditionReason.CHECKPOINT_NOT_FOUND, message, patient=False)
    status, phase = body.get("status") or {}, entry_of(body).phase
    if body["metadata"].get("deletionTimestamp"):
        return Refuse(ConditionReason.CHECKPOINT_DELETED, f"GymCheckpoint {name} is being deleted")
    if phase == "Failed":
        return Refuse(ConditionReason.CHECKPOINT_FAILED, f"GymCheckpoint {name} failed: {status.get('message', '')}")
    if phase != "Succeeded":
        message = f"waits until GymCheckpoint {name} is finished; it is {phase}"
        return Wait(ConditionReason.CHECKPOINT_NOT_READY, message, patient=True)
    places = [
        Place(cell["uri"], cell["digest"], int(cell["index"]))
        for cell in status.get("cells") or ()
        if cell.get("uri") and cell.get("digest")
    ]
    if not places:
        return Refuse(ConditionReason.SOURCE_INVALID, f"GymCheckpoint {name} does not say where its data is")
    return Found(tuple(places))


@dataclass(frozen=True)
class Labelled:
    """The search for the newest checkpoint of a stack that has these labels in its spec, from one page of
    GymCheckpoints to the next: `newest` is the best so far, and nothing else is kept. Those at the places `but` count
    for nothing. `coming` is the name of one that has them and is not finished, empty where there is none."""

    labels: Mapping[str, str]
    stack: str
    stack_uid: str
    but: frozenset[str] = frozenset()
    newest: Mapping[str, Any] | None = None
    coming: str = ""

    def seen(self, bodies: Iterable[Mapping[str, Any]]) -> Labelled:
        """What is known after these GymCheckpoints too."""
        having = [
            body
            for body in bodies
            if self.labels.items() <= ((body.get("spec") or {}).get("labels") or {}).items()
            and _stays(body, self.stack)
            and self.but.isdisjoint(part.uri for part in entry_of(body).parts)
        ]
        best = having if self.newest is None else [self.newest, *having]
        coming = next((body["metadata"]["name"] for body in having if not entry_of(body).over), "")
        return replace(self, newest=_newest(best, self.stack_uid), coming=self.coming or coming)

    def found(self) -> Found | Wait | Refuse:
        """What came of it, once all were seen."""
        if self.newest is not None:
            return by_checkpoint(self.newest, self.newest["metadata"]["name"])
        wanted = ", ".join(f"{key}: {value}" for key, value in sorted(self.labels.items()))
        if self.coming:
            message = f"waits until GymCheckpoint {self.coming}, which has {wanted}, is finished"
            return Wait(ConditionReason.CHECKPOINT_NOT_READY, message, patient=True)
        message = f"no GymCheckpoint of stack {self.stack} that succeeded has {wanted} in spec.labels"
        return Wait(ConditionReason.CHECKPOINT_NOT_FOUND, message, patient=False)


def newest_good(bodies: Iterable[Mapping[str, Any]], stack: str, stack_uid: str) -> Mapping[str, Any] | None:
    """The newest GymCheckpoint of a stack that has succeeded and is not being deleted, None where there is none."""
    return _newest((body for body in bodies if _stays(body, stack)), stack_uid)


def _stays(body: Mapping[str, Any], stack: str) -> bool:
    """Whether a GymCheckpoint is one of the stack, and not being deleted."""
    entry = entry_of(body)
    return entry.stack == stack and not entry.deleting


def _newest(bodies: Iterable[Mapping[str, Any]], stack_uid: str) -> Mapping[str, Any] | None:
    """The newest of those that have succeeded."""
    good = (body for body in bodies if entry_of(body).phase == "Succeeded")
    return max(good, key=lambda body: _age_order(entry_of(body), stack_uid), default=None)


def _age_order(entry: Entry, stack_uid: str) -> tuple[bool, tuple[int, int], float, str]:
    """The stack's own come in the order they were taken in; those of others, before all of them, by their end."""
    own = entry.stack_uid == stack_uid
    order = max((part.order for part in entry.parts), default=(0, 0)) if own else (0, 0)
    return own, order, entry.ended or 0.0, entry.name


# ---- whether it fits ------------------------------------------------------------------------------------------


def misfit(publication: Publication, participants: Sequence[Participant]) -> str:
    """Why the servers of a stack cannot take a checkpoint's records, with what to do; empty where they can.

    All or nothing: records that nobody would take are a reason too. A driver's apart: another may drive on.
    """
    there = {(member.kind, member.instance): member.code.server for member in publication.members}
    here = {(each.kind, each.name): each.server for each in participants}
    if missing := sorted(name for kind, name in here if (kind, name) not in there):
        return f"the checkpoint has no records of {', '.join(missing)}; name servers as those it was taken of"
    if homeless := sorted(name for kind, name in there if (kind, name) not in here and kind != COLLECTION):
        return f"the stack has no server for the records of {', '.join(homeless)}; add it to spec.servers"
    others = [
        f"{name} is {server} and was {there[kind, name]}"
        for (kind, name), server in here.items()
        if there[kind, name] != server
    ]
    return f"the records are of other servers: {'; '.join(sorted(others))}" if others else ""


def highest_attempt_of(publication: Publication) -> int:
    """The highest attempt that a checkpoint's rollouts have used: what continues must be above it."""
    keys = (*publication.episodes, *publication.restarts, *publication.not_started)
    return max((publication.cell_attempt, *(parse_key(key).attempt for key in keys)))


def continued(publication: Publication, cell_attempt: int, cell: int) -> list[Continued]:
    """What continues from a checkpoint in a cell, and under which attempt."""
    episodes = (parse_key(key) for key in publication.episodes)
    return [
        Continued(rollout=each.rollout_id, attempt=next_attempt(each.attempt, cell_attempt), cell=cell)
        for each in episodes
    ]


# ---- how far it is --------------------------------------------------------------------------------------------

_INSTEAD = "the stack goes on from its own newest checkpoint"


def progress(record: CellRecord, uid: str, begun: bool, backoff_limit: int) -> RestorePhase | tuple[str, str]:
    """Where one cell stands with the restore of this UID: Pending before it begins, Restoring, Succeeded, or why it
    is to be given up: a reason, and for people."""
    chosen = record.chosen
    if chosen is None or chosen.by != uid:
        if not begun:
            return "Pending"
        if chosen is not None:
            return ConditionReason.SUPERSEDED, "another restore of this stack was begun since"
        return ConditionReason.RECORDS_REFUSED, f"the servers did not take its records, as events say; {_INSTEAD}"
    if record.held and record.held_for is Hold.CODE:
        return ConditionReason.CODE_MISMATCH, f"{record.held}; {_INSTEAD}"
    if record.stage in (Stage.RUNNING, Stage.STOPPED):  # a checkpoint may have stopped it at once
        return "Succeeded"
    stalled = record.stage is Stage.STALLED  # then its last failure was not followed by a try
    if stalled or record.failures > backoff_limit:
        tries = record.failures + (0 if stalled else 1)
        message = f"the servers did not come into service in {tries} tries; {_INSTEAD}"
        return ConditionReason.BACKOFF_LIMIT_EXCEEDED, message
    return "Restoring"


def is_finished(body: Mapping[str, Any]) -> bool:
    """Whether nothing more comes of a restore."""
    return (body.get("status") or {}).get("phase") in RESTORE_TERMINAL


def failed_ones(restores: Iterable[Mapping[str, Any]]) -> set[str]:
    """The UIDs of restores that have failed: what they had chosen is not to be restored any more."""
    return {body["metadata"]["uid"] for body in restores if (body.get("status") or {}).get("phase") == "Failed"}


def held_by(restores: Iterable[Mapping[str, Any]]) -> tuple[set[str], set[tuple[str, str]]]:
    """What unfinished restores work from, or are about to: URIs, and GymCheckpoints by namespace and name."""
    uris: set[str] = set()
    names: set[tuple[str, str]] = set()
    for body in restores:
        spec, status = body.get("spec") or {}, body.get("status") or {}
        if is_finished(body):
            continue
        uris |= {cell["uri"] for cell in status.get("cells") or ()}
        if uri := spec.get("uri"):
            uris.add(uri.rstrip("/"))
        if name := (spec.get("checkpointRef") or {}).get("name"):
            names.add((body["metadata"]["namespace"], name))
    return uris, names


def in_order(restores: Iterable[Mapping[str, Any]], stack: str) -> list[Mapping[str, Any]]:
    """The unfinished restores of a stack, oldest first."""
    wanted = [
        body
        for body in restores
        if ((body.get("spec") or {}).get("stackRef") or {}).get("name") == stack
        and not is_finished(body)
        and not body["metadata"].get("deletionTimestamp")
    ]
    return sorted(wanted, key=lambda body: (body["metadata"]["creationTimestamp"], body["metadata"]["name"]))


# ---- its status -----------------------------------------------------------------------------------------------


def waiting(status: RestoreStatus, reason: str, message: str, generation: int, now: float) -> RestoreStatus:
    """Pending, and why."""
    return _told(status, "Pending", reason, message, generation, now)


def choosing(status: RestoreStatus, places: Sequence[Place], generation: int, now: float) -> RestoreStatus:
    """A checkpoint was chosen, and is read. Where it is stands in the status from now on, if the spec does not say
    it: what an unfinished restore names is held."""
    message = "the checkpoint is read, and every digest checked"
    told = waiting(status, ConditionReason.IN_PROGRESS, message, generation, now)
    return told.model_copy(update={"cells": _parts(place for place in places if place.cell is not None)})


def passing_over(status: RestoreStatus, why: str, generation: int, now: float) -> RestoreStatus | None:
    """That the data of the checkpoint that was chosen is not whole: the next older one with the labels is looked for.
    None where that was so too often, or none was chosen."""
    if not status.cells or len(status.passed_over) == MAX_PASSED_OVER:
        return None
    passed = PassedOver(uri=status.cells[0].uri, message=clip(why, 256))
    told = waiting(status, ConditionReason.IN_PROGRESS, f"passes over {passed.uri}: {why}", generation, now)
    return told.model_copy(update={"cells": (), "passed_over": (*status.passed_over, passed)})


def none_whole(passed: Sequence[PassedOver]) -> str:
    """That of no checkpoint with the labels the data is whole."""
    return (
        f"the data of no checkpoint with these labels is whole: {'; '.join(f'{p.uri}: {p.message}' for p in passed)}"
    )


def restoring(
    status: RestoreStatus, checkpoint: RestoredCheckpoint, places: Sequence[Place], generation: int, now: float
) -> RestoreStatus:
    """Under way; no cell has begun yet."""
    message = f"the servers are replaced, and continue from checkpoint {checkpoint.name}{_passed(status)}"
    told = _told(status, "Restoring", ConditionReason.RESTORING, message, generation, now)
    return told.model_copy(update={"checkpoint": checkpoint, "start_time": format_time(now), "cells": _parts(places)})


def _passed(status: RestoreStatus) -> str:
    return "".join(f"; {each.uri} was passed over: {each.message}" for each in status.passed_over)


def _parts(places: Iterable[Place]) -> tuple[RestoreCell, ...]:
    return tuple(RestoreCell(index=place.cell or 0, uri=place.uri, digest=place.digest) for place in places)


def begun(status: RestoreStatus, attempts: Mapping[int, int | None]) -> RestoreStatus:
    """The status with the attempts that the cells have begun with it, by their numbers."""
    cells = tuple(cell.model_copy(update={"attempt": attempts[cell.index]}) for cell in status.cells)
    return status.model_copy(update={"cells": cells})


def succeeded(status: RestoreStatus, going_on: Sequence[Continued], generation: int, now: float) -> RestoreStatus:
    """The stack continues from the checkpoint."""
    name = status.checkpoint.name if status.checkpoint is not None else ""
    message = f"{len(going_on)} rollouts continue from checkpoint {name}{_passed(status)}"
    told = _told(status, "Succeeded", ConditionReason.RESTORED, message, generation, now)
    return told.model_copy(
        update={
            "continued_count": len(going_on),
            "continued": tuple(going_on[:MAX_CONTINUED]),
            "completion_time": format_time(now),
        }
    )


def without_stack(status: RestoreStatus, stack: str, age: float, generation: int, now: float) -> RestoreStatus:
    """That there is no such stack, for good once the restore is old or had begun. `age` in seconds."""
    if status.phase == "Restoring":
        return failed(status, ConditionReason.STACK_NOT_FOUND, f"GymStack {stack} was deleted", generation, now)
    message = f"there is no GymStack {stack} in this namespace; create it, or name another in a new GymRestore"
    if age > PATIENCE_SECONDS:
        return failed(status, ConditionReason.STACK_NOT_FOUND, message, generation, now)
    return waiting(status, ConditionReason.STACK_NOT_FOUND, message, generation, now)


def failed(status: RestoreStatus, reason: str, message: str, generation: int, now: float) -> RestoreStatus:
    """Given up, and why."""
    told = _told(status, "Failed", reason, message, generation, now)
    return told.model_copy(update={"completion_time": format_time(now)})


_SUCCEEDED: Mapping[RestorePhase, ConditionStatus] = {"Succeeded": "True", "Failed": "False"}
_BEFORE: Mapping[RestorePhase, frozenset[RestorePhase | None]] = {
    "Pending": frozenset({None, "Pending"}),
    "Restoring": frozenset({None, "Pending"}),
    "Succeeded": frozenset({"Restoring"}),
    "Failed": frozenset({None, "Pending", "Restoring"}),
}


def _told(
    status: RestoreStatus, phase: RestorePhase, reason: str, message: str, generation: int, now: float
) -> RestoreStatus:
    """Raises ValueError for a move that is not in the table: a fault of ours."""
    if status.phase not in _BEFORE[phase]:
        raise ValueError(f"a restore does not go from {status.phase} to {phase}")
    value = _SUCCEEDED.get(phase, "Unknown")
    conditions = put(status.conditions, ConditionType.SUCCEEDED, value, reason, message, generation, now)
    if phase == "Failed":
        conditions = put(conditions, ConditionType.STALLED, "True", reason, message, generation, now)
    return status.model_copy(
        update={
            "observed_generation": generation,
            "phase": phase,
            "reason": str(reason),
            "message": clip(message),
            "conditions": conditions,
        }
    )
