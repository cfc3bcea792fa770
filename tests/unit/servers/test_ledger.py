"""The capture ledger as bytes: nothing is lost or invented, and what does not add up is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_servers.capture.ledger import CallRecord, Ledger, decode, encode, float32, int32
from gym_servers.protocol.errors import ProtocolError

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def calls(draw: st.DrawFn) -> CallRecord:
    ids = draw(IDS)
    return CallRecord(
        position=draw(st.text(max_size=8)),
        digest=draw(st.text(max_size=8)),
        prompt_ids=int32(draw(IDS)),
        ids=int32(ids),
        logprobs=float32([draw(st.floats(width=32, allow_nan=False)) for _ in ids]),
        weight_version=draw(st.text(max_size=4)),
        response=draw(st.dictionaries(st.text(max_size=5), JSON, max_size=3)),
    )


LEDGERS = st.lists(calls(), max_size=4).map(Ledger)


@given(st.text(max_size=12), LEDGERS)
def test_a_ledger_survives_its_record(key: str, ledger: Ledger) -> None:
    assert decode("record", encode(key, ledger)) == (key, ledger)


@given(LEDGERS.filter(lambda ledger: any(c.ids or c.prompt_ids for c in ledger.calls)), st.data())
def test_a_record_whose_arrays_are_cut_or_grown_is_refused(ledger: Ledger, data: st.DataObject) -> None:
    """Ids and log-probabilities that do not add up must never be joined."""
    whole = encode("r", ledger)
    head = whole.index(b"\n") + 1
    cut = data.draw(st.integers(1, len(whole) - head))
    with pytest.raises(ProtocolError, match="record r-1") as refused:
        decode("r-1", whole[:-cut])
    assert refused.value.code == "invalid_checkpoint_state"
    with pytest.raises(ProtocolError, match="left over"):
        decode("r-1", whole + b"\0" * cut)


def test_a_call_with_fewer_log_probabilities_than_tokens_does_not_exist() -> None:
    with pytest.raises(ValueError, match="2 token ids but 1 log-probabilities"):
        CallRecord("1.1", "d", int32([]), int32([1, 2]), float32([0.5]), "", {})


@pytest.mark.parametrize(
    "damage",
    [
        {"format": 2},
        {"format": None},
        {"calls": [{}]},
        {"calls": 3},
        {"calls": [{"prompt": -1, "generated": 0}]},
        {"key": ...},
    ],
)
def test_a_record_of_another_form_is_refused_by_name(damage: dict[str, object]) -> None:
    record = {**json.loads(encode("r", Ledger()).partition(b"\n")[0]), **damage}
    record = {name: value for name, value in record.items() if value is not ...}
    with pytest.raises(ProtocolError, match="record the-name"):
        decode("the-name", json.dumps(record).encode() + b"\n")


def test_bytes_that_are_no_record_are_refused() -> None:
    for data in (b"", b"\n", b"[]\n", b"\xff\xfe\n", b"null\n"):
        with pytest.raises(ProtocolError) as refused:
            decode("x", data)
        assert refused.value.code == "invalid_checkpoint_state"


def test_a_call_is_found_by_its_position_and_one_without_a_position_never() -> None:
    def call(position: str) -> CallRecord:
        return CallRecord(position, "d", int32([]), int32([]), float32([]), "", {"at": position})

    ledger = Ledger([call(""), call("1.1"), call("1.2")])
    found = ledger.at("1.2")
    assert found is not None
    assert found.response == {"at": "1.2"}
    assert ledger.at("") is None
    assert ledger.at("2.1") is None
