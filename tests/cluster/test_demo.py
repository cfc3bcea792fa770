"""The whole loop on a real Kubernetes with real pods, as `make demo` plays it. `N=` repeats each target.

The cluster that is up is used, else one is brought up; the image is the project's as it lies there.
"""

from __future__ import annotations

import os

import pytest

from gym_kit.demo.options import How, Kill, Options
from gym_kit.demo.report import report
from gym_kit.demo.scenario import Scenario
from gym_kit.demo.stage import Grounds, staged
from gym_kit.demo.table import Watch
from gym_kit.progress import Progress

REPEATS = int(os.environ.get("N", "1"))


@pytest.fixture(scope="module")
def bare_restarts() -> list[float]:
    """The bare restart, once it was measured: the same pods in the same cluster for every target."""
    return []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", range(REPEATS))
@pytest.mark.parametrize(
    "kill, how, during",
    [
        ("agent", "force", "work"),
        ("all", "force", "checkpoint"),
        ("resources", "force", "recovery"),
        ("operator", "force", "work"),
        ("model", "delete", "work"),
        ("all", "upgrade", "work"),
    ],
)
def test_rollouts_continue_on_a_real_cluster(
    whole_cluster: Grounds, bare_restarts: list[float], kill: Kill, how: How, during: str, number: int
) -> None:
    options = Options(kill=kill, how=how, rollouts=24, during=during)  # type: ignore[arg-type]
    with staged(whole_cluster, options, Progress.to_stderr()) as stage, Watch() as watch:
        scenario = Scenario(stage, options, watch)
        played = scenario.play()
        if not bare_restarts:
            bare_restarts.append(scenario.bare_restart())
        played.bare_restart_seconds = bare_restarts[0]
        counted = report(stage, options, played)
    assert counted["problems"] == []
    assert counted["ok"]
