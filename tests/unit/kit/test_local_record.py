"""The record of a start reads back as written and tells the living from leftovers; mounts come innermost first."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from gym_kit.cluster.local.host import mounts_below
from gym_kit.cluster.local.record import (
    Record,
    all_records,
    boot_id,
    from_json,
    is_abandoned,
    is_running,
    read,
    to_json,
)
from gym_kit.paths import state_folder
from gym_kit.procs import ProcessId, identify


@pytest.fixture
def me() -> ProcessId:
    process = identify(os.getpid())
    assert process is not None
    return process


@pytest.fixture
def record(me: ProcessId) -> Record:
    return Record(
        run=Path("/var/tmp/x/cluster-1"),
        kind="node",
        boot=boot_id(),
        ready=True,
        owner=me,
        processes={"etcd": me},
        network=True,
        cgroups=("/sys/fs/cgroup/kubepods",),
        folders=("/var/lib/cni",),
        sysctls={"net/ipv4/ip_forward": "0"},
    )


def test_a_record_reads_back_as_written(record: Record) -> None:
    assert from_json(to_json(record)) == record
    assert from_json(to_json(replace(record, owner=None))).owner is None


def test_a_node_runs_only_while_all_its_programs_do(record: Record, me: ProcessId) -> None:
    gone = ProcessId(me.pid, me.started + 1)

    assert is_running(record)
    assert not is_running(replace(record, ready=False))
    assert not is_running(replace(record, processes={"etcd": me, "dns": gone}))
    assert not is_running(replace(record, boot="an earlier boot"))


def test_a_run_is_abandoned_when_its_owner_or_its_boot_is_gone(record: Record, me: ProcessId) -> None:
    assert not is_abandoned(record)
    assert not is_abandoned(replace(record, owner=None))
    assert is_abandoned(replace(record, owner=ProcessId(me.pid, me.started + 1)))
    assert is_abandoned(replace(record, boot="an earlier boot"))


def test_records_are_found_in_the_state_folder(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    # Not pytest's own folder: its path is longer than the kit accepts for sockets.
    with tempfile.TemporaryDirectory() as home:
        monkeypatch.setenv("XDG_STATE_HOME", home)
        (state_folder() / "cluster-empty").mkdir(parents=True)
        run = state_folder() / "cluster-1"
        run.mkdir()
        written = replace(record, run=run).save()

        assert all_records() == [written]
        assert read(run) == written


def test_mounts_of_a_folder_come_innermost_first_and_neighbours_do_not_count() -> None:
    lines = [
        r"1 0 8:1 / /var/tmp/run rw - ext4 /dev/a rw",
        r"2 1 0:5 / /var/tmp/run/pods/with\040space rw - tmpfs tmpfs rw",
        r"3 1 0:6 / /var/tmp/run/pods rw - tmpfs tmpfs rw",
        r"4 0 0:7 / /var/tmp/run-2/pods rw - tmpfs tmpfs rw",
    ]

    assert mounts_below(Path("/var/tmp/run"), "\n".join(lines)) == [
        "/var/tmp/run/pods/with space",
        "/var/tmp/run/pods",
        "/var/tmp/run",
    ]
