"""The dialect of a served model: its own template and tokens, whole conversations and replies of any kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gym_servers.capture.arrays import float32, int32
from gym_servers.capture.ledger import CallRecord
from gym_servers.capture.tokens import Span
from gym_servers.model.config import VllmConfig
from gym_servers.model.conversation import Conversation, Message, ToolCall, after
from gym_servers.model.vllm_dialect import VllmDialect, open_dialect
from gym_servers.stack.settings import SettingsError
from gym_vllm.engine import MODEL
from gym_vllm.language import CHAT_TOOLS, END, PAD

LIST = "step 1 add 5 now; step 2 get the count later. "
SAID = LIST + '<tool_call>{"name": "increment_counter", "arguments": {"count": 5}}</tool_call>'
USER = Message("user", "add 5 then get the count")


def config(**changes: Any) -> VllmConfig:
    return VllmConfig.model_validate({"base_url": "http://x", "model": "tiny", "tokenizer": str(MODEL), **changes})


@pytest.fixture(scope="module")
def dialect() -> VllmDialect:
    return open_dialect(config())


def ids(dialect: VllmDialect, text: str) -> list[int]:
    found: list[int] = dialect._tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def said(dialect: VllmDialect, conversation: Conversation, text: str) -> tuple[Message, CallRecord]:
    """A reply and its record."""
    prompt, tokens = dialect.render(conversation, None), ids(dialect, text)
    message = dialect.parse(tokens, prompt, conversation, "stem")
    spans = (Span("", 0, len(tokens)),) if tokens else ()
    turn = after(conversation.turns()[-1], message)
    return message, CallRecord(
        "1.1", "d", int32(prompt), int32(tokens), float32([-1.0] * len(tokens)), spans, {}, "", turn
    )


@pytest.mark.parametrize("changes", [{}, {"response_template": "hermes"}, {"tool_parser": "hermes"}])
def test_tool_calls_are_read_by_the_libraries_that_know_the_format(changes: dict[str, Any]) -> None:
    """The tokenizer's own template, the one we bring, and vLLM's parser say the same."""
    dialect = open_dialect(config(**changes))
    conversation = Conversation((USER,), tuple(CHAT_TOOLS))
    message, _ = said(dialect, conversation, SAID + END)
    (call,) = message.calls
    assert (call.id, call.name, json.loads(call.arguments)) == ("call_stem", "increment_counter", {"count": 5})
    assert message.content.strip() == "step 1 add 5 now; step 2 get the count later."
    both, _ = said(dialect, conversation, SAID + "\n" + SAID.removeprefix(LIST) + END)
    assert [call.id for call in both.calls] == ["call_stem", "call_stem_1"]
    assert both.content.strip() == LIST.strip()
    plain, _ = said(dialect, conversation, "The count is 5." + END)
    assert (plain.content, plain.calls) == ("The count is 5.", ())


@pytest.mark.parametrize("text", [SAID[:-14], SAID[:60], "<tool_call>{not json}</tool_call>", "", "<tool_call>"])
@pytest.mark.parametrize("changes", [{}, {"response_template": "hermes"}, {"tool_parser": "hermes"}])
def test_what_is_no_whole_tool_call_calls_no_tool(changes: dict[str, Any], text: str) -> None:
    dialect = open_dialect(config(**changes))
    conversation = Conversation((USER,), tuple(CHAT_TOOLS))
    message, _ = said(dialect, conversation, text)
    assert message.role == "assistant"
    assert all(json.loads(call.arguments) is not None and call.name for call in message.calls)


def test_c13_a_turn_takes_over_the_tokens_that_were_sampled_and_not_those_of_its_text(dialect: VllmDialect) -> None:
    conversation = Conversation((USER,), tuple(CHAT_TOOLS))
    message, record = said(dialect, conversation, SAID + END)
    # As a model may say it: the same text in other tokens.
    odd = [token for character in SAID for token in ids(dialect, character)] + ids(dialect, END)
    assert odd != list(record.ids)
    prompt = list(record.prompt_ids)
    sampled = CallRecord(
        "1.1",
        "d",
        int32(prompt),
        int32(odd),
        float32([-1.0] * len(odd)),
        (Span("", 0, len(odd)),),
        {},
        "",
        record.turn,
    )
    following = Conversation(
        (USER, message, Message("tool", '{"success": true}', (), message.calls[0].id)), tuple(CHAT_TOOLS)
    )
    carried = dialect.render(following, sampled)
    assert carried[: len(prompt) + len(odd)] == [*prompt, *odd]
    assert dialect.render(following, record) == dialect.render(following, None)
    tail = carried[len(prompt) + len(odd) :]
    assert dialect._tokenizer.decode(tail) == '<|tool|>{"success": true}<|end|><|assistant|>'


def test_c13_a_reply_without_its_end_gets_the_template_s(dialect: VllmDialect) -> None:
    conversation = Conversation((USER,))
    message, record = said(dialect, conversation, "step 1 add 5")
    following = Conversation((USER, message, Message("user", "go on")))
    text = dialect._tokenizer.decode(dialect.render(following, record))
    assert (
        text
        == "<|user|>add 5 then get the count<|end|><|assistant|>step 1 add 5<|end|><|user|>go on<|end|><|assistant|>"
    )


@pytest.mark.parametrize("end", [END, PAD])
def test_c13_a_reply_may_end_at_any_token_at_which_its_model_stops(tmp_path: Path, end: str) -> None:
    """Many models have several: the engine knows them from the generation config, and not from the tokenizer."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    stops = {"eos_token_id": [1, 0]}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    dialect = open_dialect(config(tokenizer=str(folder)))
    assert [dialect._tokenizer.convert_ids_to_tokens(stop) for stop in stops["eos_token_id"]] == [END, PAD]
    conversation = Conversation((USER,))
    message, record = said(dialect, conversation, f"step 1 add 5{end}")
    assert message.content == "step 1 add 5"
    reading = dialect.reading(record.prompt_ids, conversation)
    assert reading is not None
    assert "".join(piece.text for piece in reading.feed(record.ids)) == message.content
    following = Conversation((USER, message, Message("user", "go on")))
    prompt = dialect.render(following, record)
    assert dialect._tokenizer.decode(prompt[len(record.prompt_ids) :]) == (
        f"step 1 add 5{end}<|user|>go on<|end|><|assistant|>"
    )


