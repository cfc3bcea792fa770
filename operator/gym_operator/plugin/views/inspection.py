"""What is inside of a checkpoint: its participants, its episodes with their stages, and what starts over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gym_operator.api.objects import format_time, parse_time
from gym_operator.plugin.views.table import Table
from gym_operator.plugin.views.text import age, size
from gym_servers.protocol.identity import parse_key
from gym_servers.storage.manifest import Manifest, Member, Publication

Document = Mapping[str, Any]


@dataclass(frozen=True)
class Part:
    """One cell's part of a checkpoint as it was read. `stages`: of each episode, by capture key."""

    uri: str
    digest: str
    publication: Publication
    manifests: Mapping[str, Manifest]
    stages: Mapping[str, str]


def document_of(wanted: str, parts: Sequence[Part]) -> Document:
    """What is shown of a checkpoint that was asked for by this name or place."""
    return {"checkpoint": wanted, "parts": [_part(part) for part in parts]}


def tables_of(document: Document, now: float, *, wide: bool) -> list[Table]:
    """`now` in Unix seconds; `wide`: also what wrote the records."""
    told: list[Table] = []
    for part in document["parts"]:
        told += [_place_table(part), _part_table(part, now), _participant_table(part, wide=wide)]
        told += [_episode_table(part), _over_table(part)]
    return told


# ---- the document ---------------------------------------------------------------------------------------------


def _part(part: Part) -> dict[str, Any]:
    found = part.publication
    return {
        "uri": part.uri,
        "digest": part.digest,
        "name": found.name,
        "id": found.checkpoint_id,
        "stackUID": found.stack_uid,
        "cell": found.cell,
        "attempt": found.cell_attempt,
        "created": format_time(found.created),
        "labels": found.labels,
        **({"driverState": found.driver_state} if found.driver_state is not None else {}),
        "bytes": sum(member.bytes for member in found.members),
        "participants": [_participant(member) for member in found.members],
        "episodes": _episodes(part),
        "startOver": _starting_over(found),
    }


def _participant(member: Member) -> dict[str, Any]:
    return {
        "name": member.instance,
        "kind": member.kind,
        "server": member.code.server,
        "image": member.code.image,
        "recordFormat": member.code.record_format,
        "records": member.records,
        "bytes": member.bytes,
    }


def _episodes(part: Part) -> list[dict[str, Any]]:
    boundaries, captured = _bytes_of(part, "environment"), _bytes_of(part, "model")
    return [
        {
            "episode": key,
            "rollout": parse_key(key).rollout_id,
            "attempt": parse_key(key).attempt,
            "stage": part.stages.get(key, ""),
            "boundaryBytes": boundaries[key],
            "capturedBytes": captured[key],
        }
        for key in sorted(part.publication.episodes)
    ]


def _bytes_of(part: Part, kind: str) -> Counter[str]:
    """What participants of a kind have written of each episode. Agents and resources write of sessions, by other
    names."""
    found = Counter[str]()
    for manifest in part.manifests.values():
        if manifest.kind == kind:
            found.update({record.id: record.length for record in manifest.records})
    return found


def _starting_over(found: Publication) -> list[dict[str, Any]]:
    why = {"cannot be continued": found.restarts, "had not begun": found.not_started, "left out": found.left_out}
    return [{"episode": key, "reason": reason} for reason, keys in why.items() for key in sorted(keys)]


# ---- the tables -----------------------------------------------------------------------------------------------


def _place_table(part: Document) -> Table:
    return Table(("PLACE", "DIGEST"), [[part["uri"], part["digest"]]])


def _part_table(part: Document, now: float) -> Table:
    row = [
        part["name"],
        str(part["cell"]),
        str(part["attempt"]),
        age(now - parse_time(part["created"])),
        str(len(part["episodes"])),
        str(len(part["startOver"])),
        size(part["bytes"]),
        ",".join(f"{key}={value}" for key, value in sorted(part["labels"].items())),
    ]
    return Table(("CHECKPOINT", "CELL", "ATTEMPT", "AGE", "EPISODES", "STARTING OVER", "SIZE", "LABELS"), [row])


def _participant_table(part: Document, *, wide: bool) -> Table:
    headings = ["PARTICIPANT", "KIND", "SERVER", "RECORDS", "SIZE", *(["FORMAT", "IMAGE"] if wide else [])]
    rows = [
        [one["name"], one["kind"], one["server"], str(one["records"]), size(one["bytes"])]
        + ([str(one["recordFormat"]), one["image"]] if wide else [])
        for one in part["participants"]
    ]
    return Table(headings, rows)


def _episode_table(part: Document) -> Table:
    rows = [
        [one["episode"], one["stage"], size(one["boundaryBytes"]), size(one["capturedBytes"])]
        for one in part["episodes"]
    ]
    return Table(("EPISODE", "STAGE", "BOUNDARY", "CAPTURED"), rows)


def _over_table(part: Document) -> Table:
    return Table(("STARTING OVER", "WHY"), [[one["episode"], one["reason"]] for one in part["startOver"]])
