"""`/v1/responses`: create parameters to a conversation, and a reply to a Response or its stream of events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any

from gym_servers.model.conversation import Conversation, Message, ToolCall, arguments_text, offered, text_of
from gym_servers.model.dialect import Piece
from gym_servers.model.reply import Event, Head, Reply, Sent
from gym_servers.model.sampling import sampling_of
from gym_servers.protocol.errors import ProtocolError

ROLES = {"user": "user", "system": "system", "developer": "system", "assistant": "assistant"}


def conversation_of(params: Mapping[str, Any], defaults: Mapping[str, Any]) -> Conversation:
    """Raises ValueError for parameters that no text model can be given."""
    given = params.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ValueError("`input` must be a text or a list of items")
    messages: list[Message] = []
    if params.get("instructions"):
        messages.append(Message("system", text_of(params["instructions"])))
    for item in given:
        if not isinstance(item, dict):
            raise ValueError("`input` must be a text or a list of items")
        _add(messages, item)
    if not messages:
        raise ValueError("`input` must not be empty")
    asked = dict(params)
    form = params.get("text")
    if isinstance(form, dict) and isinstance(form.get("format"), dict):
        asked["response_format"] = _response_format(form["format"])
    return Conversation(
        tuple(messages),
        offered(params, [_tool(tool) for tool in _list(params, "tools")]),
        sampling_of(asked, params.get("max_output_tokens"), defaults),
    )


def _list(params: Mapping[str, Any], name: str) -> list[Any]:
    given = params.get(name) or []
    if not isinstance(given, list):
        raise ValueError(f"`{name}` must be a list")
    return given


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise ValueError("`tools` may hold function tools with a `name` only")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _response_format(form: Mapping[str, Any]) -> dict[str, Any]:
    if form.get("type") != "json_schema":
        return dict(form)
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


def _add(messages: list[Message], item: Mapping[str, Any]) -> None:
    """One item: a message of its own, or a part of the assistant's message that stands last."""
    kind = item.get("type") or ("message" if "role" in item else None)
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if kind == "message":
        role = ROLES.get(str(item.get("role")))
        if role is None:
            raise ValueError(f"a message's `role` is one of {', '.join(ROLES)}")
        text = text_of(item.get("content"))
        if role == "assistant" and last is not None and not last.content and not last.calls:
            messages[-1] = replace(last, content=text)
        else:
            messages.append(Message(role, text))
    elif kind == "function_call":
        call = ToolCall(
            str(item.get("call_id")), str(item.get("name")), arguments_text(item.get("arguments") or "{}")
        )
        if last is None:
            messages.append(Message("assistant", calls=(call,)))
        else:
            messages[-1] = replace(last, calls=(*last.calls, call))
    elif kind == "function_call_output":
        output = item.get("output")
        text = text_of(output) if output is None or isinstance(output, str | list) else arguments_text(output)
        messages.append(Message("tool", text, answers=str(item.get("call_id"))))
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        messages.append(Message("assistant", reasoning=text_of(parts)))
    else:
        raise ValueError("`input` may hold messages, function calls, their outputs, and reasoning only")


def body_of(params: Mapping[str, Any], reply: Reply) -> dict[str, Any]:
    """A Response."""
    message, stem = reply.message, reply.head.stem
    output: list[dict[str, Any]] = []
    if message.reasoning:
        output.append(_reasoning(stem, message.reasoning))
    if message.content or not message.calls:
        output.append(_message(stem, message.content))
    for call in message.calls:
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{call.id.removeprefix('call_')}",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": "completed",
            }
        )
    output[-1].update(reply.training)
    return {
        **_bare(params, reply.head),
        "status": "incomplete" if reply.length else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.length else None,
        "output": output,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "output_tokens": reply.generated_tokens,
            "total_tokens": reply.prompt_tokens + reply.generated_tokens,
        },
    }


def _bare(params: Mapping[str, Any], head: Head) -> dict[str, Any]:
    """A Response of which nothing is known yet."""
    return {
        "id": f"resp_{head.stem}",
        "object": "response",
        "created_at": head.created,
        "model": params.get("model") or head.model,
        "status": "in_progress",
        "incomplete_details": None,
        "error": None,
        "output": [],
        "parallel_tool_calls": bool(params.get("parallel_tool_calls", True)),
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": params.get("tools") or [],
        "usage": None,
    }


