"""What a checkpoint lacks of what an engine has said, by the engine's own journal."""

from __future__ import annotations

from gym_servers.capture.arrays import float32, int32
from gym_servers.capture.ledger import CallRecord, Ledger, Prefix
from gym_servers.capture.tokens import Frozen, Span
from gym_vllm.collect import not_kept
from gym_vllm.journal import Generated

PROMPT, SAID = [1, 2], [5, 6, 7, 8]


def in_progress(said: list[int]) -> Ledger:
    spans = (Span("", 0, len(said)),) if said else ()
    tokens = Frozen(int32(said), float32([0.0] * len(said)), spans)
    return Ledger(prefixes=[Prefix("1.1", "digest", "", int32(PROMPT), tokens, 10)])


def delivered(said: list[int]) -> Ledger:
    spans = (Span("", 0, len(said)),)
    ids, logprobs = int32(said), float32([0.0] * len(said))
    return Ledger([CallRecord("1.1", "digest", int32(PROMPT), ids, logprobs, spans, {})])


def lacks(cut: Ledger | None, stream: Generated, before: Ledger | None = None) -> bool:
    cuts = {"r-a1": cut} if cut is not None else {}
    return bool(not_kept(cuts, {"r": before} if before is not None else {}, [stream], lambda one: one.ids))


def test_all_that_was_said_is_in_progress_or_delivered() -> None:
    stream = Generated("r-a1", "1.1", PROMPT, SAID)
    assert not lacks(in_progress(SAID), stream)
    assert not lacks(delivered(SAID), stream)
    assert lacks(in_progress(SAID[:2]), stream), "half of it"
    assert lacks(in_progress([*SAID[:3], 9]), stream), "something else"
    assert lacks(Ledger(), stream)
    assert lacks(None, stream)


def test_what_goes_on_is_whole_with_what_it_goes_on_behind() -> None:
    stream = Generated("r-a1", "1.1", [*PROMPT, *SAID[:3]], SAID[3:])
    before = in_progress(SAID[:3])
    assert not lacks(in_progress(SAID), stream, before)
    assert lacks(before, stream, before)


def test_what_has_said_nothing_yet_lacks_nothing_but_what_it_goes_on_behind() -> None:
    assert not lacks(None, Generated("r-a1", "1.1", PROMPT))
    stream, before = Generated("r-a1", "1.1", [*PROMPT, *SAID]), in_progress(SAID)
    assert not lacks(before, stream, before)
    assert lacks(None, stream, before)


def test_the_last_message_of_a_stream_may_hold_several_tokens() -> None:
    stream = Generated("r", "1.1", PROMPT, SAID, times=[(0.0, 1), (0.1, 3)])
    assert stream.but_last_message == SAID[:1]
    assert Generated("r", "1.1", PROMPT).but_last_message == []
