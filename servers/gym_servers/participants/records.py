"""Records as bytes and back: JSON with a format version, and errors that name the record."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gym_servers.protocol.digests import canonical
from gym_servers.protocol.errors import ProtocolError

FORMAT = 1


def to_bytes(record: dict[str, Any]) -> bytes:
    return canonical({"format": FORMAT, **record})


async def encoded(records: Mapping[str, dict[str, Any]]) -> dict[str, bytes]:
    """These records as bytes. That is done off the event loop, which serves the coordinator meanwhile: a cell may
    hold hundreds of megabytes. So nothing that `records` refers to may be changed in place from here on."""
    return await asyncio.to_thread(lambda: {name: to_bytes(record) for name, record in records.items()})


def from_bytes(name: str, data: bytes) -> dict[str, Any]:
    """Raises `invalid_checkpoint_state` for anything but a record of a format we know."""
    try:
        record = json.loads(data)
    except ValueError as error:
        raise ProtocolError("invalid_checkpoint_state", f"record {name} is not JSON") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ProtocolError("invalid_checkpoint_state", f"record {name} is not of format {FORMAT}")
    return record


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns a missing or ill-typed field of record `name` into `invalid_checkpoint_state`."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            "invalid_checkpoint_state", f"record {name}: {type(error).__name__} at {error}"
        ) from error
