"""What was generated for a call, before it takes the form of the API by which the call came."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gym_servers.model.conversation import Message


@dataclass(frozen=True)
class Reply:
    """`stem`: the part that all of its ids have in common. `training`: token ids and log-probabilities for callers
    that want them with the reply, else empty. `created` is Unix seconds."""

    stem: str
    model: str
    message: Message
    prompt_tokens: int
    generated_tokens: int
    length: bool  # it ended because its budget was used up
    created: float
    training: Mapping[str, Any]


def server_sent(events: Iterable[tuple[str | None, Any]]) -> bytes:
    """Events as a stream's body: (name, data), data being JSON or a text as it is."""
    lines = []
    for name, data in events:
        if name is not None:
            lines.append(f"event: {name}\n")
        text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
        lines.append(f"data: {text}\n\n")
    return "".join(lines).encode()
