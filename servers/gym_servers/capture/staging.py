"""Tokens of several streams as one object, for what runs beside an engine to hand them over through storage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gym_servers.capture.arrays import ArrayReader, to_bytes
from gym_servers.capture.tokens import Frozen, Span
from gym_servers.protocol.digests import canonical, sha256

FORMAT = 2


def pack(streams: Mapping[str, Frozen], others: Mapping[str, str]) -> bytes:
    """Tokens by ticket, and of the `others` what became of them: a line of JSON, then arrays. Equal tokens make equal
    bytes."""
    tickets = sorted(streams)
    entries = [{"ticket": ticket, **_head(streams[ticket])} for ticket in tickets]
    arrays = b"".join(_arrays(streams[ticket]) for ticket in tickets)
    return canonical({"format": FORMAT, "streams": entries, "others": others}) + b"\n" + arrays


def digest(tokens: Frozen) -> str:
    """Of all that `pack` says of one stream."""
    return sha256(canonical(_head(tokens)) + _arrays(tokens))


def _head(tokens: Frozen) -> dict[str, Any]:
    spans = [[span.version, span.start, span.end] for span in tokens.spans]
    return {"generated": len(tokens.ids), "spans": spans, "finish": tokens.finish}


def _arrays(tokens: Frozen) -> bytes:
    return to_bytes(tokens.ids) + to_bytes(tokens.logprobs)


def unpack(data: bytes) -> dict[str, Frozen]:
    """Raises ValueError for what is not whole, or of another form."""
    head, _, rest = data.partition(b"\n")
    try:
        record = json.loads(head)
        if record["format"] != FORMAT:
            raise ValueError(f"format {record['format']} is not {FORMAT}")
        arrays, streams = ArrayReader(rest), {}
        for entry in record["streams"]:
            count = int(entry["generated"])
            ids, logprobs = arrays.ints(count), arrays.floats(count)
            spans = tuple(Span(str(version), int(start), int(end)) for version, start, end in entry["spans"])
            streams[str(entry["ticket"])] = Frozen(ids, logprobs, spans, entry["finish"])
        arrays.end()
        return streams
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"staged tokens of another form: {type(error).__name__}") from error
