"""The pure parts of the policy model server: what is asked, what can be continued, and how tokens are carried."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gym_servers.assemble import assemble
from gym_servers.model import chat_api, responses_api
from gym_servers.model.carry import carried
from gym_servers.model.config import VllmConfig
from gym_servers.model.conversation import Conversation, Message, ToolCall, after, thought
from gym_servers.model.reply import Head, Reply
from gym_servers.model.sampling import continued, sampling_of, unfaithful
from gym_servers.stack.settings import ServerSettings, SettingsError, StackIdentity, describe

TEXT = st.text(max_size=8)
MESSAGES = st.builds(
    Message,
    st.just("assistant"),
    TEXT,
    st.lists(st.builds(ToolCall, TEXT.map("call_{}".format), TEXT, TEXT.map(lambda t: t or "{}")), max_size=2).map(
        tuple
    ),
    reasoning=TEXT,
)

# ---- conversations ----------------------------------------------------------------------------------------


def reply(message: Message) -> Reply:
    return Reply(Head("stem", "model", 0.0), message, 3, 4, False, {})


@given(MESSAGES)
def test_a_reply_that_its_client_sends_back_is_known_again_by_either_api(message: Message) -> None:
    """So the next call finds its parent, whichever API and however many parts the reply had."""
    asked = Conversation((Message("user", "add 5"),))
    expected = after(asked.turns()[-1], message)
    reasoned = ("", thought(message))
    items = responses_api.body_of({}, reply(message))["output"]
    back = responses_api.conversation_of({"input": [{"role": "user", "content": "add 5"}, *items]}, {})
    assert (back.turns()[1], back.thoughts()) == (expected, reasoned)
    said = chat_api.body_of({}, reply(message))["choices"][0]["message"]
    back = chat_api.conversation_of({"messages": [{"role": "user", "content": "add 5"}, said]}, {})
    assert (back.turns()[1], back.thoughts()) == (expected, reasoned)
    assert (reasoned[1] == "") == (message.reasoning == "")


def test_conversations_differ_by_whatever_the_model_would_see() -> None:
    base = (
        Message("user", "a"),
        Message("assistant", "b", (ToolCall("1", "t", "{}"),)),
        Message("tool", "c", (), "1"),
    )
    turns = {Conversation(base).turns()}
    for index, other in (
        (0, Message("system", "a")),
        (0, Message("user", "A")),
        (1, Message("assistant", "b")),
        (1, Message("assistant", "b", (ToolCall("2", "t", "{}"),))),
        (1, Message("assistant", "b", (ToolCall("1", "u", "{}"),))),
        (1, Message("assistant", "b", (ToolCall("1", "t", '{"n":1}'),))),
        (2, Message("tool", "c", (), "2")),
    ):
        changed = list(base)
        changed[index] = other
        turns.add(Conversation(tuple(changed)).turns())
    turns.add(Conversation(base, ({"type": "function", "function": {"name": "t"}},)).turns())
    assert len(turns) == 9
    assert len({found[-1] for found in turns}) == 9


def test_items_of_one_turn_are_one_message() -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "now"}]},
        {"type": "function_call", "call_id": "1", "name": "t", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "t", "arguments": {"n": 1}},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "function_call_output", "call_id": "2", "output": {"n": 2}},
        {"type": "message", "role": "assistant", "content": "done"},
        {"type": "message", "role": "assistant", "content": "really"},
    ]
    found = responses_api.conversation_of({"input": items, "instructions": "be brief"}, {}).messages
    assert found == (
        Message("system", "be brief"),
        Message("user", "go"),
        Message("assistant", "now", (ToolCall("1", "t", "{}"), ToolCall("2", "t", '{"n":1}')), "", "hm"),
        Message("tool", "one", (), "1"),
        Message("tool", '{"n":2}', (), "2"),
        Message("assistant", "done"),
        Message("assistant", "really"),
    )


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"input": None},
        {"input": []},
        {"input": [1]},
        {"input": [{}]},
        {"input": [{"type": "image"}]},
        {"input": [{"role": "nobody", "content": "x"}]},
        {"input": [{"role": "user", "content": 5}]},
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        {"input": "x", "tools": {"a": 1}},
        {"input": "x", "tools": [{"type": "file_search"}]},
        {"input": "x", "tools": [{"type": "function"}]},
        {"input": "x", "tool_choice": "required"},
        {"input": "x", "max_output_tokens": True},
        {"input": "x", "min_tokens": "5"},
        {"input": "x", "min_tokens": [5]},
        {"input": "x", "min_tokens": 1.5},
        {"input": "x", "min_tokens": True},
        {"input": "x", "min_tokens": -1},
    ],
)
def test_what_no_text_model_can_be_given_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        responses_api.conversation_of(params, {})


# ---- sampling ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, ""),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "logit_bias": {"5": -100}}, ""),
        ({"response_format": {"type": "text"}}, ""),
        ({"response_format": {"type": "json_object"}}, "constrained"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "constrained"),
        ({"structured_outputs": {"regex": "a+"}}, "constrained"),
        ({"bad_words": ["no"]}, "constrained"),
        ({"presence_penalty": 0.1}, "penalties"),
        ({"frequency_penalty": -0.1}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1}, ""),
        ({"stop": ["\n\n"]}, "stop_texts"),
        ({"stop_token_ids": [5]}, ""),
        ({"seed": 7}, "seed"),
        ({"seed": 7, "temperature": 0.5}, "seed"),
        ({"seed": 0, "temperature": 0}, ""),
        ({"seed": 7, "temperature": 0.0}, ""),
    ],
)
def test_what_a_prefix_cannot_restore_has_a_reason(options: dict[str, Any], why: str) -> None:
    assert unfaithful(options) == why
    assert sampling_of(options, None, {}).unfaithful == why
    assert sampling_of({}, None, options).unfaithful == why, "of the server's own options, too"


def test_the_server_s_own_options_are_below_those_of_a_call() -> None:
    defaults = {"temperature": 0.0, "top_p": 0.9}
    sampling = sampling_of({"temperature": 1.0, "user": "x", "top_p": None}, 5, defaults)
    assert (sampling.max_tokens, dict(sampling.options)) == (5, {"temperature": 1.0, "top_p": 0.9})
    assert defaults == {"temperature": 0.0, "top_p": 0.9}
    # What counts is what the engine gets: a call may undo what could not be continued, or bring it about.
    assert sampling_of({"presence_penalty": 0}, None, {"presence_penalty": 0.5}).unfaithful == ""
    assert sampling_of({"temperature": 1.0}, None, {"temperature": 0.0, "seed": 7}).unfaithful == "seed"


def test_a_response_s_own_format_is_the_engine_s_too() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    asked = responses_api.conversation_of({"input": "x", "text": {"format": form}}, {})
    assert asked.sampling.options["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }
    assert asked.sampling.unfaithful == "constrained"


@given(st.dictionaries(st.sampled_from(["min_tokens", "seed", "top_k"]), st.integers(0, 50)), st.integers(0, 60))
def test_c10_options_of_a_continuation_are_a_copy(options: dict[str, int], generated: int) -> None:
    before = dict(options)
    following = continued(options, generated)
    assert options == before
    assert following.get("min_tokens", 0) == max(0, before.get("min_tokens", 0) - (generated if following else 0))
    assert {name: following[name] for name in following if name != "min_tokens"} == {
        name: before[name] for name in before if name != "min_tokens"
    }


# ---- carrying tokens --------------------------------------------------------------------------------------

END, NEW_LINE, USER, ASSISTANT = 0, 10, 1, 2


def test_c13_a_prompt_takes_over_the_tokens_that_were_sampled() -> None:
    """The model said [7, 8], whose text is one token, 78, for the tokenizer."""
    sampled = [USER, 5, END, NEW_LINE, ASSISTANT, 7, 8, END]
    again = [USER, 5, END, NEW_LINE, ASSISTANT, 78, END, NEW_LINE]
    whole = [*again, USER, 6, END, NEW_LINE, ASSISTANT]
    assert carried(sampled, again, whole, {END}) == [*sampled, NEW_LINE, USER, 6, END, NEW_LINE, ASSISTANT]


def test_c13_a_reply_without_an_end_of_its_own_gets_the_template_s() -> None:
    sampled = [USER, 5, END, NEW_LINE, ASSISTANT, 7]
    again = [USER, 5, END, NEW_LINE, ASSISTANT, 7, END, NEW_LINE]
    whole = [*again, USER, 6, END]
    assert carried(sampled, again, whole, {END}) == [*sampled, END, NEW_LINE, USER, 6, END]


@pytest.mark.parametrize(
    ("sampled", "again", "whole"),
    [
        ([USER, 5, 7, END], [USER, 5, 7, END], [USER, 5, END, USER]),  # earlier turns look different later
        ([USER, 5, 7], [USER, 5, 7], [USER, 5, 7, USER]),  # no turn has an end
        ([], [USER, END], [USER, END, USER]),
    ],
)
def test_c13_where_a_template_changes_the_past_nothing_is_carried(
    sampled: list[int], again: list[int], whole: list[int]
) -> None:
    assert carried(sampled, again, whole, {END}) is None


@given(
    st.lists(st.integers(20, 99), min_size=1),
    st.lists(st.integers(20, 99), min_size=1),
    st.lists(st.integers(20, 99)),
)
def test_c13_all_that_was_sampled_is_in_the_prompt_whatever_its_text_would_be(
    sampled: list[int], again: list[int], tail: list[int]
) -> None:
    head = [USER, 5, END, ASSISTANT]
    prompt = carried([*head, *sampled, END], [*head, *again, END], [*head, *again, END, *tail], {END})
    assert prompt == [*head, *sampled, END, *tail]


# ---- settings ---------------------------------------------------------------------------------------------


def policy(server: str, config: Mapping[str, Any]) -> ServerSettings:
    identity = StackIdentity(namespace="n", name="n", uid="u")
    return ServerSettings(stack=identity, name="policy", kind="model", server=server, config=dict(config))


@pytest.mark.parametrize("server", ["scripted", "vllm"])
@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "base_url"),
        ({"base_url": 5}, "base_url"),
        ({"base_url": "vllm:8000"}, "such as http://vllm:8000"),
        ({"base_url": "http://vllm:8000/v1"}, "without /v1"),
        ({"base_url": "http://vllm:8000/v1/"}, "without /v1"),
        ({"base_url": "http://"}, "such as http://vllm:8000"),
        ({"base_url": "http://x", "max_tokens": 0}, "max_tokens"),
        ({"base_url": "http://x", "urls": []}, "urls"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_its_field(server: str, config: dict[str, Any], says: str) -> None:
    config = {"model": "m", **config} if server == "vllm" else config
    with pytest.raises(SettingsError, match="server policy: `config` is not valid") as refused:
        assemble(policy(server, config), "secret")
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"model": ""}, "model"),
        ({"sampling": {"temprature": 0}}, "temprature"),
        ({"sampling": {"temperature": "hot"}}, "temperature"),
        ({"sampling": {"temperature": float("nan")}}, "finite"),
        ({"response_template": "nobodys"}, "response_template"),
        ({"max_model_len": 0}, "max_model_len"),
    ],
)
def test_a_config_for_vllm_is_checked_to_its_last_option(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as refused:
        VllmConfig.model_validate({"base_url": "http://x", "model": "m", **config})
    assert says in describe(refused.value)


def test_a_server_for_vllm_says_what_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SettingsError, match=r"server policy: `config`: .* install gym-operator\[vllm\]"):
        assemble(policy("vllm", {"base_url": "http://x", "model": "m"}), "secret")
