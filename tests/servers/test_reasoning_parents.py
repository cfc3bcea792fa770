"""Clients that send reasoning back, and clients that do not: a call goes on from the tokens of its own history."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig
from gym_rig.verbs import checkpoint, restore, resume
from gym_rig.wire import foreign, ok, serving
from gym_servers.capture.ledger import CallRecord
from gym_servers.model import scripted_dialect
from gym_servers.model.conversation import Conversation, Message

CLOSE = "</think>"
Item = dict[str, Any]


class Thinking(scripted_dialect.ScriptedDialect):
    """Replies are reasoning, a tag and a text; a prompt takes its parent's tokens over."""

    def render(self, conversation: Conversation, parent: CallRecord | None) -> list[int]:
        known = conversation.turns().index(parent.turn) + 1 if parent is not None else 0
        behind = Conversation(conversation.messages[known:])
        return [*([*parent.prompt_ids, *parent.ids] if parent else []), *super().render(behind, None)]

    def parse(self, ids: Sequence[int], prompt: Sequence[int], conversation: Conversation, stem: str) -> Message:
        reasoning, _, text = bytes(list(ids)).decode().partition(CLOSE)
        return Message("assistant", text, reasoning=reasoning)


class Engine:
    """Says what it is told to, whatever it is asked."""

    def __init__(self, rig: Rig, *says: str) -> None:
        self.prompts: list[str] = []
        self._says = list(says)
        rig.network._hosts["engine"] = (self, rig.network._hosts["engine"][1])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.responses import Response

        self.prompts.append(bytes(json.loads((await receive())["body"])["prompt"]).decode())
        ids = list(self._says.pop(0).encode())
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "finish_reason": "stop"}
        line = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        await Response(line, media_type="text/event-stream")(scope, receive, send)


def chat_user(text: str) -> Item:
    return {"role": "user", "content": text}


async def chat(rig: Rig, talk: list[Item], key: str) -> list[Item]:
    body, _ = await ok(rig, "policy", f"/ng-rollout/{key}/v1/chat/completions", {"messages": talk})
    return [body["choices"][0]["message"]]


async def responses(rig: Rig, talk: list[Item], key: str) -> list[Item]:
    body, _ = await ok(rig, "policy", f"/ng-rollout/{key}/v1/responses", {"input": talk})
    found: list[Item] = body["output"]
    return found


def bare(items: list[Item]) -> list[Item]:
    """What a client keeps that sends no reasoning back."""
    kept = [item for item in items if item.get("type") != "reasoning"]
    return [{name: item[name] for name in item if name != "reasoning_content"} for item in kept]


def renamed(items: list[Item]) -> list[Item]:
    """As clients send it that know the field by its other name."""
    return [{"reasoning" if name == "reasoning_content" else name: item[name] for name in item} for item in items]


def summarised(items: list[Item]) -> list[Item]:
    return [
        {**item, "summary": item["content"], "content": None} if item.get("type") == "reasoning" else item
        for item in items
    ]


Ask = Callable[..., Any]
APIS = pytest.mark.parametrize(
    ("ask", "back"), [(chat, renamed), (chat, list), (responses, list), (responses, summarised)]
)


@pytest.fixture(autouse=True)
def reasoning_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripted_dialect, "ScriptedDialect", Thinking)


async def parents(rig: Rig, key: str) -> list[str]:
    """By their number, counted from 1; empty for none."""
    calls = (await rig.participant("policy").ledger(key)).calls
    numbers = {call.chain: str(number) for number, call in enumerate(calls, 1)}
    return [numbers.get(call.parent, "") for call in calls]


@APIS
async def test_a_call_goes_on_from_the_reply_whose_reasoning_it_sends_back(
    tmp_path: Path, ask: Ask, back: Callable[[list[Item]], list[Item]]
) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        engine = Engine(rig, f"one{CLOSE}yes", f"two{CLOSE}yes", f"a{CLOSE}b", f"c{CLOSE}d")
        talk = [chat_user("go")]
        first, second = [await ask(rig, talk, "x") for _ in range(2)]
        assert bare(first) != first
        for reply in (first, second):
            await ask(rig, [*talk, *back(reply), chat_user("why?")], "x")
        assert await parents(rig, "x") == ["", "", "1", "2"]
        for prompt, own, other in ((engine.prompts[2], "one", "two"), (engine.prompts[3], "two", "one")):
            assert f"{own}{CLOSE}yes" in prompt
            assert other not in prompt


