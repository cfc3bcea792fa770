"""`/v1/chat/completions`: a request to a conversation, and a reply to a completion or its stream of chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gym_servers.model.conversation import Conversation, Message, ToolCall, arguments_text, offered, text_of
from gym_servers.model.dialect import Piece
from gym_servers.model.reply import Event, Head, Reply, Sent
from gym_servers.model.sampling import sampling_of
from gym_servers.protocol.errors import ProtocolError

ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant", "tool": "tool"}


def conversation_of(params: Mapping[str, Any], defaults: Mapping[str, Any]) -> Conversation:
    """Raises ValueError for a request that no text model can be given."""
    given = params.get("messages")
    if not isinstance(given, list) or not given:
        raise ValueError("`messages` must be a list of messages, and not empty")
    tools = params.get("tools") or []
    if not isinstance(tools, list) or not all(_is_function(tool) for tool in tools):
        raise ValueError("`tools` may hold function tools with a `name` only")
    if params.get("top_logprobs"):
        raise ValueError("`top_logprobs` is not supported: only the generated tokens' own are known")
    wanted = params.get("max_completion_tokens")
    return Conversation(
        tuple(_message(message) for message in given),
        offered(params, tools),
        sampling_of(params, params.get("max_tokens") if wanted is None else wanted, defaults),
    )


def _is_function(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _message(given: Any) -> Message:
    role = ROLES.get(str(given.get("role"))) if isinstance(given, dict) else None
    if role is None:
        raise ValueError(f"a message's `role` is one of {', '.join(ROLES)}")
    calls = given.get("tool_calls") or []
    if not isinstance(calls, list) or not all(_is_function(call) for call in calls):
        raise ValueError("a message's `tool_calls` may hold calls of functions only")
    return Message(
        role,
        text_of(given.get("content")),
        tuple(
            ToolCall(
                str(call.get("id")),
                call["function"]["name"],
                arguments_text(call["function"].get("arguments") or "{}"),
            )
            for call in calls
        ),
        str(given.get("tool_call_id") or ""),
        str(given.get("reasoning_content") or given.get("reasoning") or ""),
    )


def body_of(params: Mapping[str, Any], reply: Reply) -> dict[str, Any]:
    """A chat completion."""
    message = reply.message
    said: dict[str, Any] = {"role": "assistant", "content": message.content or None}
    if message.reasoning:
        said["reasoning_content"] = message.reasoning
    if message.calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
    elif not message.content:
        said["content"] = ""
    said.update(reply.training)
    finish = "length" if reply.length else "tool_calls" if message.calls else "stop"
    return {
        "id": f"chatcmpl-{reply.head.stem}",
        "object": "chat.completion",
        "created": int(reply.head.created),
        "model": params.get("model") or reply.head.model,
        "choices": [{"index": 0, "message": said, "logprobs": None, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.generated_tokens,
            "total_tokens": reply.prompt_tokens + reply.generated_tokens,
        },
    }


def head_of(body: Mapping[str, Any]) -> Head:
    """What a completion says of itself."""
    return Head(str(body["id"]).removeprefix("chatcmpl-"), str(body["model"]), float(body["created"]))


class ChatWriter:
    """A completion as the chunks that a streaming client waits for."""

    def __init__(self, params: Mapping[str, Any], head: Head) -> None:
        options = params.get("stream_options")
        self._usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._head = {
            "id": f"chatcmpl-{head.stem}",
            "created": int(head.created),
            "model": params.get("model") or head.model,
            "object": "chat.completion.chunk",
        }
        self._sent = Sent()

    def begin(self) -> Iterator[Event]:
        yield self._chunk({"role": "assistant", "content": ""})

    def piece(self, piece: Piece) -> Iterator[Event]:
        self._sent.add(piece)
        yield self._chunk({_FIELDS[piece.field]: piece.text})

    def end(self, body: Mapping[str, Any]) -> Iterator[Event]:
        """What is left of a completion. Raises ProtocolError where it begins otherwise than what was sent."""
        choice = body["choices"][0]
        said = dict(choice["message"])
        rest = {name: self._sent.rest(field, said.get(name) or "") for field, name in _FIELDS.items()}
        calls = said.pop("tool_calls", [])
        others = {name: value for name, value in said.items() if name not in ("role", *_FIELDS.values())}
        if delta := {name: value for name, value in {**rest, **others}.items() if value}:
            yield self._chunk(delta)
        for index, call in enumerate(calls):
            yield self._chunk({"tool_calls": [{"index": index, **call}]})
        yield self._chunk({}, choice["finish_reason"])
        if self._usage:
            yield Event(None, {**self._head, "choices": [], "usage": body["usage"]})
        yield Event(None, "[DONE]")

    def failed(self, error: ProtocolError) -> Iterator[Event]:
        yield Event(None, {"error": {"message": error.detail, "type": error.code, "code": error.code}})

    def _chunk(self, delta: Mapping[str, Any], finish: str | None = None) -> Event:
        return Event(None, {**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


_FIELDS = {"reasoning": "reasoning_content", "content": "content"}
"""What a message's parts are called here."""
