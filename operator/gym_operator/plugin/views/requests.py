"""The objects that verbs make of what people write, checked before the API server sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from gym_operator.api.checkpoint import CheckpointSpec
from gym_operator.api.restore import RestoreSpec
from gym_operator.plugin.exits import Unusable
from gym_operator.plugin.views.places import folder_of
from gym_servers.stack.durations import parse_duration
from gym_servers.stack.spec import SpecError

Body = dict[str, Any]


def dated_name(prefix: str, now: float) -> str:
    """A name that tells when it was made; `now` in Unix seconds."""
    return f"{prefix}-{datetime.fromtimestamp(now, UTC).strftime('%Y%m%d%H%M%S')}"


def labels_of(pairs: Sequence[str]) -> dict[str, str]:
    """Labels as people write them, such as step=120. Raises Unusable."""
    labels = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise Unusable(f"{pair!r} is no label: write a name and a value, such as step=120")
        labels[key] = value
    return labels


def seconds_of(option: str, text: str) -> int:
    """A duration such as 5m. Raises Unusable."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise Unusable(f"{option} {text}: {error}") from error


def new_checkpoint(name: str, stack: str, labels: Mapping[str, str], *, stop_after: bool) -> Body:
    """A GymCheckpoint of a stack. Raises Unusable."""
    spec: Body = {"stackRef": {"name": stack}}
    if labels:
        spec["labels"] = dict(labels)
    if stop_after:
        spec["stopAfter"] = True
    try:
        CheckpointSpec.parse(spec)
    except SpecError as error:
        raise Unusable(str(error)) from error
    return {"metadata": {"name": name}, "spec": spec}


def new_restore(name: str, stack: str, source: Mapping[str, Any]) -> Body:
    """A GymRestore of a stack. Raises Unusable."""
    spec: Body = {"stackRef": {"name": stack}, **source}
    try:
        RestoreSpec.parse(spec)
    except SpecError as error:
        raise Unusable(str(error)) from error
    return {"metadata": {"name": name}, "spec": spec}


def source_of(wanted: str, digest: str | None) -> Body:
    """What a restore is from, as people write it: the name of a GymCheckpoint, labels such as step=120, or a place.
    A place is told by its slash. Raises Unusable."""
    if "/" in wanted:
        if digest is None:
            raise Unusable(
                f"{wanted} is a place, and a place alone proves nothing: give its digest with --digest; kubectl gym "
                f"inspect {wanted} shows it"
            )
        return {"uri": folder_of(wanted), "digest": digest}
    if digest is not None:
        raise Unusable("--digest is for a place: leave it out, a GymCheckpoint knows its own")
    return {"labels": labels_of(wanted.split(","))} if "=" in wanted else {"checkpointRef": {"name": wanted}}
