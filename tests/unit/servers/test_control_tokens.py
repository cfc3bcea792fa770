"""Which tokens open the control port while they are being rotated."""

from __future__ import annotations

import hmac
from pathlib import Path

import pytest

from gym_servers.control import tokens
from gym_servers.control.tokens import ControlTokens, only, tokens_of_process
from gym_servers.stack.settings import SettingsError


class Files:
    """The tokens as files have them, and a clock."""

    def __init__(self, *found: str) -> None:
        self.found: tuple[str, ...] = found
        self.now = 0.0

    def read(self) -> tuple[str, ...]:
        if not self.found:
            raise SettingsError("no secret: set X")
        return self.found

    def tokens(self) -> ControlTokens:
        return ControlTokens(self.read, lambda: self.now)


def test_the_new_and_the_old_are_both_good_until_the_old_is_taken_away() -> None:
    files = Files("old")
    good = files.tokens()
    assert good.admits(b"Bearer old") and not good.admits(b"Bearer new")
    files.found = ("new", "old")
    assert not good.admits(b"Bearer new"), "files are not looked at for every call"
    files.now = 5.0
    assert good.admits(b"Bearer old") and good.admits(b"Bearer new")
    files.found, files.now = ("new",), 10.0
    assert good.admits(b"Bearer new") and not good.admits(b"Bearer old")


@pytest.mark.parametrize("header", [b"", b"Bearer ", b"Bearer", b"old", b"bearer old", b"Bearer old ", b"Basic old"])
def test_nothing_else_is_good(header: bytes) -> None:
    assert not Files("old", "older").tokens().admits(header)


def test_tokens_that_cannot_be_read_stay_as_they_were(caplog: pytest.LogCaptureFixture) -> None:
    files = Files("old")
    good = files.tokens()
    files.found, files.now = (), 5.0
    assert good.admits(b"Bearer old") and not good.admits(b"Bearer ")
    assert "the control token stays as it was" in caplog.text
    assert "Bearer" not in caplog.text


def test_every_token_is_compared_and_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the time an answer takes would say which token a guess resembles."""
    compared: list[bytes] = []

    def compare(given: bytes, good: bytes) -> bool:
        compared.append(good)
        return given == good

    monkeypatch.setattr(hmac, "compare_digest", compare)
    assert Files("new", "old").tokens().admits(b"Bearer new")
    assert compared == [b"Bearer new", b"Bearer old"]


def test_one_token_is_good_for_ever() -> None:
    assert only("t").admits(b"Bearer t") and not only("t").admits(b"Bearer u")


def test_a_process_reads_both_files_and_can_do_without_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current, previous = tmp_path / "current", tmp_path / "previous"
    monkeypatch.setenv(f"{tokens.TOKEN}_FILE", str(current))
    monkeypatch.setenv(f"{tokens.PREVIOUS}_FILE", str(previous))
    with pytest.raises(SettingsError, match="GYM_CONTROL_TOKEN_FILE"):
        tokens_of_process()
    current.write_text("new\n")
    assert tokens_of_process().admits(b"Bearer new")
    previous.write_text("")
    assert not tokens_of_process().admits(b"Bearer ")
    previous.write_text("old\n")
    assert tokens_of_process().admits(b"Bearer old")
