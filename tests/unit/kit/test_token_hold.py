"""When an engine is held - once, after so many tokens, and in the middle of a generation - and what is under way."""

from __future__ import annotations

from typing import Any

from gym_vllm.journal import BEHIND, Hold, OneBehind


def test_it_counts_all_streams_from_when_it_was_told_to() -> None:
    hold = Hold()
    assert not hold.passed("a", 50, last=False)
    hold.told({"tokens": "10"})
    assert not hold.passed("a", 6, last=False)
    assert hold.passed("b", 4, last=False)
    assert not hold.passed("b", 40, last=False), "once"


def test_it_counts_a_key_s_tokens_from_the_beginning_and_no_other_s() -> None:
    hold = Hold()
    assert not hold.passed("a", 9, last=False)
    hold.told({"tokens": "10", "key": "a"})
    assert not hold.passed("b", 50, last=False)
    assert hold.passed("a", 1, last=False)


def test_it_does_not_hold_what_has_just_ended() -> None:
    hold = Hold()
    hold.told({"tokens": "1", "key": ""})
    assert not hold.passed("a", 5, last=True)
    assert hold.passed("b", 1, last=False)


def test_told_that_it_need_not_it_does_not() -> None:
    hold = Hold()
    hold.told({"tokens": "1"})
    hold.told({})
    assert not hold.passed("a", 5, last=False)


def test_told_anew_it_has_not_come_to_that_yet() -> None:
    hold = Hold()
    hold.held = True
    hold.told({"tokens": "1", "key": ""})
    assert not hold.held


async def test_of_a_stream_that_goes_on_the_last_message_is_under_way_while_that_is_wanted() -> None:
    told: list[str] = []
    sent: list[bytes] = []

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for number in range(3):
            await send({"type": "http.response.body", "body": b"%d" % number, "more_body": True})
            told.append(b"".join(sent).decode())
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        told.append(b"".join(sent).decode())

    way = OneBehind(engine)

    async def nothing() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def reads(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def read(path: str, query: str = "") -> None:
        sent.clear()
        scope = {"type": "http", "method": "POST", "path": path, "query_string": query.encode(), "headers": []}
        await way(scope, nothing, reads)

    await read("/v1/completions")
    await read(BEHIND, "streams=1")
    await read("/v1/completions")
    await read(BEHIND, "streams=0")
    await read("/v1/completions")
    plainly = ["0", "01", "012", "012"]
    assert told == [*plainly, "", "0", "01", "012", *plainly]
