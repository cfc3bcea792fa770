"""A served model's dialect: its tokenizer's chat template, and its tokenizer's or vLLM's way to read replies.

transformers is imported when the first server needs it: no other process pays for it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gym_servers.capture.ledger import CallRecord
from gym_servers.model.carry import carried
from gym_servers.model.config import VllmConfig
from gym_servers.model.conversation import Conversation, Message, ToolCall, arguments_text
from gym_servers.model.dialect import Reading, call_id
from gym_servers.model.response_templates import KNOWN
from gym_servers.model.template_reading import TemplateReading, stripped_fields
from gym_servers.stack.settings import SettingsError

log = logging.getLogger("gym_servers")

CONTENT = ("region_close", "content")

Read = Callable[[str, Sequence[int], Conversation], Mapping[str, Any]]
"""Text of a reply, the prompt's ids, and the conversation to an assistant message as chat templates take it."""


class VllmDialect:
    """`tokenizer` is transformers'; `ends` are the tokens that end a turn; `read` takes a reply apart. `template`: it
    is read by the tokenizer's response template, which can be done while it grows."""

    def __init__(
        self, tokenizer: Any, ends: frozenset[int], read: Read, options: Mapping[str, Any], *, template: bool = False
    ) -> None:
        self._tokenizer, self._ends, self._read, self._options = tokenizer, ends, read, dict(options)
        self._template = template

    def render(self, conversation: Conversation, parent: CallRecord | None) -> list[int]:
        whole = self._rendered(conversation, len(conversation.messages))
        if parent is None:
            return whole
        known = conversation.turns().index(parent.turn) + 1
        head = self._rendered(conversation, known, reply_follows=False)
        prompt = carried([*parent.prompt_ids, *parent.ids], head, whole, self._ends)
        if prompt is None:
            log.info("this chat template changes earlier turns: a prompt was tokenised anew")
            return whole
        return prompt

    def _rendered(self, conversation: Conversation, count: int, *, reply_follows: bool = True) -> list[int]:
        from jinja2 import TemplateError

        messages = [_templated(message) for message in conversation.messages[:count]]
        try:
            ids: list[int] = self._tokenizer.apply_chat_template(
                messages,
                tools=[dict(tool) for tool in conversation.tools] or None,
                add_generation_prompt=reply_follows,
                tokenize=True,
                return_dict=False,
                **self._options,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise ValueError(f"the chat template refuses it: {error}") from error
        return list(ids)

    def parse(self, ids: Sequence[int], prompt: Sequence[int], conversation: Conversation, stem: str) -> Message:
        said = list(ids[:-1] if ids and ids[-1] in self._ends else ids)
        text: str = self._tokenizer.decode(said, skip_special_tokens=False)
        try:
            found = self._read(text, prompt, conversation)
            calls = tuple(
                ToolCall(call_id(stem, number), str(call["function"]["name"]), _arguments(call["function"]))
                for number, call in enumerate(found.get("tool_calls") or ())
            )
        except Exception as error:  # a library's parser meets whatever a model may say
            log.info("a reply could not be read as one with tool calls: %s", type(error).__name__)
            plain = self._tokenizer.decode(said, skip_special_tokens=True)
            return Message("assistant", plain)
        reasoning = found.get("reasoning_content") or found.get("thinking") or ""
        return Message("assistant", str(found.get("content") or ""), calls, reasoning=str(reasoning))

    def reading(self, prompt: Sequence[int], conversation: Conversation) -> Reading | None:
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        template = self._tokenizer.response_template if self._template else None
        if fast is None or not isinstance(template, Mapping) or self._tokenizer.clean_up_tokenization_spaces:
            return None
        from tokenizers.decoders import DecodeStream

        tools = [dict(tool) for tool in conversation.tools] or None
        try:
            parser = self._tokenizer.get_response_parser(prefix=list(prompt), tools=tools)
        except Exception as error:  # what it cannot do piece by piece it may do as a whole
            log.info("a reply cannot be read while it grows: %s", type(error).__name__)
            return None
        stream = DecodeStream(skip_special_tokens=False)
        return TemplateReading(
            parser.feed,
            parser.initial_events,
            lambda token: stream.step(fast, token),
            self._ends,
            stripped_fields(template),
        )


def _arguments(function: Mapping[str, Any]) -> str:
    given = function.get("arguments")
    return arguments_text({} if given is None else given)


def _templated(message: Message) -> dict[str, Any]:
    """A message in the form that chat templates take."""
    told: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        told["reasoning_content"] = message.reasoning
    if message.answers:
        told["tool_call_id"] = message.answers
    if message.calls:
        told["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _parsed(call.arguments)}}
            for call in message.calls
        ]
    return told


def _parsed(arguments: str) -> Any:
    """Templates write arguments as JSON themselves; what is none stays the text it is."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def open_dialect(config: VllmConfig) -> VllmDialect:
    """The dialect of a model. Raises SettingsError where its tokenizer is missing or lacks what is needed."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise SettingsError("server vllm needs transformers: install gym-operator[vllm]") from error
    name = config.tokenizer or config.model
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0][:300]
        raise SettingsError(f"`tokenizer`: {name} cannot be loaded: {first}") from error
    if config.chat_template is not None:
        tokenizer.chat_template = config.chat_template
    if not tokenizer.chat_template:
        raise SettingsError(f"the tokenizer {name} has no chat template: set `chat_template`")
    if tokenizer.eos_token_id is None:
        raise SettingsError(f"the tokenizer {name} has no end-of-turn token")
    read = vllm_parser(config.tool_parser, tokenizer) if config.tool_parser else _template_reader(config, tokenizer)
    return VllmDialect(
        tokenizer, _ends(name, tokenizer), read, config.chat_template_kwargs, template=config.tool_parser is None
    )


