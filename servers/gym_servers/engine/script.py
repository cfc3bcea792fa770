"""What the scripted engine says: it solves rows of the counter and sandbox environments, one tool call a turn.

Pure: the next text follows from the conversation alone, so a continued generation equals an uninterrupted one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

_ADD = re.compile(r"add (-?\d+)", re.IGNORECASE)
_GET = re.compile(r"get the count", re.IGNORECASE)
_RUN = re.compile(r"run `([^`]+)`", re.IGNORECASE)

_WHAT = {
    "increment_counter": "add {count} to the counter",
    "get_counter_value": "read the counter",
    "run_command": "run a command",
}


def next_text(items: Sequence[dict[str, Any]]) -> str:
    """The policy's next turn for a conversation of Responses items."""
    task = next((_text(item) for item in items if item.get("role") == "user"), "")
    steps: list[tuple[str, dict[str, int | str]]] = [
        ("increment_counter", {"count": int(match.group(1))}) for match in _ADD.finditer(task)
    ]
    steps += [("run_command", {"command": match.group(1)}) for match in _RUN.finditer(task)]
    if _GET.search(task):
        steps.append(("get_counter_value", {}))
    taken = sum(item.get("type") == "function_call" for item in items)
    if taken >= len(steps):
        return f"All {len(steps)} steps are done. {_last_output(items)}"
    name, arguments = steps[taken]
    what = _WHAT[name].format(**arguments)
    call = json.dumps({"name": name, "arguments": arguments})
    return f"Step {taken + 1} of {len(steps)}: now I {what}.<tool_call>{call}</tool_call>"


def tokens_of(items: Sequence[dict[str, Any]]) -> int:
    """How many tokens (bytes) the policy generates for a task, from its first turn to its last."""
    conversation, total = list(items), 0
    while True:
        text = next_text(conversation)
        total += len(text.encode())
        if "<tool_call>" not in text:
            return total
        conversation.append({"type": "function_call"})


def logprob(token: int) -> float:
    """A stand-in log-probability that a reader can check: it depends on the token alone."""
    return -(token % 16 + 1) / 64


def _text(item: dict[str, Any]) -> str:
    content = item.get("content")
    if isinstance(content, list):
        return " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content or "")


def _last_output(items: Sequence[dict[str, Any]]) -> str:
    outputs = [item for item in items if item.get("type") == "function_call_output"]
    return f"The last result was {outputs[-1].get('output')}." if outputs else "There was nothing to do."
