"""Rows for the scripted engine: counter rows in the wording of the ecosystem's examples, and sandbox rows."""

from __future__ import annotations

import random
from typing import Any

TOOLS = [
    {
        "type": "function",
        "name": "increment_counter",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"count": {"type": "integer", "description": ""}},
            "required": ["count"],
            "additionalProperties": False,
        },
        "strict": True,
    },
    {
        "type": "function",
        "name": "get_counter_value",
        "description": "",
        "parameters": {"type": "object", "properties": {}, "required": [], "additionalProperties": False},
        "strict": True,
    },
]


def counter_rows(count: int, seed: int, additions: tuple[int, int] = (3, 6)) -> list[dict[str, Any]]:
    """`count` rows with between `additions` many additions each; the same seed gives the same rows."""
    source = random.Random(seed)
    rows = []
    for _ in range(count):
        numbers = [source.randint(1, 50) for _ in range(source.randint(*additions))]
        initial = source.randint(0, 100)
        steps = " then ".join(f"add {number}" for number in numbers)
        rows.append(
            {
                "responses_create_params": {
                    "input": [{"role": "user", "content": f"{steps} then get the count"}],
                    "tools": TOOLS,
                },
                "initial_count": initial,
                "expected_count": initial + sum(numbers),
            }
        )
    return rows


RUN_COMMAND = {
    "type": "function",
    "name": "run_command",
    "description": "",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string", "description": ""}},
        "required": ["command"],
        "additionalProperties": False,
    },
    "strict": True,
}


def sandbox_rows(count: int, seed: int, commands: tuple[int, int] = (3, 6)) -> list[dict[str, Any]]:
    """`count` rows with between `commands` many commands each. Each command appends to a file: one that is lost, or
    runs twice, shows in the file's end. The same seed gives the same rows."""
    source = random.Random(seed)
    rows = []
    for _ in range(count):
        numbers = [source.randint(1, 50) for _ in range(source.randint(*commands))]
        steps = " then ".join(f"run `mkdir -p out && echo {number} >> out/numbers`" for number in numbers)
        rows.append(
            {
                "responses_create_params": {"input": [{"role": "user", "content": steps}], "tools": [RUN_COMMAND]},
                "files": {"out/numbers": "first\n", "notes.txt": "untouched"},
                "expected_files": {"out/numbers": "\n".join(["first", *map(str, numbers)]) + "\n"},
            }
        )
    return rows
