"""A recycled process id is never signalled, and names with brackets do not confuse the reading of /proc."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gym_kit.errors import KitError
from gym_kit.procs import ProcessId, end, find, identify, is_alive, parse_stat, send, spawn, wait_gone

SLEEP = ["sleep", "300"]


def test_start_time_is_read_past_a_name_with_spaces_and_brackets() -> None:
    fields = " ".join(str(number) for number in range(4, 52))

    assert parse_stat(f"42 (a) b (c) S {fields}") == ("S", 22)


def test_this_process_is_alive_under_its_own_start_time_only() -> None:
    me = identify(os.getpid())

    assert me is not None
    assert is_alive(me)
    assert not is_alive(replace(me, started=me.started + 1))


def test_a_process_with_the_same_id_but_another_start_time_is_left_alone(tmp_path: Path) -> None:
    process = spawn(SLEEP, tmp_path / "log")
    try:
        end([ProcessId(process.pid, process.started - 1)], grace=0)
        assert is_alive(process)
    finally:
        end([process], grace=0)
    assert not is_alive(process)


def test_an_ended_child_leaves_no_corpse(tmp_path: Path) -> None:
    process = spawn(SLEEP, tmp_path / "log")

    end([process], grace=5)

    assert not Path(f"/proc/{process.pid}").exists()


def test_a_process_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    stubborn = f"trap '' TERM; : > {ready}; while :; do sleep 0.05; done"
    process = spawn(["sh", "-c", stubborn], tmp_path / "log")
    while not ready.exists():
        assert is_alive(process)

    send(process, signal.SIGTERM)
    assert wait_gone([process], 0.2) == [process]
    end([process], grace=0.1)

    assert not is_alive(process)


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    process = spawn(["sh", "-c", "echo out; echo err >&2"], tmp_path / "log")

    assert wait_gone([process], 10) == []
    assert (tmp_path / "log").read_text() == "out\nerr\n"


def test_processes_are_found_by_their_command_line(tmp_path: Path) -> None:
    process = spawn([*SLEEP, "0.125"], tmp_path / "log")
    try:
        # The kernel lets a parent go on before the child's command line can be read.
        give_up = time.monotonic() + 10
        while not (found := find(lambda argv: argv == [*SLEEP, "0.125"])):
            assert time.monotonic() < give_up
        assert found == [process]
    finally:
        end([process], grace=0)


def test_a_missing_program_is_named(tmp_path: Path) -> None:
    with pytest.raises(KitError, match="no-such-program is not installed"):
        spawn(["no-such-program"], tmp_path / "log")
