"""`/v1/responses`: create parameters to a conversation, and a reply to a Response or its stream of events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gym_servers.model.conversation import Conversation, Message, ToolCall, arguments_text, offered, text_of
from gym_servers.model.reply import Reply
from gym_servers.model.sampling import sampling_of

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
    message, stem = reply.message, reply.stem
    output: list[dict[str, Any]] = []
    if message.reasoning:
        output.append(
            {
                "type": "reasoning",
                "id": f"rs_{stem}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": message.reasoning}],
            }
        )
    if message.content or not message.calls:
        output.append(
            {
                "type": "message",
                "id": f"msg_{stem}",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": message.content, "annotations": []}],
            }
        )
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
        "id": f"resp_{stem}",
        "object": "response",
        "created_at": reply.created,
        "model": params.get("model") or reply.model,
        "status": "incomplete" if reply.length else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.length else None,
        "error": None,
        "output": output,
        "parallel_tool_calls": bool(params.get("parallel_tool_calls", True)),
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": params.get("tools") or [],
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "output_tokens": reply.generated_tokens,
            "total_tokens": reply.prompt_tokens + reply.generated_tokens,
        },
    }


def events_of(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A finished Response as the events that a streaming client waits for."""
    begun = {**body, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    ended = "response.incomplete" if body["status"] == "incomplete" else "response.completed"
    bare: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(body["output"]):
        bare += _item_events(index, item)
    bare.append((ended, {"response": body}))
    for number, (name, data) in enumerate(bare):
        yield name, {"type": name, "sequence_number": number, **data}


def _item_events(index: int, item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    where = {"output_index": index, "item_id": item["id"]}
    empty: dict[str, dict[str, Any]] = {
        "message": {"content": []},
        "function_call": {"arguments": ""},
        "reasoning": {"content": []},
    }
    bare = {**item, **empty[item["type"]], "status": "in_progress"}
    yield "response.output_item.added", {"output_index": index, "item": bare}
    if item["type"] == "message":
        for number, part in enumerate(item["content"]):
            there = {**where, "content_index": number}
            yield "response.content_part.added", {**there, "part": {**part, "text": ""}}
            yield "response.output_text.delta", {**there, "delta": part["text"], "logprobs": []}
            yield "response.output_text.done", {**there, "text": part["text"], "logprobs": []}
            yield "response.content_part.done", {**there, "part": part}
    elif item["type"] == "function_call":
        yield "response.function_call_arguments.delta", {**where, "delta": item["arguments"]}
        yield (
            "response.function_call_arguments.done",
            {**where, "name": item["name"], "arguments": item["arguments"]},
        )
    yield "response.output_item.done", {"output_index": index, "item": item}
