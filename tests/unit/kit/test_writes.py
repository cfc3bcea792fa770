"""Which writes an operator is killed at: a few in each run, all of them in a long one."""

from __future__ import annotations

from gym_rig.writes import kills


def test_a_long_run_kills_before_and_after_every_write() -> None:
    assert kills(3, all_of_them=True) == [(1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]


def test_a_short_run_spreads_over_all_writes_and_both_sides_of_them() -> None:
    assert kills(12, all_of_them=False) == [(1, False), (4, True), (7, False), (10, True)]
    assert kills(20, 6, all_of_them=False) == [(6, False), (9, True), (12, False), (15, True), (18, False)]