@APIS
async def test_a_call_that_may_go_on_from_either_is_given_what_it_sends_and_no_reasoning_of_another(
    tmp_path: Path, ask: Ask, back: Callable[[list[Item]], list[Item]]
) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        engine = Engine(rig, f"zero{CLOSE}well", f"one{CLOSE}yes", f"two{CLOSE}yes", f"a{CLOSE}b", f"c{CLOSE}d")
        talk = [chat_user("go")]
        talk += [*bare(await ask(rig, talk, "x")), chat_user("and?")]
        for _ in range(2):
            reply = await ask(rig, talk, "x")
        talk += [*bare(reply), chat_user("why?")]
        talk += [*back(await ask(rig, talk, "x")), chat_user("so?")]
        # The turn before is certain; of the last one no reasoning is made up.
        assert engine.prompts[3].count(CLOSE) == 1
        assert f"zero{CLOSE}well" in engine.prompts[3]
        assert '"yes"' in engine.prompts[3]
        await ask(rig, talk, "x")
        assert await parents(rig, "x") == ["", "1", "1", "1", "4"]


@APIS
async def test_reasoning_that_was_left_out_once_may_come_back(
    tmp_path: Path, ask: Ask, back: Callable[[list[Item]], list[Item]]
) -> None:
    """The model was shown it all the same: its tokens are its parent's."""
    async with foreign(tmp_path) as rig:
        await serving(rig)
        engine = Engine(rig, f"one{CLOSE}yes", f"a{CLOSE}b", f"c{CLOSE}d")
        first = await ask(rig, [chat_user("go")], "x")
        second = await ask(rig, [chat_user("go"), *bare(first), chat_user("why?")], "x")
        assert f"one{CLOSE}yes" in engine.prompts[1]
        await ask(rig, [chat_user("go"), *back(first), chat_user("why?"), *back(second), chat_user("so?")], "x")
        assert await parents(rig, "x") == ["", "1", "2"]


@APIS
async def test_reasoning_that_was_changed_is_no_reply_of_ours(
    tmp_path: Path, ask: Ask, back: Callable[[list[Item]], list[Item]]
) -> None:
    async with foreign(tmp_path) as rig:
        await serving(rig)
        engine = Engine(rig, f"one{CLOSE}yes", f"a{CLOSE}b")
        reply = json.loads(json.dumps(back(await ask(rig, [chat_user("go")], "x"))).replace("one", "another"))
        await ask(rig, [chat_user("go"), *reply, chat_user("why?")], "x")
        assert await parents(rig, "x") == ["", ""]
        assert CLOSE not in engine.prompts[1]


@APIS
async def test_a_restored_ledger_knows_the_reasoning_of_its_calls(
    tmp_path: Path, ask: Ask, back: Callable[[list[Item]], list[Item]]
) -> None:
    """Also that a client without a position is answered once more, and from its own branch."""
    async with foreign(tmp_path) as rig:
        await serving(rig)
        Engine(rig, f"one{CLOSE}yes", f"two{CLOSE}yes", f"a{CLOSE}b", f"c{CLOSE}d")
        talk = [chat_user("go")]
        branches = [[*talk, *back(await ask(rig, talk, "x")), chat_user("why?")] for _ in range(2)]
        said = [await ask(rig, branch, "x") for branch in branches]
        records = await checkpoint(rig.participant("policy"))
        rig.kill("policy")
        rig.start("policy")
        restore(rig.participant("policy"), records, "x")
        resume(rig.participant("policy"), "restore")
        Engine(rig, f"g{CLOSE}h", f"i{CLOSE}j")
        assert [await ask(rig, branch, "x-a1") for branch in reversed(branches)] == said[::-1]
        for branch, reply in zip(branches, said, strict=True):
            await ask(rig, [*branch, *back(reply), chat_user("so?")], "x-a1")
        assert await parents(rig, "x-a1") == ["", "", "1", "2", "3", "4"]
