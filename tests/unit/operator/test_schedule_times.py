"""The times of a schedule: where clocks are put forward and back, after long outages, and whatever is asked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_operator.api.cron import check_cron
from gym_operator.rules.schedule_times import Cron, Every, Times

BERLIN, YORK, LORD_HOWE = ZoneInfo("Europe/Berlin"), ZoneInfo("America/New_York"), ZoneInfo("Australia/Lord_Howe")
YEAR = 366 * 86400.0
BEGIN = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def at(*when: int, zone: Any = UTC, fold: int = 0) -> float:
    return datetime(*when, tzinfo=zone, fold=fold).timestamp()  # type: ignore[misc, arg-type]


def all_after(times: Times, after: float, until: float) -> list[float]:
    found = []
    while (time := times.following(after)) is not None and time <= until:
        found.append(time)
        after = time
    return found


def test_every_counts_from_its_anchor() -> None:
    times = Every(120, anchor=1000.0)
    assert times.following(0.0) == 1120.0
    assert times.following(1000.0) == 1120.0
    assert times.following(1120.0) == 1240.0
    assert times.latest(1000.0, 1119.0) is None
    assert times.latest(1000.0, 1120.0) == 1120.0
    assert times.latest(1120.0, 1239.0) is None
    assert times.latest(1000.0, 9999.0) == 9880.0
    assert times.latest(0.0, 1000.0) is None, "its creation is not one of its times"


def test_cron_is_read_in_its_zone() -> None:
    assert Cron("0 3 * * *", BERLIN).following(at(2026, 7, 1)) == at(2026, 7, 1, 1)
    assert Cron("0 3 * * *", BERLIN).following(at(2026, 1, 1)) == at(2026, 1, 1, 2)
    assert Cron("0 3 * * *", UTC).following(at(2026, 7, 1)) == at(2026, 7, 1, 3)
    assert Cron("*/20 * * * *", UTC).latest(at(2026, 7, 1), at(2026, 7, 1, 5, 59)) == at(2026, 7, 1, 5, 40)
    assert Cron("0 0 29 2 *", UTC).following(at(2026, 1, 1)) == at(2028, 2, 29)


def test_a_time_that_the_clock_skips_comes_when_it_goes_on() -> None:
    """In Berlin 02:00 to 03:00 of 29 March 2026 does not exist."""
    days = all_after(Cron("30 2 * * *", BERLIN), at(2026, 3, 28, zone=BERLIN), at(2026, 3, 31, zone=BERLIN))
    assert days == [
        at(2026, 3, 28, 2, 30, zone=BERLIN),
        at(2026, 3, 29, 3, 0, zone=BERLIN),
        at(2026, 3, 30, 2, 30, zone=BERLIN),
    ]


def test_a_time_that_comes_twice_counts_once() -> None:
    """In Berlin 02:00 to 03:00 of 25 October 2026 comes twice."""
    times = Cron("30 2 * * *", BERLIN)
    days = all_after(times, at(2026, 10, 24, zone=BERLIN), at(2026, 10, 27, zone=BERLIN))
    assert [datetime.fromtimestamp(day, BERLIN).day for day in days] == [24, 25, 26]
    second = at(2026, 10, 25, 2, 30, zone=BERLIN, fold=1)
    assert days[1] == second - 3600
    assert times.latest(days[1], second + 60) is None
    assert times.following(second - 600) == days[2]


def test_short_intervals_just_go_on_where_clocks_change() -> None:
    for day in (at(2026, 3, 29), at(2026, 10, 25)):
        found = all_after(Cron("*/15 * * * *", BERLIN), day, day + 6 * 3600)
        assert found == [day + 900.0 * n for n in range(1, 25)]


def test_years_of_outage_are_not_walked_through() -> None:
    """A minutely schedule has half a million times a year; the newest is found among the last hour's."""
    steps = 0

    class Counting(Cron):
        def _after(self, begin: float) -> Any:
            nonlocal steps
            for time in super()._after(begin):
                steps += 1
                yield time

    times = Counting("* * * * *", UTC)
    assert times.latest(BEGIN, BEGIN + 20 * YEAR) == BEGIN + 20 * YEAR
    assert steps <= 61


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("* * * *", "five fields"),
        ("* * * * * *", "five fields"),
        ("*  * * * *", "five fields"),
        ("@hourly", "five fields"),
        ("60 * * * *", "minute"),
        ("* 24 * * *", "hour"),
        ("* * 0 * *", "day-of-month"),
        ("* * * 13 *", "month"),
        ("* * * * 8", "day-of-week"),
        ("* * 31 2 *", "day-of-month"),
        ("x * * * *", "minute"),
    ],
)
def test_what_cron_does_not_know_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_cron(text)


