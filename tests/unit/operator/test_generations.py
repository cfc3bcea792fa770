"""What policy servers count, added up: over processes that come and go, each call once."""

from __future__ import annotations

from gym_operator.rules.generations import MOST, Generations, Series, counts_of
from gym_servers.capture.reasons import BY_REASON, Reason, What
from gym_servers.protocol.messages import Report, Status

KEPT, REGENERATED = Series(What.CUT_KEPT), Series(What.REGENERATED, Reason.SEED)


def says(session: str, **counts: int) -> Status:
    return Status(
        kind="model",
        instance="policy",
        session=session,
        phase="idle",
        cell_attempt=0,
        report=Report(ready=True),
        generations=counts,
    )


def test_every_series_is_there_at_zero_as_soon_as_a_server_is_heard() -> None:
    """What appears with its first event has no increase: Prometheus would show none of what a recovery does."""
    one = Generations()
    assert one.totals == {}
    one.hear(0, "policy", says("a"))
    assert set(one.totals) == set(counts_of({}))
    assert set(one.totals.values()) == {0}
    assert len(one.totals) == len(What) + len(BY_REASON) * (len(Reason) - 1)


def test_what_a_process_adds_is_added() -> None:
    one = Generations()
    for kept in (0, 2, 2, 5):
        one.hear(0, "policy", says("a", cut_kept=kept))
    assert one.totals[KEPT] == 5


def test_a_process_that_begins_anew_neither_lowers_nor_repeats_anything() -> None:
    one = Generations()
    one.hear(0, "policy", says("a"))
    one.hear(0, "policy", says("a", cut_kept=5))
    one.hear(0, "policy", says("b"))
    assert one.totals[KEPT] == 5
    one.hear(0, "policy", says("b", cut_kept=3, regenerated=1, regenerated_seed=1))
    assert (one.totals[KEPT], one.totals[REGENERATED]) == (8, 1)
    one.hear(0, "policy", says("b", cut_kept=9, regenerated=1, regenerated_seed=1))
    assert (one.totals[KEPT], one.totals[REGENERATED]) == (14, 1)


def test_what_was_counted_before_anybody_listened_is_not_counted_again() -> None:
    """The operator before has counted it: an increase over both would have it twice."""
    successor = Generations()
    successor.hear(0, "policy", says("a", cut_kept=5))
    assert successor.totals[KEPT] == 0
    successor.hear(0, "policy", says("a", cut_kept=6))
    assert successor.totals[KEPT] == 1


def test_servers_of_other_kinds_make_no_series() -> None:
    one = Generations()
    one.hear(0, "agent", says("a", cut_kept=1).model_copy(update={"kind": "agent"}))
    assert one.totals == {}


def test_servers_and_cells_are_added_up() -> None:
    one = Generations()
    for counts in ({}, {"cut_kept": 2}):
        one.hear(0, "policy", says("a", **counts))
        one.hear(0, "other", says("b", **counts))
        one.hear(1, "policy", says("c", **counts))
    assert one.totals[KEPT] == 6


def test_a_count_that_falls_lowers_nothing_and_counts_nothing_twice() -> None:
    one, told = Generations(), []
    for kept in (0, 5, 1, 5, 6):
        one.hear(0, "policy", says("a", cut_kept=kept))
        told.append(one.totals[KEPT])
    assert told == [0, 5, 5, 5, 6]


def test_each_call_is_counted_once_by_its_reason() -> None:
    counts = counts_of({"regenerated": 6, "regenerated_seed": 2, "regenerated_other": 1, "regenerated_moonlight": 3})
    told = {series: count for series, count in counts.items() if count}
    assert told == {REGENERATED: 2, Series(What.REGENERATED, Reason.OTHER): 4}


def test_a_server_cannot_make_series_by_what_it_says() -> None:
    odd = {f"word-{n}": n for n in range(1000)} | {"cut_kept_seed": 1, "cut_kept": -3, "answered": 10**400}
    counts = counts_of(odd)
    assert set(counts) == set(counts_of({}))
    assert {series: count for series, count in counts.items() if count} == {Series(What.ANSWERED): MOST}
    assert float(counts[Series(What.ANSWERED)]) == MOST
