"""What is read from outside can be written again, or is refused in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_servers.protocol.digests import canonical
from gym_servers.protocol.strict_json import read_json

TEXTS = st.text("a\\u\x00\u00e9\ud83d\ude00\U0001f600", max_size=6)  # also halves of a surrogate pair
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS
VALUES = LEAVES | st.lists(LEAVES, max_size=3) | st.dictionaries(TEXTS, LEAVES, max_size=3)


def can_go_on(value: Any) -> bool:
    """Whether a client could send it: what the clients of this project are."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True


@given(VALUES, st.booleans())
def test_a_text_is_read_if_and_only_if_its_value_can_be_passed_on(written: Any, escaped: bool) -> None:
    text = json.dumps(written, ensure_ascii=escaped).encode(errors="surrogatepass")
    value = json.loads(text)
    try:
        read = read_json(text)
    except ValueError:
        assert not can_go_on(value)
    else:
        assert can_go_on(value)
        assert canonical(read) == canonical(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"NaN", "not finite"),
        (b'{"a": [-Infinity]}', "not finite"),
        (b"1e999", "not finite"),
        (b"[-1E+0400]", "not finite"),
        (b"1" + b"0" * 400 + b".5", "not finite"),
        (rb'"\ud800"', "half of a surrogate pair"),
        (rb'{"\uDFFF": 1}', "half of a surrogate pair"),
        (b'"\xed\xa0\x80"', "decode"),
        (b"[" * 100_000, "nested too deeply"),
        (b"{", "Expecting"),
        (b"\xff\xfe\x00", "decode"),
    ],
)
def test_what_cannot_be_passed_on_is_refused_in_words(text: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_json(text)


@pytest.mark.parametrize("value", [1e308, 10**300, "e9999 \\ud800 \U0001f600", {"\U0001f600": -1e-999}, "1" * 400])
def test_what_only_looks_odd_is_read(value: Any) -> None:
    assert read_json(json.dumps(value).encode()) == value
