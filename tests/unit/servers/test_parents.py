"""Which reply a conversation goes on from, where replies differ in reasoning and clients send back what they like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gym_servers.capture.parents import parent_of
from gym_servers.model.conversation import Conversation, Message, after, thought

USER = Message("user", "go on")


def said(text: str, reasoning: str = "") -> Message:
    return Message("assistant", text, reasoning=reasoning)


@dataclass(frozen=True)
class Reply:
    """A call; `seen` is the reasoning of each message that its model was shown, and its own."""

    chain: str
    parent: str
    thoughts: tuple[str, ...]
    seen: tuple[str, ...]


@dataclass
class Ledger:
    """Calls as a policy server captures them: a conversation that goes on from a parent is shown that one's history,
    and of the rest what the caller sends."""

    replies: dict[str, list[Reply]] = field(default_factory=dict)
    count: int = 0

    def parent(self, *messages: Message) -> Reply | None:
        conversation = Conversation(messages)
        return parent_of(self.replies, conversation.turns(), conversation.thoughts())

    def call(self, messages: Sequence[Message], reply: Message) -> Reply:
        parent = self.parent(*messages)
        seen = parent.seen if parent is not None else ()
        behind = (*messages[len(seen) :], reply)
        self.count += 1
        kept = Reply(
            f"call {self.count}",
            parent.chain if parent is not None else "",
            tuple(map(thought, behind)),
            (*seen, *(message.reasoning for message in behind)),
        )
        self.replies.setdefault(after(Conversation(tuple(messages)).turns()[-1], reply), []).append(kept)
        return kept


def test_a_lone_reply_is_known_again_with_its_reasoning_and_without() -> None:
    ledger = Ledger()
    first = ledger.call([USER], said("yes", "because"))
    assert ledger.parent(USER, said("yes", "because"), USER) is first
    assert ledger.parent(USER, said("yes"), USER) is first


@pytest.mark.parametrize("known", ["", "because"])
def test_other_reasoning_is_another_reply(known: str) -> None:
    ledger = Ledger()
    first = ledger.call([USER], said("yes", known))
    second = ledger.call([USER, said("yes", known), USER], said("no", known))
    assert ledger.parent(USER, said("yes", "it seems so"), USER) is None
    assert ledger.parent(USER, said("yes", known), USER, said("no", "it seems so"), USER) is first
    # What came before is another history, whatever the last turn is.
    assert ledger.parent(USER, said("yes", "it seems so"), USER, said("no", known), USER) is None
    assert ledger.parent(USER, said("yes", known), USER, said("no", known), USER) is second


def test_of_replies_that_differ_in_reasoning_alone_the_one_that_comes_back_is_taken() -> None:
    ledger = Ledger()
    talk = [USER, said("hello"), USER]
    before = ledger.call([USER], said("hello"))
    replies = {why: ledger.call(talk, said("yes", why)) for why in ("one", "two", "three")}
    for why, reply in replies.items():
        assert reply.parent == before.chain
        assert ledger.parent(*talk, said("yes", why), USER) is reply
    # Without it any of them may be meant: what is certain is the turn before.
    assert ledger.parent(*talk, said("yes"), USER) is before
    assert ledger.parent(USER, said("hello"), USER) is before
    assert ledger.parent(*talk, said("yes", "four"), USER) is before


def test_what_follows_tells_which_of_them_was_meant() -> None:
    ledger = Ledger()
    for why in ("one", "two"):
        ledger.call([USER], said("yes", why))
    of_two = ledger.call([USER, said("yes", "two"), USER], said("indeed"))
    assert ledger.parent(USER, said("yes"), USER, said("indeed"), USER) is of_two
    of_one = ledger.call([USER, said("yes", "one"), USER], said("indeed"))
    assert ledger.parent(USER, said("yes"), USER, said("indeed"), USER) is None
    assert ledger.parent(USER, said("yes", "one"), USER, said("indeed"), USER) is of_one
    assert ledger.parent(USER, said("yes", "two"), USER, said("indeed"), USER) is of_two


def test_a_reply_without_reasoning_may_be_one_that_came_back_without() -> None:
    ledger = Ledger()
    for why in ("", "because"):
        ledger.call([USER], said("yes", why))
    assert ledger.parent(USER, said("yes"), USER) is None
    found = ledger.parent(USER, said("yes", "because"), USER)
    assert found is not None
    assert found.seen == ("", "because")


def test_of_replies_that_differ_in_nothing_the_newest_is_taken() -> None:
    """As with a request that was repeated: whichever it is, its history is the same."""
    ledger = Ledger()
    ledger.call([USER], said("yes", "because"))
    newest = ledger.call([USER], said("yes", "because"))
    assert ledger.parent(USER, said("yes"), USER) is newest
    assert ledger.parent(USER, said("yes", "because"), USER) is newest


def test_reasoning_that_a_caller_brought_along_counts_too() -> None:
    """As of turns that were sampled elsewhere."""
    ledger = Ledger()
    for why in ("one", "two"):
        ledger.call([USER, said("elsewhere", why), USER], said("yes"))
    (one, two) = next(iter(ledger.replies.values()))
    assert ledger.parent(USER, said("elsewhere", "one"), USER, said("yes"), USER) is one
    assert ledger.parent(USER, said("elsewhere", "two"), USER, said("yes"), USER) is two
    assert ledger.parent(USER, said("elsewhere"), USER, said("yes"), USER) is None


def test_reasoning_that_comes_back_once_its_reply_was_gone_on_from_without_is_no_sign_of_another_reply() -> None:
    ledger = Ledger()
    talk = [USER, said("yes"), USER]
    one = ledger.call([USER], said("yes", "one"))
    ledger.call([USER], said("yes", "two"))
    ledger.call(talk, said("indeed"))  # of either: shown no reasoning
    told = [USER, said("yes", "one"), USER]
    ledger.call(told, said("indeed", "really"))
    # Its tokens lack what comes back, and the other's have what was never said.
    assert ledger.parent(*told, said("indeed"), USER) is one


def test_calls_of_which_no_reasoning_is_known_match_as_if_there_were_none_to_compare() -> None:
    """Those that an earlier version has captured."""
    turns = Conversation((USER, said("yes"), USER)).turns()
    old = Reply("old", "", (), ())
    for reasoning in ("", "because"):
        thoughts = Conversation((USER, said("yes", reasoning), USER)).thoughts()
        assert parent_of({turns[1]: [old]}, turns, thoughts) is old
    assert parent_of({turns[1]: [old]}, turns, ()) is old


# ---- any history, any client --------------------------------------------------------------------------------

Client = Callable[[list[Message]], list[Message]]


def keeps_all(messages: list[Message]) -> list[Message]:
    return messages


def keeps_none(messages: list[Message]) -> list[Message]:
    return [Message(one.role, one.content) for one in messages]


def keeps_the_last(messages: list[Message]) -> list[Message]:
    return [*keeps_none(messages[:-2]), *messages[-2:]]


CLIENTS = (keeps_all, keeps_none, keeps_the_last)
CALLS = st.lists(
    st.tuples(
        st.integers(0, 30),
        st.sampled_from(["yes", "no"]),
        st.sampled_from(["", "one", "two"]),
        st.sampled_from(CLIENTS),
    ),
    max_size=12,
)


@settings(max_examples=500)
@given(CALLS)
def test_no_client_is_ever_shown_reasoning_of_another_history(calls: list[tuple[int, str, str, Client]]) -> None:
    """Each call goes on from any earlier one, or from none."""
    ledger = Ledger()
    histories: list[list[Message]] = [[]]  # as they really were
    for before, text, reasoning, client in calls:
        real = [*histories[before % len(histories)], USER]
        reply = said(text, reasoning)
        sent = client(real)
        kept = ledger.call(sent, reply)
        for shown, message, back in zip(kept.seen, [*real, reply], [*sent, reply], strict=True):
            assert shown in (message.reasoning, "")
            assert not back.reasoning or shown == back.reasoning
        histories.append([*real, reply])


@given(CALLS)
def test_who_sends_all_reasoning_back_always_goes_on_from_its_own_reply(
    calls: list[tuple[int, str, str, Client]],
) -> None:
    """Of a model that always reasons: of one that may not, a reply without any may be one that came back bare."""
    ledger = Ledger()
    histories: list[list[Message]] = [[]]
    chains: dict[tuple[Message, ...], set[str]] = {(): {""}}
    for before, text, reasoning, _ in calls:
        history = histories[before % len(histories)]
        reply = said(text, reasoning or "three")
        kept = ledger.call([*history, USER], reply)
        assert kept.parent in chains[tuple(history)]
        histories.append([*history, USER, reply])
        chains.setdefault(tuple(histories[-1]), set()).add(kept.chain)
