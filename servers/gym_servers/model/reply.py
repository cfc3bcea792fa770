"""What was generated for a call, before it takes the form of the API by which the call came."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gym_servers.model.conversation import Message
from gym_servers.model.dialect import Piece
from gym_servers.protocol.errors import ProtocolError


@dataclass(frozen=True)
class Head:
    """What is known of a reply before it is there. `stem`: the part that all of its ids have in common; `created` is
    Unix seconds."""

    stem: str
    model: str
    created: float


@dataclass(frozen=True)
class Reply:
    """`training`: token ids and log-probabilities for callers that want them with the reply, else empty."""

    head: Head
    message: Message
    prompt_tokens: int
    generated_tokens: int
    length: bool  # it ended because its budget was used up
    training: Mapping[str, Any]


class Event(NamedTuple):
    """One event of a stream: its name, None for none, and JSON, or a text that is sent as it is."""

    name: str | None
    data: Any


class Writer(Protocol):
    """Writes one reply as a stream: begin, any pieces, and end or failed."""

    def begin(self) -> Iterator[Event]: ...

    def piece(self, piece: Piece) -> Iterator[Event]: ...

    def end(self, body: Mapping[str, Any]) -> Iterator[Event]:
        """All that was not sent yet of a whole reply. Raises ProtocolError where it begins otherwise."""
        ...

    def failed(self, error: ProtocolError) -> Iterator[Event]: ...


class Sent:
    """What a client has of each field."""

    def __init__(self) -> None:
        self._texts: defaultdict[str, str] = defaultdict(str)

    def add(self, piece: Piece) -> None:
        self._texts[piece.field] += piece.text

    def rest(self, field: str, whole: str) -> str:
        """What it lacks. Raises ProtocolError where it has something else."""
        had = self._texts[field]
        if not whole.startswith(had):
            raise ProtocolError(
                "checkpoint_error", f"the reply's {field} reads otherwise as a whole: ask for it again"
            )
        return whole[len(had) :]


def server_sent(events: Iterable[Event]) -> bytes:
    """Events as part of a stream's body."""
    lines = []
    for name, data in events:
        if name is not None:
            lines.append(f"event: {name}\n")
        text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
        lines.append(f"data: {text}\n\n")
    return "".join(lines).encode()