MINUTES = st.sampled_from(["*", "*/7", "0", "30", "59", "0,30", "5-20/5"])
HOURS = st.sampled_from(["*", "*/2", "0", "1", "2", "3", "1-3", "23"])
DAYS = st.sampled_from(["*", "1", "29", "31", "25-31"])
MONTHS = st.sampled_from(["*", "3", "10", "3,10", "2-4"])
WEEKDAYS = st.sampled_from(["*", "0", "7", "1-5", "SUN"])
ZONES = st.sampled_from([UTC, BERLIN, YORK, LORD_HOWE, ZoneInfo("Pacific/Apia"), ZoneInfo("Asia/Kathmandu")])
CRONS = st.builds(lambda *parts: Cron(" ".join(parts[:5]), parts[5]), MINUTES, HOURS, DAYS, MONTHS, WEEKDAYS, ZONES)
EVERIES = st.builds(Every, st.integers(10, 86400), st.integers(0, 86400).map(lambda late: BEGIN + late))
# Around the changes of the clocks, where it can go wrong, and anywhere.
CHANGES = [at(2026, 3, 29, 1), at(2026, 10, 25, 1), at(2026, 3, 8, 7), at(2026, 11, 1, 6), at(2026, 4, 4, 15)]
MOMENTS = st.one_of(
    st.builds(lambda near, off: near + off, st.sampled_from(CHANGES), st.integers(-10800, 10800)),
    st.integers(0, 31_536_000).map(lambda late: BEGIN + late),
).map(float)


@given(times=st.one_of(CRONS, EVERIES), after=MOMENTS, width=st.integers(0, 40 * 86400))
def test_the_newest_time_is_the_last_of_all_that_follow(times: Times, after: float, width: int) -> None:
    until = after + width
    newest = times.latest(after, until)
    if newest is None:
        first = times.following(after)
        assert first is None or first > until
    else:
        assert after < newest <= until
        following = times.following(newest)
        assert following is None or following > until


@given(times=st.one_of(CRONS, EVERIES), after=MOMENTS)
def test_times_only_go_forward_and_each_is_found_again(times: Times, after: float) -> None:
    moment = after
    for _ in range(5):
        following = times.following(moment)
        if following is None:
            return
        assert following > moment
        assert times.latest(moment, following) == following
        assert times.latest(following, following) is None
        moment = following


@given(cron=CRONS, after=MOMENTS)
def test_a_time_is_what_its_fields_say_unless_the_clock_skips_it(cron: Cron, after: float) -> None:
    time = cron.following(after)
    assert time is not None
    local = datetime.fromtimestamp(time, cron.zone)
    before = datetime.fromtimestamp(time - 1, cron.zone)
    skipped = local.utcoffset() != before.utcoffset()
    if not skipped:
        midnight = local.replace(hour=0, minute=0) - timedelta(minutes=1)
        same = Cron(cron.fields, UTC)
        as_utc = local.replace(tzinfo=UTC).timestamp()
        assert same.latest(midnight.replace(tzinfo=UTC).timestamp(), as_utc) == as_utc
