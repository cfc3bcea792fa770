"""What came of checking a checkpoint, participant by participant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gym_operator.plugin.views.table import Table
from gym_operator.plugin.views.text import count_of, size

Document = Mapping[str, Any]
GOOD = "good"


@dataclass(frozen=True)
class Checked:
    """A participant of a cell's part. `problem` is what does not verify, empty where all does."""

    uri: str
    cell: int
    participant: str
    records: int
    bytes: int
    problem: str


def document_of(wanted: str, digests: Mapping[str, str], checked: Sequence[Checked]) -> Document:
    """`digests`: of each place, the SHA-256 of the checkpoint.json there."""
    return {
        "checkpoint": wanted,
        "places": [{"uri": uri, "digest": digest} for uri, digest in digests.items()],
        "verified": not any(each.problem for each in checked),
        "participants": [
            {
                "uri": each.uri,
                "cell": each.cell,
                "name": each.participant,
                "records": each.records,
                "bytes": each.bytes,
                "result": each.problem or GOOD,
            }
            for each in checked
        ],
    }


def tables_of(document: Document, *, wide: bool) -> list[Table]:
    """`wide`: also where they are."""
    headings = ["CELL", "PARTICIPANT", "RECORDS", "SIZE", "RESULT", *(["PLACE"] if wide else [])]
    rows = [
        [str(one["cell"]), one["name"], str(one["records"]), size(one["bytes"]), one["result"]]
        + ([one["uri"]] if wide else [])
        for one in document["participants"]
    ]
    places = [[place["uri"], place["digest"]] for place in document["places"]]
    return [Table(("PLACE", "DIGEST"), places), Table(headings, rows)]


def failure_of(document: Document) -> str:
    """In one line, what does not verify; empty where all does."""
    bad = [one for one in document["participants"] if one["result"] != GOOD]
    if not bad:
        return ""
    first = f"{bad[0]['name']} of cell {bad[0]['cell']}: {bad[0]['result']}"
    more = f", and {count_of(len(bad) - 1, 'more participant')}" if len(bad) > 1 else ""
    return f"{document['checkpoint']} does not verify: {first}{more}; it cannot be restored, restore an older one"