def _ends(name: str, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a turn: the tokenizer's, and all at which the engine stops by the model's own generation
    config, such as one behind a tool call."""
    from transformers import GenerationConfig

    ends = {int(tokenizer.eos_token_id)}
    try:
        more = GenerationConfig.from_pretrained(name).eos_token_id
    except OSError:  # a tokenizer may lie apart from its model
        more = None
    if more is not None:
        ends.update(map(int, more if isinstance(more, list) else [more]))
    return frozenset(ends)


def _template_reader(config: VllmConfig, tokenizer: Any) -> Read:
    given = config.response_template
    if given is not None:
        tokenizer.response_template = KNOWN[given] if isinstance(given, str) else given
    if getattr(tokenizer, "response_template", None) is None:
        raise SettingsError(
            "the tokenizer does not say how replies are read: set `response_template`, such as hermes, "
            "or `tool_parser` where vLLM is installed"
        )

    def read(text: str, prompt: Sequence[int], conversation: Conversation) -> Mapping[str, Any]:
        tools = [dict(tool) for tool in conversation.tools] or None
        parser = tokenizer.get_response_parser(prefix=list(prompt), tools=tools)
        events = [*parser.initial_events, *parser.feed(text)]
        message, last = parser.finalize()
        # What stands before and behind a tool call are regions of one field, of which the message has the last alone.
        parts = [one["value"] or "" for one in [*events, *last] if (one["type"], one["field"]) == CONTENT]
        return {**message, "content": "".join(parts)}

    return read


def vllm_parser(name: str, tokenizer: Any) -> Read:
    """One of vLLM's own tool parsers. Raises SettingsError where vLLM is not installed here, or has no such one."""
    try:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise SettingsError("`tool_parser` needs vLLM in this image; set `response_template` instead") from error
    try:
        kind = ToolParserManager.get_tool_parser(name)
    except KeyError as error:
        raise SettingsError(f"vLLM has no tool parser {name!r}") from error

    def read(text: str, prompt: Sequence[int], conversation: Conversation) -> Mapping[str, Any]:
        request = ChatCompletionRequest(
            messages=[{"role": "user", "content": ""}], tools=[dict(tool) for tool in conversation.tools] or None
        )
        found = kind(tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [{"function": {"name": c.function.name, "arguments": c.function.arguments}} for c in found.tool_calls]
        return {"content": found.content, "tool_calls": calls}

    return read
