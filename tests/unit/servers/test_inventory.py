"""What a model server and the engine's side say of a cut: nothing is left out, and nothing is taken for another's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gym_servers.capture.arrays import float32, int32
from gym_servers.capture.cuts import Standing, beyond
from gym_servers.capture.inventory import (
    Inventory,
    InventoryCall,
    Receipt,
    ReceiptCall,
    ReceiptRefused,
    check_receipt,
    inventory_of,
)
from gym_servers.capture.staging import pack, unpack
from gym_servers.capture.tokens import Frozen, Span, Tokens
from gym_servers.worker.streams import MOST_ENDED, PassingStream, Streams

CELL = "uid/cell-0"
FOLDERS = [{"folder": folder} for folder in ("../cell-0", "uid", "uid/cell-0/..", "/uid/cell-0", "other/cell-0", "")]


def calls(*tickets: str) -> list[InventoryCall]:
    return [InventoryCall(ticket=ticket, episode="r", model_call_id="1.1") for ticket in tickets]


def receipt(inventory: Inventory, **changes: Any) -> Receipt:
    given: dict[str, Any] = {
        "checkpoint_id": inventory.checkpoint_id,
        "inventory_digest": inventory.digest,
        "worker": "w",
        "key": "k",
        "calls": [ReceiptCall(ticket=call.ticket, state="kept", tokens=1) for call in inventory.calls],
    }
    return Receipt.model_validate({**given, **changes})


def test_the_digest_is_over_all_of_an_inventory_in_any_order() -> None:
    one = inventory_of("cp", CELL, calls("a", "b"))
    assert one == inventory_of("cp", CELL, calls("b", "a"))
    others = {
        inventory_of("cq", CELL, calls("a", "b")).digest,
        inventory_of("cp", "other/cell-0", calls("a", "b")).digest,
        inventory_of("cp", CELL, calls("a")).digest,
        inventory_of("cp", CELL, [*calls("a"), InventoryCall(ticket="b", episode="s", model_call_id="1.1")]).digest,
        inventory_of("cp", CELL, [*calls("a"), InventoryCall(ticket="b", episode="r", model_call_id="1.2")]).digest,
    }
    assert len(others | {one.digest}) == 6


@pytest.mark.parametrize(
    "change",
    [{"digest": "0"}, {"checkpoint_id": "other"}, {"calls": []}, {"checkpoint_id": "../x"}, {"more": 1}, *FOLDERS],
)
def test_an_inventory_that_is_not_its_digest_is_refused(change: dict[str, Any]) -> None:
    whole = inventory_of("cp", CELL, calls("a")).model_dump()
    with pytest.raises(ValidationError):
        Inventory.model_validate({**whole, **change})


def test_a_call_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ValidationError, match="named twice"):
        inventory_of("cp", CELL, calls("a", "a"))


def test_c9_a_receipt_answers_one_inventory_and_each_of_its_calls_once() -> None:
    inventory = inventory_of("cp", CELL, calls("a", "b"))
    check_receipt(inventory, receipt(inventory))
    kept = [ReceiptCall(ticket=ticket, state="kept", tokens=1) for ticket in ("a", "b", "b", "c")]
    for change, says in (
        ({"inventory_digest": inventory_of("cp", CELL, calls("a")).digest}, "another inventory"),
        ({"checkpoint_id": "cq"}, "another inventory"),
        ({"calls": kept[:1]}, "1 missing, 0 extra"),
        ({"calls": kept[:3]}, "0 missing, 1 extra"),
        ({"calls": [kept[0], kept[3]]}, "1 missing, 1 extra"),
    ):
        with pytest.raises(ReceiptRefused, match=says):
            check_receipt(inventory, receipt(inventory, **change))


FROZEN = st.lists(st.tuples(st.integers(0, 9), st.floats(-9, 0, width=32)), max_size=6).map(
    lambda tokens: Frozen(
        int32([token for token, _ in tokens]),
        float32([logprob for _, logprob in tokens]),
        (Span("w", 0, len(tokens)),) if tokens else (),
        "stop" if len(tokens) == 6 else None,
    )
)
STREAMS = st.dictionaries(st.text(min_size=1, max_size=4), FROZEN, max_size=4).filter(
    lambda streams: any(tokens.ids for tokens in streams.values())
)


@given(STREAMS, st.data())
def test_staged_tokens_come_back_whole_or_not_at_all(streams: dict[str, Frozen], data: st.DataObject) -> None:
    packed = pack(streams, {"other": "unknown"})
    assert unpack(packed) == streams
    for damaged in (packed[: -data.draw(st.integers(1, len(packed)))], packed + b"\0", b"{}\n", b"[]\n"):
        with pytest.raises(ValueError, match=r"\w"):
            unpack(damaged)


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_what_the_engine_has_is_put_behind_what_came_before_its_stream(
    said: list[int], start: int, arrived: int
) -> None:
    start, arrived = min(start, len(said)), min(max(arrived, start), len(said))

    def tokens(ids: list[int], version: str, first: int) -> Tokens:
        found = Tokens()
        for number, one in enumerate(ids):
            found.extend([one], [-(first + number) / 2], version)
        return found

    had = tokens(said[:start], "old", 0)
    for number in range(start, arrived):
        had.extend([said[number]], [-number / 2], "new")
    engine = tokens(said[start:], "new", start).frozen()
    call = Standing("r", "1.1", "d", "", int32([1]), had, 99, "")
    further = beyond(call, start, engine)
    assert further is not None
    whole = further.tokens.frozen()
    assert whole.ids == int32(said)
    assert whole.logprobs == float32([-number / 2 for number in range(len(said))])
    if arrived > start:
        other = Frozen(int32([10]), float32([0.0]), (Span("new", 0, 1),))
        assert beyond(call, start, other) is None


def test_a_passing_stream_is_followed_in_any_pieces() -> None:
    chunk = (
        b'data: {"choices":[{"token_ids":[1,2],"logprobs":{"token_logprobs":[-0.5,-1.0]},"finish_reason":null}]}\n\n'
    )
    last = b'data: {"choices":[{"token_ids":[3],"logprobs":{"token_logprobs":[-2]},"finish_reason":"stop"}]}\r\n\r\n'
    whole = b": comment\n\n" + chunk + last + b"data: [DONE]\n\n"
    for size in (1, 7, 1000):
        stream = PassingStream()
        for at in range(0, len(whole), size):
            stream.feed(whole[at : at + size])
        assert stream.frozen() == Frozen(int32([1, 2, 3]), float32([-0.5, -1.0, -2.0]), (Span("", 0, 3),), "stop")


@pytest.mark.parametrize(
    "line",
    [
        b"data: {\n",
        b"data: 5\n",
        b'data: {"error":{"message":"no"}}\n',
        b'data: {"choices":[{"token_ids":[1],"logprobs":{"token_logprobs":[]}}]}\n',
        b'data: {"choices":[{"token_ids":[1],"logprobs":{"token_logprobs":[null]}}]}\n',
        b'data: {"choices":[{"token_ids":[4294967296],"logprobs":{"token_logprobs":[-1]}}]}\n',
        b"data: " + b"[" * 200_000 + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_c9_a_stream_that_cannot_be_followed_is_said_to_be_so(line: bytes) -> None:
    stream = PassingStream()
    stream.feed(line)
    if line == b"\xff\xfe\n":
        with pytest.raises(ValueError, match="could not be read"):
            stream.frozen()
        return
    stream.feed(b'data: {"choices":[{"token_ids":[1],"logprobs":{"token_logprobs":[-1]}}]}\n')
    with pytest.raises(ValueError, match="could not be read"):
        stream.frozen()


def test_streams_that_have_ended_are_known_for_a_while_and_bounded() -> None:
    streams = Streams()
    for number in range(MOST_ENDED + 2):
        streams.end(str(number), streams.begin(str(number)))
    assert streams.find("0") is None
    assert streams.find(str(MOST_ENDED + 1)) is not None
    assert streams.find("never") is None


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_c20_of_a_request_that_was_sent_twice_the_later_stream_counts(first_ends_first: bool) -> None:
    streams = Streams()
    first, second = streams.begin("t"), streams.begin("t")
    for stream in (first, second) if first_ends_first else (second, first):
        streams.end("t", stream)
        assert streams.find("t") is second
