"""How a local runner ends by a fault of ours: in words, with the trace in a file."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from gym_servers.commands import _until_told
from gym_servers.stack.settings import SettingsError


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root, raising = logging.getLogger(), logging.raiseExceptions
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.raiseExceptions = raising


def test_an_error_that_nobody_expected_is_one_line_and_its_trace_is_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        raise KeyError("what a user wrote")

    with pytest.raises(typer.Exit) as ended:
        _until_told(work(), tmp_path)
    shown = capsys.readouterr().err
    assert (ended.value.exit_code, shown.count("\n")) == (1, 1)
    assert shown.startswith("gym-servers: a fault of ours (KeyError) ended the run; see ")
    assert "Traceback" in (tmp_path / "runner.log").read_text()


def test_an_error_that_a_user_can_mend_comes_out_as_it_is(tmp_path: Path) -> None:
    async def work() -> None:
        raise SettingsError("set this")

    with pytest.raises(SettingsError, match="set this"):
        _until_told(work(), tmp_path)
    assert (tmp_path / "runner.log").read_text() == ""
