"""When a watch counts as late, and when as silent."""

from __future__ import annotations

from gym_operator.rules.watch_health import LATE_SECONDS, SILENT_SECONDS, Watches

PODS = ("pods", None)
LOOK_SECONDS = 30.0


def looked(watches: Watches, seconds: float, since: float, **versions: int) -> float:
    """Looks that go on finding the same; the time of the last."""
    now = since
    while now < since + seconds:
        now += LOOK_SECONDS
        watches.found(PODS, versions, (), now)
    return now


def test_k17_a_watch_that_does_not_tell_what_is_there_is_late_and_then_silent() -> None:
    watches = Watches()
    watches.told(PODS, 10)
    watches.found(PODS, {"a": 12}, (), 0.0)
    assert watches.late() == [], "the event may be on the way"
    looked(watches, LATE_SECONDS, 0.0)
    assert (watches.late(), watches.silent()) == (["pods"], [])
    looked(watches, SILENT_SECONDS, LATE_SECONDS)
    assert watches.silent() == ["pods"]
    watches.told(PODS, 12)
    assert (watches.late(), watches.silent()) == ([], [])


def test_k17_a_watch_of_one_namespace_is_named() -> None:
    watches = Watches()
    for now in (0.0, SILENT_SECONDS + 1):
        watches.found(("pods", "team"), {"a": 1}, (), now)
    assert watches.silent() == ["pods in team"]


def test_k17_a_quiet_cluster_makes_no_watch_silent() -> None:
    watches = Watches()
    watches.told(PODS, 10)
    for now in (0.0, 1e6):
        watches.listed(PODS, {"a": 10, "b": 3}, now)
    assert (watches.late(), watches.silent()) == ([], [])


def test_k17_an_api_server_that_is_away_makes_no_watch_silent() -> None:
    """What was on the way when it went is told when it is back, however long that takes: no restart helps."""
    watches = Watches()
    watches.found(PODS, {"a": 12}, (), 0.0)
    assert (watches.late(), watches.silent()) == ([], []), "an hour without a look proves nothing"
    watches.told(PODS, 12)
    watches.found(PODS, {}, (), 3600.0)
    assert (watches.late(), watches.silent()) == ([], [])


def test_k17_what_is_gone_by_now_is_nothing_to_tell() -> None:
    """A watch that begins anew lists what is there: it will never speak of what was deleted meanwhile."""
    for gone_by in ("event", "list"):
        watches = Watches()
        watches.found(PODS, {"a": 12}, (), 0.0)
        if gone_by == "event":
            watches.found(PODS, {}, ("a",), LATE_SECONDS + 1)
        else:
            watches.listed(PODS, {}, LATE_SECONDS + 1)
        assert watches.late() == []


def test_k17_a_watch_that_lags_and_catches_up_is_not_late() -> None:
    watches = Watches()
    for step in range(20):
        watches.found(PODS, {"a": 10 + step}, (), step * LOOK_SECONDS)
        assert watches.late() == []
        watches.told(PODS, 10 + step)
