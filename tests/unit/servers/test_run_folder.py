"""A run's folder is held by one runner at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_servers.local.folder import alone
from gym_servers.stack.settings import SettingsError


def test_a_folder_is_one_runners_at_a_time_and_free_however_that_one_ended(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "run"
    with alone(folder), pytest.raises(SettingsError, match=r"another gym-servers is at work in .*run: wait for"):
        alone(folder).__enter__()
    with pytest.raises(ZeroDivisionError), alone(folder):
        raise ZeroDivisionError
    with alone(folder), alone(tmp_path / "other"):
        pass


@pytest.mark.parametrize("path", ["file", "file/run"])
def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with (
        pytest.raises(SettingsError, match=f"cannot use .*{path}: .*; check its permissions"),
        alone(tmp_path / path),
    ):
        raise AssertionError
