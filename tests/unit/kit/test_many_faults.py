"""The long run of random faults plays what it was asked for, and says what a process of it found."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gym_faults import many


@pytest.mark.parametrize(("examples", "processes"), [(10, 1), (10, 3), (2, 8), (10_000, 7)])
def test_each_sequence_is_played_by_one_process(examples: int, processes: int) -> None:
    shares = many.shares(examples, processes)
    assert sum(shares) == examples
    assert len(shares) == min(examples, processes)
    assert max(shares) - min(shares) <= 1


def test_what_one_process_finds_ends_the_others_and_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two finds something; the other would play on for an hour."""
    monkeypatch.setenv("N", "2")
    monkeypatch.setenv("PROCESSES", "2")
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen
    programs = iter(["import time; time.sleep(3600)", "raise SystemExit(1)"])

    def start(*_: object, **__: object) -> subprocess.Popen[bytes]:
        started.append(real([sys.executable, "-c", next(programs)]))
        return started[-1]

    monkeypatch.setattr(many.subprocess, "Popen", start)
    assert many.main() == 1
    assert all(process.poll() is not None for process in started)
