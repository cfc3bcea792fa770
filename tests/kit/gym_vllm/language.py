"""What the tiny model reads and says: counter tasks as chats, with a scratchpad before each tool call.

The scratchpad lists every step with where it stands. It makes generations long enough to be cut in their middle, and
makes the task easy: each turn follows from the last one's list by moving one mark.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from gym_servers.engine.rows import TOOLS, counter_rows

END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL = (PAD, END, *(f"<|{role}|>" for role in ROLES))
TAGS = ("<tool_call>", "</tool_call>")  # no special tokens: they have to survive decoding

CHAT_TEMPLATE = """\
{%- if tools %}<|system|>tools:{% for tool in tools %} {{ tool.function.name }}{% endfor %}<|end|>{% endif -%}
{%- for message in messages -%}
<|{{ message.role }}|>{{ message.content or "" }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}
"""

RESPONSE_TEMPLATE: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": END, "content": "text", "content_args": {"strip": False}},
    },
}

CHAT_TOOLS = [
    {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}} for tool in TOOLS
]

ADDITIONS = (1, 3)  # in a task, at least and at most
ROWS, ROWS_SEED = 24, 11


def rows_of_tests() -> list[dict[str, Any]]:
    """The rows that the tests with a real engine collect."""
    return counter_rows(ROWS, ROWS_SEED, ADDITIONS)


@dataclass(frozen=True)
class Task:
    """Additions to a counter that begins at `initial`."""

    numbers: tuple[int, ...]
    initial: int

    @property
    def words(self) -> str:
        return " then ".join(f"add {number}" for number in self.numbers) + " then get the count"

    @property
    def held_out(self) -> bool:
        """Whether the task is for checking only, and never trained on."""
        return crc32(repr(self.numbers).encode()) % 10 == 0

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> Task:
        """The task of a counter row."""
        words = row["responses_create_params"]["input"][0]["content"].removesuffix(" then get the count")
        numbers = tuple(int(part.removeprefix("add ")) for part in words.split(" then "))
        return cls(numbers, row["initial_count"])


def task(source: random.Random, additions: tuple[int, int], *, held_out: bool) -> Task:
    while True:
        numbers = tuple(source.randint(1, 50) for _ in range(source.randint(*additions)))
        made = Task(numbers, source.randint(0, 100))
        if made.held_out == held_out:
            return made


def scratchpad(made: Task, at: int) -> str:
    """The list of steps when step `at`, counted from 0, is next."""
    steps = [*(f"add {number}" for number in made.numbers), "get the count"]
    marks = ["done" if number < at else "now" if number == at else "later" for number in range(len(steps))]
    listed = "; ".join(
        f"step {number + 1} {step} {mark}" for number, (step, mark) in enumerate(zip(steps, marks, strict=True))
    )
    return f"{listed}. "


def chat(made: Task, source: random.Random) -> list[dict[str, Any]]:
    """The whole transcript of a task that is solved."""
    separators = (", ", ": ") if source.random() < 0.8 else (",", ":")

    def output(value: Any) -> dict[str, Any]:
        return {"role": "tool", "content": json.dumps(value, separators=separators)}

    messages: list[dict[str, Any]] = [{"role": "user", "content": made.words}]
    for at, number in enumerate(made.numbers):
        call = {"function": {"name": "increment_counter", "arguments": {"count": number}}}
        messages += [
            {"role": "assistant", "content": scratchpad(made, at), "tool_calls": [call]},
            output({"success": True}),
        ]
    call = {"function": {"name": "get_counter_value", "arguments": {}}}
    last = scratchpad(made, len(made.numbers))
    count = made.initial + sum(made.numbers)
    return [
        *messages,
        {"role": "assistant", "content": last, "tool_calls": [call]},
        output({"count": count}),
        {"role": "assistant", "content": f"The count is {count}."},
    ]


def pieces(messages: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """A transcript as texts, and whether the model says them; put together they are what the chat template makes."""
    names = " ".join(str(tool["name"]) for tool in TOOLS)
    found = [(f"<|system|>tools: {names}{END}", False)]
    for message in messages:
        said = message["content"]
        for call in message.get("tool_calls", ()):
            function = call["function"]
            arguments = json.dumps(function["arguments"])
            said += f'<tool_call>{{"name": "{function["name"]}", "arguments": {arguments}}}</tool_call>'
        found += [(f"<|{message['role']}|>", False), (said + END, message["role"] == "assistant")]
    return found
