"""The whole loop on a real Kubernetes with real pods, as `make demo` plays it. `N=` repeats each target.

The cluster that is up is used, else one is brought up; the image is the project's as it lies there.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gym_kit.demo.options import Kill, Options
from gym_kit.demo.report import report
from gym_kit.demo.scenario import Scenario
from gym_kit.demo.stage import staged
from gym_kit.demo.table import Watch
from gym_kit.progress import Progress

REPEATS = int(os.environ.get("N", "1"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(REPEATS))
@pytest.mark.parametrize(
    "kill, during",
    [("agent", "work"), ("all", "checkpoint"), ("resources", "recovery"), ("operator", "work")],
)
def test_rollouts_continue_on_a_real_cluster(tmp_path: Path, kill: Kill, during: str, number: int) -> None:
    options = Options(kill=kill, rollouts=24, during=during)  # type: ignore[arg-type]
    with staged(options, Progress.to_stderr(), tmp_path) as stage, Watch() as watch:
        scenario = Scenario(stage, options, watch)
        played = scenario.play()
        played.bare_restart_seconds = scenario.bare_restart()
        counted = report(stage, options, played)
    assert counted["problems"] == []
    assert counted["ok"]