def head_of(body: Mapping[str, Any]) -> Head:
    """What a Response says of itself."""
    return Head(str(body["id"]).removeprefix("resp_"), str(body["model"]), float(body["created_at"]))


class ResponsesWriter:
    """A Response as the events that a streaming client waits for: each item as soon as it begins."""

    def __init__(self, params: Mapping[str, Any], head: Head) -> None:
        self._begun, self._stem = _bare(params, head), head.stem
        self._sent = Sent()
        self._numbers = count()
        self._open: list[str] = []  # fields whose item was begun, in their order in the output

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", {"response": self._begun})
        yield self._event("response.in_progress", {"response": self._begun})

    def piece(self, piece: Piece) -> Iterator[Event]:
        if piece.field not in self._open:
            self._open.append(piece.field)
            yield from self._item_begun(len(self._open) - 1, _ITEMS[piece.field](self._stem))
        self._sent.add(piece)
        yield from self._delta(len(self._open) - 1, piece)

    def end(self, body: Mapping[str, Any]) -> Iterator[Event]:
        """What is left of a Response. Raises ProtocolError where it begins otherwise than what was sent."""
        texts = [_FIELDS[item["type"]] for item in body["output"] if item["type"] in _FIELDS]
        if texts[: len(self._open)] != self._open:
            raise ProtocolError("checkpoint_error", "the reply reads otherwise as a whole: ask for it again")
        for index, item in enumerate(body["output"]):
            field = _FIELDS.get(item["type"])
            if field is None:
                yield from self._call(index, item)
                continue
            text = item["content"][0]["text"]
            if index >= len(self._open):
                self._open.append(field)
                yield from self._item_begun(index, _ITEMS[field](self._stem))
            if rest := self._sent.rest(field, text):
                yield from self._delta(index, Piece(field, rest))
            yield from self._item_done(index, field, item)
        ended = "response.incomplete" if body["status"] == "incomplete" else "response.completed"
        yield self._event(ended, {"response": body})

    def failed(self, error: ProtocolError) -> Iterator[Event]:
        yield self._event("error", {"code": error.code, "message": error.detail, "param": None})

    def _event(self, name: str, data: Mapping[str, Any]) -> Event:
        return Event(name, {"type": name, "sequence_number": next(self._numbers), **data})

    def _item_begun(self, index: int, item: Mapping[str, Any]) -> Iterator[Event]:
        part = item["content"][0]
        bare = {**item, "content": [], "status": "in_progress"}
        yield self._event("response.output_item.added", {"output_index": index, "item": bare})
        where = {"output_index": index, "item_id": item["id"], "content_index": 0}
        yield self._event("response.content_part.added", {**where, "part": {**part, "text": ""}})

    def _delta(self, index: int, piece: Piece) -> Iterator[Event]:
        item = _ITEMS[piece.field](self._stem)
        where = {"output_index": index, "item_id": item["id"], "content_index": 0}
        yield self._event(
            f"response.{item['content'][0]['type']}.delta", {**where, "delta": piece.text, **_EXTRA[piece.field]}
        )

    def _item_done(self, index: int, field: str, item: Mapping[str, Any]) -> Iterator[Event]:
        part = item["content"][0]
        where = {"output_index": index, "item_id": item["id"], "content_index": 0}
        yield self._event(f"response.{part['type']}.done", {**where, "text": part["text"], **_EXTRA[field]})
        yield self._event("response.content_part.done", {**where, "part": part})
        yield self._event("response.output_item.done", {"output_index": index, "item": item})

    def _call(self, index: int, item: Mapping[str, Any]) -> Iterator[Event]:
        where = {"output_index": index, "item_id": item["id"]}
        bare = {**item, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", {"output_index": index, "item": bare})
        yield self._event("response.function_call_arguments.delta", {**where, "delta": item["arguments"]})
        said = {"name": item["name"], "arguments": item["arguments"]}
        yield self._event("response.function_call_arguments.done", {**where, **said})
        yield self._event("response.output_item.done", {"output_index": index, "item": item})


def _reasoning(stem: str, text: str = "") -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{stem}", "summary": [], "content": content}


def _message(stem: str, text: str = "") -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": f"msg_{stem}", "role": "assistant", "status": "completed", "content": content}


_ITEMS: dict[str, Callable[..., dict[str, Any]]] = {"reasoning": _reasoning, "content": _message}
_FIELDS = {"reasoning": "reasoning", "message": "content"}
_EXTRA: dict[str, dict[str, Any]] = {"reasoning": {}, "content": {"logprobs": []}}
