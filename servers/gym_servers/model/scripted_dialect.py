"""The scripted engine's dialect: UTF-8 bytes as token ids, the conversation as a line of JSON, tool calls in tags."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from gym_servers.capture.ledger import CallRecord
from gym_servers.model.conversation import Conversation, Message, ToolCall, arguments_text
from gym_servers.model.dialect import Piece, call_id

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ScriptedDialect:
    def render(self, conversation: Conversation, parent: CallRecord | None) -> list[int]:
        items = [item for message in conversation.messages for item in _items(message)]
        # The line's end tells the conversation from what was generated after it.
        return list(json.dumps(items, separators=(",", ":"), sort_keys=True).encode() + b"\n")

    def parse(self, ids: Sequence[int], prompt: Sequence[int], conversation: Conversation, stem: str) -> Message:
        text = bytes(list(ids)).decode(errors="replace")
        before, tag, rest = text.partition(OPEN)
        try:
            call = json.loads(rest.partition(CLOSE)[0]) if tag else None
        except ValueError:  # cut short by its budget
            call = None
        if call is None:
            return Message("assistant", text)
        asked = ToolCall(call_id(stem, 0), call["name"], arguments_text(call["arguments"]))
        return Message("assistant", before.strip(), (asked,))

    def reading(self, prompt: Sequence[int], conversation: Conversation) -> ScriptedReading:
        return ScriptedReading()


class ScriptedReading:
    """What stands before the tag of a tool call, as far as it cannot become one, nor be stripped."""

    def __init__(self) -> None:
        self._said, self._given = b"", 0

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        self._said += bytes(list(ids))
        text = self._said.decode(errors="ignore").partition(OPEN)[0]
        if text[:1].isspace():
            return []
        text = text[: len(text) - overlap(text, OPEN)].rstrip()
        new, self._given = text[self._given :], max(self._given, len(text))
        return [Piece("content", new)] if new else []


def overlap(text: str, tag: str) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


def _items(message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.answers, "output": message.content}]
    items: list[dict[str, Any]] = []
    if message.content or not message.calls:
        items.append({"role": message.role, "content": message.content})
    for call in message.calls:
        items.append({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.arguments})
    return items