def test_arguments_that_are_no_json_are_given_to_the_template_as_they_are(dialect: VllmDialect) -> None:
    calls = (ToolCall("1", "t", '{"n": 1}'), ToolCall("2", "t", "{broken"))
    assert dialect.render(Conversation((USER, Message("assistant", "", calls))), None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tokenizer": "/no/such/folder"}, "cannot be loaded"),
        ({"chat_template": "{{ 1 / }}"}, "template"),
        ({"tool_parser": "nobodys"}, "no tool parser"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises((SettingsError, ValueError), match=says):
        open_dialect(config(**changes)).render(Conversation((USER,)), None)


def test_a_template_that_refuses_a_conversation_says_why() -> None:
    refusing = open_dialect(config(chat_template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(ValueError, match="roles must alternate"):
        refusing.render(Conversation((USER,)), None)


# ---- read while it grows ------------------------------------------------------------------------------------

THINKS = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|assistant\|>",
    "fields": {
        "reasoning_content": {"open": "step 1", "close": "now;", "content": "text"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": END, "content": "text"},
    },
}
REPLIES = [
    SAID + END,
    SAID + "\n" + SAID.removeprefix(LIST) + END,
    LIST + "  \n " + SAID.removeprefix(LIST) + " and then " + END,
    "The count is 5." + END,
    "The count is 5.",
    "<tool_call>{not json}</tool_call>" + END,
    SAID[:-14],
    "",
    END,
    "größer € 𝄞 ok" + END,
]


@pytest.mark.parametrize("text", REPLIES)
@pytest.mark.parametrize("changes", [{}, {"response_template": "hermes"}, {"response_template": THINKS}])
def test_what_is_certain_of_a_growing_reply_is_the_beginning_of_the_whole(changes: dict[str, Any], text: str) -> None:
    """In any pieces, and whatever is stripped; the same tokens are read by both."""
    dialect = open_dialect(config(**changes))
    conversation = Conversation((USER,), tuple(CHAT_TOOLS))
    prompt, tokens = dialect.render(conversation, None), ids(dialect, text)
    message = dialect.parse(tokens, prompt, conversation, "stem")
    if changes.get("response_template") is THINKS and not message.calls and "<tool_call>" in text:
        return  # unreadable: it is text as a whole, which a stream says with an error
    for size in (1, 2, 5, 1000):
        reading, said = dialect.reading(prompt, conversation), {"content": "", "reasoning": ""}
        assert reading is not None
        for at in range(0, len(tokens), size):
            for piece in reading.feed(tokens[at : at + size]):
                said[piece.field] += piece.text
        assert message.content.startswith(said["content"]), size
        assert message.reasoning.startswith(said["reasoning"]), size


def test_most_of_a_reply_is_certain_before_its_end(dialect: VllmDialect) -> None:
    conversation = Conversation((USER,), tuple(CHAT_TOOLS))
    prompt, tokens = dialect.render(conversation, None), ids(dialect, LIST)
    reading = dialect.reading(prompt, conversation)
    assert reading is not None
    assert "".join(piece.text for piece in reading.feed(tokens)).strip() == LIST.strip()
    thinking = open_dialect(config(response_template=THINKS)).reading(prompt, conversation)
    assert thinking is not None
    said = thinking.feed(tokens)
    assert {piece.field for piece in said} == {"reasoning", "content"}


def test_one_of_vllm_s_parsers_reads_whole_replies_only() -> None:
    conversation = Conversation((USER,), tuple(CHAT_TOOLS))
    dialect = open_dialect(config(tool_parser="hermes"))
    assert dialect.reading(dialect.render(conversation, None), conversation) is None
