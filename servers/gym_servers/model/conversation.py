"""A model call in one form, whichever API it came by: messages, tools, and how to sample.

Everything is frozen: what a caller asked for is never changed while it is worked on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gym_servers.protocol.digests import digest_of


@dataclass(frozen=True)
class ToolCall:
    """`arguments` is JSON text, as it goes over the wire."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message. `answers`: id of the tool call whose result it is."""

    role: str
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    answers: str = ""
    reasoning: str = ""


@dataclass(frozen=True)
class Sampling:
    """`max_tokens` is None where the caller leaves it to the server; `options` go to the engine as they are.

    `unfaithful` is why a generation cannot go on behind its prefix as if it had not been interrupted: the engine
    would not know what it had counted, matched or drawn before.
    """

    max_tokens: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    unfaithful: str = ""


@dataclass(frozen=True)
class Conversation:
    """What the model is given. `tools` are function tools as chat templates take them."""

    messages: tuple[Message, ...]
    tools: Sequence[Mapping[str, Any]] = ()
    sampling: Sampling = Sampling()

    def turns(self) -> tuple[str, ...]:
        """A digest of the conversation after each message: one of them is that of the reply it goes on from."""
        digest, found = digest_of(list(self.tools)), []
        for message in self.messages:
            digest = after(digest, message)
            found.append(digest)
        return tuple(found)

    def thoughts(self) -> tuple[str, ...]:
        """A digest of each message's reasoning, empty where it has none."""
        return tuple(map(thought, self.messages))


def thought(message: Message) -> str:
    return digest_of(message.reasoning) if message.reasoning else ""


def after(turn: str, message: Message) -> str:
    """The digest of a conversation with one more message. Reasoning is left out: not every client sends it back, and
    so it is compared apart."""
    calls = [[call.id, call.name, call.arguments] for call in message.calls]
    return digest_of([turn, message.role, message.content, calls, message.answers])


def offered(params: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The tools that the model may call. Raises ValueError where it must call one: that takes constrained decoding,
    which is not faithful to what the model is trained as."""
    choice = params.get("tool_choice")
    if choice in (None, "auto"):
        return tuple(tools)
    if choice == "none":
        return ()
    raise ValueError("`tool_choice` is `auto` or `none`: a forced call is not supported")


def text_of(content: Any) -> str:
    """The text of a message's content, which is a text or a list of parts. Raises ValueError for other parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError("`content` must be a text or a list of parts")
    texts = [part.get("text", part.get("refusal")) if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("`content` may hold text parts only")
    return "".join(map(str, texts))


def arguments_text(given: Any) -> str:
    """A tool call's arguments as JSON text."""
    return given if isinstance(given, str) else json.dumps(given, separators=(",", ":"))
