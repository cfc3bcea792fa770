"""Tokens of several streams as one object, for what runs beside an engine to hand them over through storage."""

from __future__ import annotations

import json
from collections.abc import Mapping

from gym_servers.capture.arrays import ArrayReader, to_bytes
from gym_servers.capture.tokens import Frozen, Span
from gym_servers.protocol.digests import canonical

FORMAT = 1


def pack(streams: Mapping[str, Frozen]) -> bytes:
    """Tokens by ticket: a line of JSON, then arrays. Equal tokens make equal bytes."""
    tickets = sorted(streams)
    entries = [
        {
            "ticket": ticket,
            "generated": len(streams[ticket].ids),
            "spans": [[span.version, span.start, span.end] for span in streams[ticket].spans],
            "finish": streams[ticket].finish,
        }
        for ticket in tickets
    ]
    arrays = b"".join(to_bytes(streams[ticket].ids) + to_bytes(streams[ticket].logprobs) for ticket in tickets)
    return canonical({"format": FORMAT, "streams": entries}) + b"\n" + arrays


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
