"""The clock of another machine, by the dates of its answers."""

from __future__ import annotations

from email.utils import formatdate

import pytest

from gym_servers.coordination.clocks import TOLERATED_SECONDS, PeerClock

NOW = 1_800_000_000.25


def heard(theirs: float, took: float = 0.01) -> float:
    clock = PeerClock()
    clock.heard(formatdate(theirs, usegmt=True), NOW, NOW + took)
    return clock.ahead


@pytest.mark.parametrize("skew", [-86_400.0, -300.0, -10.0, 10.0, 300.0, 86_400.0])
def test_a_clock_that_is_far_off_is_known_to_a_second(skew: float) -> None:
    assert abs(heard(NOW + skew) - skew) <= 1.0
    clock = PeerClock()
    clock.heard(formatdate(NOW + skew, usegmt=True), NOW, NOW)
    assert abs(clock.of(NOW + 60) - (NOW + skew + 60)) <= 1.0


@pytest.mark.parametrize("skew", [-TOLERATED_SECONDS, -1.0, 0.0, 1.0, TOLERATED_SECONDS])
def test_a_clock_that_is_about_right_is_left_alone(skew: float) -> None:
    assert heard(NOW + skew) == 0.0


def test_an_answer_that_took_long_proves_no_difference() -> None:
    assert heard(NOW + 20.0, took=25.0) == 0.0


@pytest.mark.parametrize("date", [None, "", "yesterday", "Thu, 99 Foo 2026 00:00:00 GMT"])
def test_who_tells_no_time_is_taken_for_right(date: str | None) -> None:
    clock = PeerClock()
    clock.heard(date, NOW, NOW)
    assert clock.ahead == 0.0


def test_a_clock_that_was_set_right_is_right() -> None:
    clock = PeerClock()
    for theirs in (NOW + 300, NOW):
        clock.heard(formatdate(theirs, usegmt=True), NOW, NOW)
    assert clock.ahead == 0.0
