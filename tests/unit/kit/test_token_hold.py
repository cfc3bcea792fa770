"""When an engine is held: once, after so many tokens, and in the middle of a generation."""

from __future__ import annotations

from gym_vllm.journal import Hold


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
