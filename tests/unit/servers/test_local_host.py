"""What the local runner keeps in its folder, on a disk that is full or whose files were spoilt."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from gym_rig.manifests import STACK
from gym_servers.coordination.record import CellRecord, Stage
from gym_servers.local import processes
from gym_servers.local.processes import LocalHost
from gym_servers.local.stack import local_stack
from gym_servers.stack.settings import SettingsError
from gym_servers.storage.store import StorageError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def host(folder: Path, **settings: Any) -> LocalHost:
    return LocalHost(folder, settings, {}, lambda *_: None)


def full(*_: Any, **__: Any) -> Any:
    raise FULL


async def test_a_record_is_read_as_it_was_saved(tmp_path: Path) -> None:
    assert host(tmp_path).load() is None
    for attempt in (1, 2):
        await host(tmp_path).save(CellRecord(stage=Stage.RUNNING, attempt=attempt))
    assert host(tmp_path).load() == CellRecord(stage=Stage.RUNNING, attempt=2)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"stage": "upside down"}', b"\xff\xfe\x00"])
def test_a_record_that_cannot_be_read_is_named_and_no_run_begins_anew_over_it(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "cell.json").write_bytes(text)
    with pytest.raises(SettingsError, match=r"cell\.json: .*restore that file .* or begin another run") as refused:
        host(tmp_path).load()
    assert "\n" not in str(refused.value)


def test_a_record_that_is_no_file_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "cell.json").mkdir()
    with pytest.raises(SettingsError, match=r"cell\.json"):
        host(tmp_path).load()


async def test_on_a_full_disk_the_record_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = CellRecord(stage=Stage.RUNNING, attempt=1)
    await host(tmp_path).save(before)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match="No space left"):
            await host(tmp_path).save(CellRecord(attempt=2))
    assert host(tmp_path).load() == before
    assert os.listdir(tmp_path) == ["cell.json"]  # noqa: PTH208


@pytest.mark.parametrize("step", ["settings", "log", "process"])
async def test_a_server_that_cannot_be_started_for_want_of_room_is_told_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    cell = host(tmp_path, env={"kind": "environment", "control_port": 1})
    if step == "settings":
        monkeypatch.setattr(Path, "write_text", full)
    elif step == "process":
        monkeypatch.setattr(processes, "start", full)
    else:
        (tmp_path / "env.log").mkdir()
    for _ in range(2):
        with pytest.raises(StorageError, match="cannot start env in "):
            await cell.processes()


@pytest.mark.parametrize("name", ["uid", "control-token", "cookie-secret"])
def test_a_value_that_did_not_fit_is_made_again(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    stack = local_stack(STACK, tmp_path)
    assert all([stack.identity.uid, *stack.environment.values()])


def test_values_that_cannot_be_kept_are_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(SettingsError, match=r"cannot use .*uid: No space left"):
        local_stack(STACK, tmp_path)
