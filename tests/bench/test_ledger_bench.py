"""The measurement of the capture ledger, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gym_bench.ledger import CALLS, measured, told


async def test_it_measures_what_it_says() -> None:
    found = await measured(20, 0, training=True, idle_seconds=0.1)
    assert found["rollouts"] == 20
    assert 1 <= found["disk_files"] < 20 * CALLS
    assert found["disk_mib"] > 0
    assert found["append_ms"]["p50"] > 0
    assert told(found).startswith("    20 rollouts")


async def test_ten_times_as_many_rollouts_hold_no_more_files_open() -> None:
    few, many = [await measured(rollouts, 0, training=False, idle_seconds=0.1) for rollouts in (20, 200)]
    assert many["disk_files"] > few["disk_files"]
    assert many["open_files"] == few["open_files"]


def test_the_whole_measurement_runs_as_make_runs_it(tmp_path: Path) -> None:
    output = tmp_path / "figures" / "ledger.json"
    words = ["--sizes", "8", "--output", str(output)]
    done = subprocess.run([sys.executable, "-m", "gym_bench.ledger", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    sizes = json.loads(output.read_text())["sizes"]
    assert [(one["rollouts"], one["training"]) for one in sizes] == [(8, False), (8, True)]
    assert done.stdout.count("8 rollouts") == 2
