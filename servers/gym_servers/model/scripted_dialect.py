"""The scripted engine's dialect: UTF-8 bytes as token ids, the conversation as JSON, tool calls in tags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class ScriptedDialect:
    def render(self, params: Mapping[str, Any]) -> list[int]:
        given = params.get("input")
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        if not isinstance(given, list):
            raise ValueError("`input` must be a text or a list of items")
        return list(json.dumps(given, separators=(",", ":"), sort_keys=True).encode())

    def parse(self, ids: Sequence[int], call_ids: str) -> list[dict[str, Any]]:
        text = bytes(list(ids)).decode(errors="replace")
        before, tag, rest = text.partition(OPEN)
        if not tag:
            return [_message(text, call_ids)]
        call = json.loads(rest.partition(CLOSE)[0])
        return [
            _message(before.strip(), call_ids),
            {
                "type": "function_call",
                "id": f"fc_{call_ids}",
                "call_id": f"call_{call_ids}",
                "name": call["name"],
                "arguments": json.dumps(call["arguments"], separators=(",", ":")),
                "status": "completed",
            },
        ]


def _message(text: str, call_ids: str) -> dict[str, Any]:
    return {
        "type": "message",
        "id": f"msg_{call_ids}",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": text, "annotations": []}],
    }
