"""The measurement itself, small: it goes through, and what it shows is of the right kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_bench import measure
from gym_bench.measure import Bench
from gym_bench.options import Options
from gym_bench.report import document, table
from gym_kit.progress import Progress

pytestmark = pytest.mark.timeout(240)
WATCHES = 6
"""Of our kinds, of pods, and of the kinds there are."""


async def test_a_small_cluster_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SETTLE_SECONDS", 35)  # everything is listed once, half a minute after the start
    options = Options(stacks=3, checkpoints=20, schedules=2, rest_seconds=5, changes=3)
    points = await Bench(options, Progress.to_stderr(), tmp_path).points()
    assert [point.checkpoints for point in points] == [2, 20]
    for point in points:
        assert 10 < point.rss_started < 500
        assert point.rss_peak >= point.rss_loaded >= point.rss_started / 2
        assert 0 < point.ready_seconds <= point.all_seen_seconds
        assert len(point.reconcile) == options.changes
        assert point.s3_requests == 0, "suspended stacks leave their storage alone"
        assert {call.partition(" ")[0] for call in point.calls} <= {"watch"}, "nothing else is asked for at rest"
        assert point.start_calls < 40 * options.stacks
        assert point.start_s3_requests == 0, "the operator before has tried every storage: memory can be compared"
    found = document(options, points, {"cpus": 2.0, "load_before": 0.0, "load_after": 0.0})
    assert found["ratios"]["history"] == 10.0
    assert "change of a spec to its status, p99" in table(found)
