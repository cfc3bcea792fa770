"""Checkpoints: the table of a stack's, and what is said of one while it is taken and when it is done."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gym_operator.api.checkpoint import CheckpointStatus
from gym_operator.api.objects import parse_time
from gym_operator.plugin.views.table import Table
from gym_operator.plugin.views.text import age, count_of, size

Document = Mapping[str, Any]

NAMED_BLOCKERS = 3
"""That a line of progress names."""


def document_of(stack: str, checkpoints: Iterable[Mapping[str, Any]]) -> Document:
    """What is shown of a stack's checkpoints, the oldest first."""
    mine = [body for body in checkpoints if ((body.get("spec") or {}).get("stackRef") or {}).get("name") == stack]
    mine.sort(key=lambda body: (body["metadata"]["creationTimestamp"], body["metadata"]["name"]))
    return {"stack": stack, "checkpoints": [_entry(body) for body in mine]}


def _entry(body: Mapping[str, Any]) -> dict[str, Any]:
    status, spec = status_of(body), body.get("spec") or {}
    places = [
        {"cell": cell.index, "uri": cell.uri, **({"digest": cell.digest} if cell.digest else {})}
        for cell in status.cells
        if cell.uri
    ]
    told = status.document()
    kept = ("reason", "message", "checkpointID", "stackUID", "pauseSeconds", "completionTime")
    return {
        "name": body["metadata"]["name"],
        "created": body["metadata"]["creationTimestamp"],
        "phase": phase_of(body),
        "episodes": status.episodes,
        "bytes": status.bytes,
        "restartCount": status.restart_count,
        "labels": spec.get("labels") or {},
        "deletionPolicy": spec.get("deletionPolicy") or "Retain",
        "places": places,
        **{name: told[name] for name in kept if name in told},
    }


def tables_of(document: Document, now: float, *, wide: bool) -> list[Table]:
    """`now` in Unix seconds; `wide`: also where it is, and what becomes of its data."""
    headings = ["CHECKPOINT", "PHASE", "AGE", "EPISODES", "SIZE", "PAUSE", "LABELS", "REASON"]
    if wide:
        headings += ["DATA", "PLACES"]
    return [Table(headings, [_row(each, now, wide) for each in document["checkpoints"]])]


def _row(entry: Document, now: float, wide: bool) -> list[str]:
    pause, done = entry.get("pauseSeconds"), entry["phase"] == "Succeeded"
    row = [
        entry["name"],
        entry["phase"],
        age(now - parse_time(entry["created"])),
        str(entry["episodes"]) if done else "",
        size(entry["bytes"]) if done else "",
        "" if pause is None else f"{pause:.1f}s",
        ",".join(f"{key}={value}" for key, value in sorted(entry["labels"].items())),
        "" if done else entry.get("reason", ""),
    ]
    if wide:
        row += [entry["deletionPolicy"], ",".join(p["uri"] for p in entry["places"])]
    return row


# ---- one of them ----------------------------------------------------------------------------------------------


def status_of(body: Mapping[str, Any]) -> CheckpointStatus:
    """The status of a GymCheckpoint, also of one that this version would refuse."""
    return CheckpointStatus.model_validate(body.get("status") or {})


def phase_of(body: Mapping[str, Any]) -> str:
    """Where it stands."""
    return "Deleting" if body["metadata"].get("deletionTimestamp") else status_of(body).phase or "Pending"


def progress_of(body: Mapping[str, Any]) -> str:
    """A line about one that is being taken."""
    status = status_of(body)
    line = phase_of(body)
    if len(status.cells) > 1:
        done = sum(cell.phase == "Succeeded" for cell in status.cells)
        line += f", {done} of {count_of(len(status.cells), 'cell')} done"
    if status.blockers:
        first = [f"{each.id} ({each.participant}, {each.where or 'running'})" for each in status.blockers]
        more = len(first) - NAMED_BLOCKERS
        line += f": waits for {', '.join(first[:NAMED_BLOCKERS])}" + (f" and {more} more" if more > 0 else "")
    elif status.phase in (None, "Pending") and status.message:
        line += f": {status.message}"
    return line


def outcome_of(body: Mapping[str, Any]) -> str:
    """A line about one that has succeeded."""
    status = status_of(body)
    pause = "" if status.pause_seconds is None else f", paused for {status.pause_seconds:.1f}s"
    over = f", {status.restart_count} would start over" if status.restart_count else ""
    return f"{count_of(status.episodes, 'rollout')} in {size(status.bytes)}{pause}{over}"


def failure_of(body: Mapping[str, Any]) -> str:
    """Why one has failed."""
    status = status_of(body)
    return ": ".join(text for text in (status.reason, status.message) if text) or "without a reason"


def blockers_of(body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """What held it up."""
    return [blocker.document() for blocker in status_of(body).blockers]
