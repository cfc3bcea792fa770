"""How a stack is, on one page: itself, its cells, what is being checkpointed, what holds that up, what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gym_operator.api.checkpoint import TERMINAL, CheckpointStatus
from gym_operator.api.conditions import Condition, ConditionType
from gym_operator.api.objects import parse_time
from gym_operator.api.stack import CellStatus, CollectionProgress, LastCheckpoint, StackStatus
from gym_operator.plugin.views.table import Table
from gym_operator.plugin.views.text import NOTHING, age

_GOOD: Final[Mapping[ConditionType, str]] = {
    ConditionType.READY: "True",
    ConditionType.RECOVERING: "False",
    ConditionType.STORAGE_READY: "True",
    ConditionType.ENGINE_READY: "True",
    ConditionType.UP_TO_DATE: "True",
    ConditionType.STALLED: "False",
}
"""How conditions are where nobody need know of them. That a checkpoint is being taken is no trouble."""

Document = Mapping[str, Any]


def document_of(stack: Mapping[str, Any], checkpoints: Iterable[Mapping[str, Any]]) -> Document:
    """What is shown of a stack as the API server holds it. `checkpoints`: the GymCheckpoints of its namespace."""
    name, status = stack["metadata"]["name"], _status(stack)
    mine = [body for body in checkpoints if _stack_of(body) == name]
    return {
        "name": name,
        "namespace": stack["metadata"]["namespace"],
        "phase": status.phase or "Pending",
        "attempt": status.attempt,
        "wantedCells": int((stack.get("spec") or {}).get("cells") or 1),
        **_optional("collection", status.collection),
        **_optional("lastCheckpoint", status.last_checkpoint),
        "cells": [cell.model_copy(update={"record": None}).document() for cell in status.cells],
        "checkpoints": [_brief(body) for body in _worth_telling(mine)],
        "trouble": [condition.document() for condition in status.conditions if _is_trouble(condition)],
    }


def tables_of(document: Document, now: float, *, wide: bool) -> list[Table]:
    """The page. `now` in Unix seconds; `wide`: also each participant."""
    cells = [CellStatus.model_validate(cell) for cell in document["cells"]]
    told = [_stack_table(document, cells, now), _cell_table(cells, now)]
    if wide:
        told.append(_participant_table(cells))
    return [*told, _checkpoint_table(document), _blocker_table(document, now), _trouble_table(document)]


def is_under_way(body: Mapping[str, Any]) -> bool:
    """Whether a GymCheckpoint is not final yet."""
    return (body.get("status") or {}).get("phase") not in TERMINAL


# ---- the document ---------------------------------------------------------------------------------------------


def _status(stack: Mapping[str, Any]) -> StackStatus:
    return StackStatus.model_validate(stack.get("status") or {})


def _stack_of(checkpoint: Mapping[str, Any]) -> str:
    return str(((checkpoint.get("spec") or {}).get("stackRef") or {}).get("name") or "")


def _optional(name: str, value: CollectionProgress | LastCheckpoint | None) -> dict[str, Any]:
    return {} if value is None else {name: value.document()}


def _worth_telling(checkpoints: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that are being taken or wait for it, and the newest one where it has failed."""
    by_age = sorted(checkpoints, key=lambda body: (body["metadata"]["creationTimestamp"], body["metadata"]["name"]))
    told = [body for body in by_age if is_under_way(body)]
    done = [body for body in by_age if not is_under_way(body)]
    newest = done[-1:] if not told else []
    return told + [body for body in newest if body["status"]["phase"] == "Failed"]


def _brief(body: Mapping[str, Any]) -> dict[str, Any]:
    status = CheckpointStatus.model_validate(body.get("status") or {})
    return {
        "name": body["metadata"]["name"],
        "phase": status.phase or "Pending",
        **({"reason": status.reason} if status.reason else {}),
        **({"message": status.message} if status.message else {}),
        "blockers": [blocker.document() for blocker in status.blockers],
    }


def _is_trouble(condition: Condition) -> bool:
    good = {str(type): value for type, value in _GOOD.items()}
    return condition.type in good and condition.status != good[condition.type]


# ---- the tables -----------------------------------------------------------------------------------------------


def _stack_table(document: Document, cells: Sequence[CellStatus], now: float) -> Table:
    running = sum(cell.phase == "Running" for cell in cells)
    row = [
        document["name"],
        document["phase"],
        str(document["attempt"]),
        f"{running}/{document['wantedCells']}",
        _rollouts(
            CollectionProgress.model_validate(document.get("collection")) if "collection" in document else None
        ),
        *_last(
            LastCheckpoint.model_validate(document["lastCheckpoint"]) if "lastCheckpoint" in document else None, now
        ),
    ]
    return Table(("STACK", "PHASE", "ATTEMPT", "CELLS", "ROLLOUTS", "LAST CHECKPOINT", "AGE"), [row])


def _cell_table(cells: Sequence[CellStatus], now: float) -> Table:
    rows = [
        [
            str(cell.index),
            cell.phase,
            str(cell.attempt),
            _participants(cell),
            _rollouts(cell.collection),
            *_last(cell.last_checkpoint, now),
        ]
        for cell in cells
    ]
    return Table(("CELL", "PHASE", "ATTEMPT", "PARTICIPANTS", "ROLLOUTS", "LAST CHECKPOINT", "AGE"), rows)


def _participant_table(cells: Sequence[CellStatus]) -> Table:
    rows = [
        [str(cell.index), one.name, one.kind, one.phase or "", one.pod or "", one.session or ""]
        for cell in cells
        for one in cell.participants
    ]
    return Table(("CELL", "PARTICIPANT", "KIND", "PHASE", "POD", "SESSION"), rows)


def _checkpoint_table(document: Document) -> Table:
    rows = [[c["name"], c["phase"], c.get("reason", ""), c.get("message", "")] for c in document["checkpoints"]]
    return Table(("CHECKPOINT", "PHASE", "REASON", "MESSAGE"), rows)


def _blocker_table(document: Document, now: float) -> Table:
    return blocker_table([blocker for each in document["checkpoints"] for blocker in each["blockers"]], now)


def blocker_table(blockers: Iterable[Mapping[str, Any]], now: float) -> Table:
    """What a checkpoint waits for, or failed to wait for, as its status has it. `now` in Unix seconds."""

    def seconds(blocker: Mapping[str, Any]) -> float:
        return now - parse_time(blocker["since"]) if "since" in blocker else float(blocker.get("ageSeconds", 0))

    rows = [[b["id"], str(b.get("cell", 0)), b["participant"], b.get("where", ""), age(seconds(b))] for b in blockers]
    return Table(("BLOCKER", "CELL", "PARTICIPANT", "WHERE", "AGE"), rows)


def _trouble_table(document: Document) -> Table:
    rows = [[t["type"], t["status"], t["reason"], t.get("message", "")] for t in document["trouble"]]
    return Table(("CONDITION", "STATUS", "REASON", "MESSAGE"), rows)


def _participants(cell: CellStatus) -> str:
    phases = Counter(one.phase or "unknown" for one in cell.participants)
    return ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))


def _rollouts(progress: CollectionProgress | None) -> str:
    if progress is None:
        return NOTHING
    failed = f", {progress.failed} failed" if progress.failed else ""
    return f"{progress.rows}/{progress.expected}{failed}"


def _last(checkpoint: LastCheckpoint | None, now: float) -> tuple[str, str]:
    return ("", "") if checkpoint is None else (checkpoint.name, age(now - parse_time(checkpoint.time)))
