"""How replies are read whose tokenizer does not say so itself.

transformers reads a reply by a declarative `response_template`; newer tokenizers bring theirs. These are for those
that do not; another one can be written into the server's `config`.
"""

from __future__ import annotations

from typing import Any

HERMES: dict[str, Any] = {
    # ChatML with tool calls as JSON in tags: Qwen 2.5 and 3, Hermes, and what was trained after them.
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|im_start\|>assistant\n|<\|assistant\|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": ["<|im_end|>", "<|endoftext|>"], "content": "text"},
    },
}

KNOWN: dict[str, dict[str, Any]] = {"hermes": HERMES}
