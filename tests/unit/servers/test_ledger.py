"""The capture ledger as bytes: nothing is lost or invented, and what does not add up is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_servers.capture.arrays import float32, int32, to_bytes
from gym_servers.capture.ledger import CallRecord, Ledger, Prefix, decode, encode
from gym_servers.capture.tokens import Frozen, Span, Tokens
from gym_servers.protocol.digests import canonical
from gym_servers.protocol.errors import ProtocolError

EMPTY = {"position": "", "digest": "", "prompt": 0, "generated": 0, "spans": [], "response": {}}
IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def generations(draw: st.DrawFn) -> Frozen:
    """Tokens of several weight versions."""
    tokens = Tokens()
    for version in draw(st.lists(st.text(max_size=4), max_size=3)):
        ids = draw(IDS)
        tokens.extend(ids, [draw(st.floats(width=32, allow_nan=False)) for _ in ids], version)
    tokens.finish = draw(st.none() | st.sampled_from(["stop", "length"]))
    return tokens.frozen()


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """Calls some of which go on from earlier ones, with or without their tokens, and prefixes."""
    ledger = Ledger()
    for _ in range(draw(st.integers(0, 4))):
        parent = draw(st.sampled_from([None, *ledger.calls]))
        tokens = draw(generations())
        ledger.calls.append(
            CallRecord(
                draw(st.text(max_size=8)),
                draw(st.text(max_size=8)),
                int32(_history(draw, parent) + draw(IDS)),
                tokens.ids,
                tokens.logprobs,
                tokens.spans,
                draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
                parent.chain if parent else "",
                draw(st.text(max_size=8)),
                thoughts=tuple(draw(st.lists(st.text(max_size=4), max_size=3))),
            )
        )
    for _ in range(draw(st.integers(0, 3))):
        parent = draw(st.sampled_from([None, *ledger.calls]))
        ledger.prefixes.append(
            Prefix(
                draw(st.text(max_size=8)),
                draw(st.text(max_size=8)),
                parent.chain if parent else "",
                int32(_history(draw, parent) + draw(IDS)),
                draw(generations()),
                draw(st.integers(0, 4096)),
                draw(st.sampled_from(["", "seed"])),
            )
        )
    ledger.prefixes.sort(key=lambda prefix: prefix.order)
    return ledger


def _history(draw: st.DrawFn, parent: CallRecord | None) -> list[int]:
    carried = parent is not None and draw(st.booleans())
    return [*parent.prompt_ids, *parent.ids] if parent is not None and carried else []


@given(st.text(max_size=12), ledgers())
def test_a_ledger_survives_its_record(key: str, ledger: Ledger) -> None:
    data = encode(key, ledger)
    assert decode("record", data) == (key, ledger)
    assert encode(key, decode("record", data)[1]) == data


@given(ledgers().filter(lambda ledger: any(c.ids for c in [*ledger.calls])), st.data())
def test_c11_a_record_whose_arrays_are_cut_or_grown_is_refused(ledger: Ledger, data: st.DataObject) -> None:
    """Ids and log-probabilities that do not add up must never be joined."""
    whole = encode("r", ledger)
    head = whole.index(b"\n") + 1
    cut = data.draw(st.integers(1, len(whole) - head))
    with pytest.raises(ProtocolError, match="record r-1") as refused:
        decode("r-1", whole[:-cut])
    assert refused.value.code == "invalid_checkpoint_state"
    with pytest.raises(ProtocolError, match="left over"):
        decode("r-1", whole + b"\0" * cut)


def test_the_tokens_of_a_parent_are_written_once() -> None:
    """A rollout of many turns grows by what is new, not by all that came before."""
    calls, history, chain = [], list[int](), ""
    for turn in range(50):
        prompt = [*history, *range(20)]
        generated = list(range(30))
        call = CallRecord(
            f"1.{turn}",
            str(turn),
            int32(prompt),
            int32(generated),
            float32([0.5] * 30),
            (Span("", 0, 30),),
            {},
            chain,
        )
        calls.append(call)
        history, chain = prompt + generated, call.chain
    size = len(encode("r", Ledger(calls)))
    bare = sum(len(encode("r", Ledger([CallRecord("1.1", "d", int32(), int32(), float32(), (), {})]))) for _ in calls)
    assert size < bare + 50 * (20 + 30 + 30) * 4 + 50 * 200


def test_c11_a_call_with_fewer_log_probabilities_than_tokens_does_not_exist() -> None:
    with pytest.raises(ValueError, match="2 token ids but 1 log-probabilities"):
        CallRecord("1.1", "d", int32(), int32([1, 2]), float32([0.5]), (Span("", 0, 2),), {})
    with pytest.raises(ValueError, match="2 token ids but 1 log-probabilities"):
        Frozen(int32([1, 2]), float32([0.5]), (Span("", 0, 2),))
    tokens = Tokens()
    with pytest.raises(ValueError, match="1 token ids but 2 log-probabilities"):
        tokens.extend([1], [0.5, 0.5], "")
    assert len(tokens) == 0


@pytest.mark.parametrize(
    "spans", [(), (Span("a", 0, 1),), (Span("a", 0, 3),), (Span("a", 1, 2),), (Span("a", 0, 1), Span("b", 0, 2))]
)
def test_c14_every_token_has_one_weight_version(spans: tuple[Span, ...]) -> None:
    with pytest.raises(ValueError, match="weight versions"):
        Frozen(int32([1, 2]), float32([0.5, 0.5]), spans)


def test_c14_spans_of_one_version_are_joined_and_others_are_kept_apart() -> None:
    tokens = Tokens()
    for version, count in (("one", 2), ("one", 1), ("two", 2), ("one", 1), ("", 0)):
        tokens.extend([7] * count, [0.5] * count, version)
    assert tokens.spans == (Span("one", 0, 3), Span("two", 3, 5), Span("one", 5, 6))


def test_c14_what_the_engine_says_at_the_end_counts_for_its_own_tokens_alone() -> None:
    tokens = Tokens()
    tokens.extend([1, 2], [0.5, 0.5], "before")
    tokens.extend([3, 4, 5], [0.5] * 3, "")
    tokens.versions((Span("new", 0, 1), Span("newer", 1, 3)), 2)
    assert tokens.spans == (Span("before", 0, 2), Span("new", 2, 3), Span("newer", 3, 5))
    with pytest.raises(ValueError, match="weight versions for 4"):
        tokens.versions((Span("new", 0, 2),), 2)
    assert tokens.spans[-1] == Span("newer", 3, 5)


def test_a_chain_is_of_one_history_alone() -> None:
    def call(**changes: object) -> str:
        given: dict[str, object] = {
            "position": "1.1",
            "digest": "d",
            "prompt_ids": int32([1]),
            "ids": int32([2]),
            "logprobs": float32([0.5]),
            "spans": (Span("", 0, 1),),
            "response": {},
        }
        return CallRecord(**{**given, **changes}).chain  # type: ignore[arg-type]

    chains = [call(), call(parent="x"), call(digest="e"), call(prompt_ids=int32([2])), call(ids=int32([3]))]
    assert len(set(chains)) == 5
    assert call(position="9.9", logprobs=float32([0.25])) == call()


def test_a_record_of_the_first_format_is_read() -> None:
    call = {
        "position": "1.1",
        "digest": "d",
        "prompt": 1,
        "generated": 2,
        "weight_version": "w",
        "response": {"n": 1},
    }
    head = canonical({"format": 1, "key": "r-a2", "calls": [call]})
    arrays = to_bytes(int32([5])) + to_bytes(int32([6, 7])) + to_bytes(float32([0.5, 0.25]))
    key, ledger = decode("r", head + b"\n" + arrays)
    assert key == "r-a2"
    (read,) = ledger.calls
    assert (read.ids, read.logprobs, read.spans) == (int32([6, 7]), float32([0.5, 0.25]), (Span("w", 0, 2),))
    assert read.chain
    assert read.thoughts == ()
    assert ledger.prefixes == []


def test_a_record_that_says_nothing_of_reasoning_is_read() -> None:
    call = CallRecord("1.1", "d", int32([1]), int32([2]), float32([0.5]), (Span("", 0, 1),), {}, thoughts=("", "t"))
    head, _, arrays = encode("r", Ledger([call])).partition(b"\n")
    record = json.loads(head)
    assert record["calls"][0].pop("thoughts") == ["", "t"]
    (read,) = decode("r", canonical(record) + b"\n" + arrays)[1].calls
    assert read == replace(call, thoughts=())


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 3},
        {"format": None},
        {"calls": [{}]},
        {"calls": 3},
        {"calls": [{"prompt": -1, "generated": 0}]},
        {"calls": [{**EMPTY, "thoughts": 5}]},
        {"prefixes": [{}]},
        {"prefixes": 3},
        {"key": ...},
    ],
)
def test_a_record_of_another_form_is_refused_by_name(damage: dict[str, object]) -> None:
    record = {**json.loads(encode("r", Ledger()).partition(b"\n")[0]), **damage}
    record = {name: value for name, value in record.items() if value is not ...}
    with pytest.raises(ProtocolError, match="record the-name"):
        decode("the-name", json.dumps(record).encode() + b"\n")


def test_a_prompt_that_goes_on_from_other_tokens_than_its_parents_is_refused() -> None:
    first = CallRecord("1.1", "d", int32([1]), int32([2]), float32([0.5]), (Span("", 0, 1),), {})
    prompt = int32([1, 2, 3])
    second = CallRecord("1.2", "e", prompt, int32(), float32(), (), {}, first.chain)
    data = encode("r", Ledger([first, second]))
    assert decode("r", data)[1].calls[1].prompt_ids == prompt
    with pytest.raises(ProtocolError, match="goes on from"):
        decode("r", data.replace(b'"shared":2', b'"shared":1'))
    with pytest.raises(ProtocolError, match="record r"):
        decode("r", data.replace(f'"parent":"{first.chain}"'.encode(), b'"parent":"none"'))


def test_bytes_that_are_no_record_are_refused() -> None:
    for data in (b"", b"\n", b"[]\n", b"\xff\xfe\n", b"null\n"):
        with pytest.raises(ProtocolError) as refused:
            decode("x", data)
        assert refused.value.code == "invalid_checkpoint_state"
