"""`make` alone says what can be made."""

from __future__ import annotations

import re
import subprocess

from gym_kit.image import PROJECT


def test_help_lists_every_target_in_columns() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (PROJECT / "Makefile").read_text(), re.MULTILINE)
    done = subprocess.run(["make", "-C", str(PROJECT), "--no-print-directory"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == set(phony.split())
    assert len({len(re.match(r"\S+ +", line)[0]) for line in lines}) == 1, done.stdout  # type: ignore[index]
