"""How much is logged is told by `GYM_LOG_LEVEL`, to each of the programs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAMS = {
    "gym_servers": ("gym-servers", ["serve", "--settings", "/nowhere"]),
    "gym_operator": ("gym-operator", ["run", "--kubeconfig", "/nowhere"]),
    "gym_operator.plugin": ("kubectl gym", ["inspect", "s3://bucket/run/one", "--endpoint", "http://127.0.0.1:1"]),
}
KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "s3cr3t", "AWS_SESSION_TOKEN": "t0k3n"}


def run(program: str, level: str) -> tuple[int, str]:
    command = [sys.executable, "-m", program, *PROGRAMS[program][1]]
    environment = {**os.environ, **KEYS, "GYM_LOG_LEVEL": level}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_level_that_there_is_not_is_told_in_a_line(program: str) -> None:
    told = "GYM_LOG_LEVEL is LOUD, which is no level: write DEBUG, INFO, WARNING, ERROR or CRITICAL"
    assert run(program, "loud") == (2, f"{PROGRAMS[program][0]}: {told}\n")


def test_whoever_looks_for_a_fault_shows_no_secret_with_it() -> None:
    code, said = run("gym_operator.plugin", "debug")
    assert code == 3 and "Traceback" in said, "it is shown where it ended"
    assert not [secret for secret in ("s3cr3t", "t0k3n") if secret in said]
