"""`multiple-choice`: single shot, no tools, no state. Its verify may simply run again after a crash."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from gym_servers.resources.server import ResourcesServer

_BOXED = re.compile(r"\\boxed\{\s*\(?([A-Z])\)?\s*\}")
_LETTER = re.compile(r"(?<![A-Za-z])\(?([A-Z])\)?(?![A-Za-z])")


class MultipleChoiceServer(ResourcesServer):
    """Row: `expected_answer`, one letter. The answer is the last boxed letter of the final text, else its last letter
    that stands alone. Reward 1.0 where they are the same, else 0.0."""

    name = "multiple-choice"
    checkpoint_mode: ClassVar[Literal["stateless", "exported", "restart_only"]] = "stateless"
    verify_replays = True

    async def seed(self, session_id: str, task_data: Mapping[str, Any]) -> None:
        _expected(task_data)

    async def verify(self, session_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
        text = _final_text(body.get("response"))
        letters = _BOXED.findall(text) or _LETTER.findall(text)
        answer = letters[-1] if letters else None
        return {"reward": 1.0 if answer == _expected(body) else 0.0, "extracted_answer": answer}


def _expected(row: Mapping[str, Any]) -> str:
    expected = row.get("expected_answer")
    if not isinstance(expected, str) or not re.fullmatch("[A-Z]", expected):
        raise ValueError("`expected_answer` must be one capital letter")
    return expected


def _final_text(response: Any) -> str:
    """The text of the last message of a Responses reply."""
    output = response.get("output") if isinstance(response, dict) else None
    for item in reversed(output if isinstance(output, list) else []):
        if isinstance(item, dict) and item.get("type") == "message":
            parts = item.get("content") or []
            return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))
    return ""
