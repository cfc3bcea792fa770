"""A machine that cannot have vLLM is told so in a sentence, and nothing is installed on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_kit import suites, vllm
from gym_kit.errors import KitError
from gym_kit.progress import Progress

GIB = 1024**3


@pytest.mark.parametrize(
    ("machine", "memory", "says"),
    [("aarch64", 64 * GIB, "this is aarch64"), ("x86_64", 2 * GIB, "needs 5 GiB"), ("x86_64", 8 * GIB, None)],
)
def test_what_a_machine_lacks(machine: str, memory: int, says: str | None) -> None:
    reason = vllm.unfit(machine, memory)
    assert reason is None if says is None else says in (reason or "")


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project without the environment, on a machine that could have it."""
    monkeypatch.setattr(vllm, "PROJECT", tmp_path)
    monkeypatch.setattr(vllm, "unfit", lambda machine, memory: None)
    return tmp_path


def test_it_is_installed_once(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(vllm, "DISK_BYTES", 0)
    monkeypatch.setattr(vllm, "run", lambda words, **_: made.append(words))
    assert vllm.missing(Progress.to_stderr()) is None
    assert made == [["make", ".venv-vllm/.installed"]]
    (bare / ".venv-vllm").mkdir()
    (bare / ".venv-vllm/.installed").touch()
    assert vllm.missing(Progress.to_stderr()) is None
    assert len(made) == 1


def test_why_it_could_not_be_is_one_line(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(words: object, **_: object) -> None:
        raise KitError("`make` failed with exit code 2:\n    no network")

    monkeypatch.setattr(vllm, "DISK_BYTES", 2**62)
    assert "of disk are free" in (vllm.missing(Progress.to_stderr()) or "")
    monkeypatch.setattr(vllm, "DISK_BYTES", 0)
    monkeypatch.setattr(vllm, "run", fails)
    assert vllm.missing(Progress.to_stderr()) == "it cannot be installed: `make` failed with exit code 2: no network"


def test_the_suite_runs_in_the_environment_that_is_made() -> None:
    assert suites.VLLM.programs == (suites.PROJECT / vllm.STAMP).parent / "bin"
