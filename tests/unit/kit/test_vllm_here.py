"""A machine that cannot have vLLM is told so in a sentence; one that can gets it once for all checkouts."""

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
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The locks that were installed, by what they say, on a machine that can have vLLM."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vllm, "unfit", lambda machine, memory: None)
    monkeypatch.setattr(vllm, "DISK_BYTES", 0)
    seen = []

    def runs(words: list[str | Path], **_: object) -> None:
        if "venv" in words:
            Path(words[-1]).mkdir(parents=True)
        else:
            seen.append(Path(words[-1]).read_text())

    monkeypatch.setattr(vllm, "run", runs)
    return seen


def checkout(folder: Path, lock: str) -> Path:
    (folder / "requirements").mkdir(parents=True, exist_ok=True)
    (folder / vllm.LOCK).write_text(lock)
    return folder


def test_checkouts_share_what_the_same_lock_asks_for(tmp_path: Path, installed: list[str]) -> None:
    one, other = checkout(tmp_path / "one", "vllm==1"), checkout(tmp_path / "other", "vllm==1")
    made = vllm.ensure(Progress.to_stderr(), one)
    assert vllm.ensure(Progress.to_stderr(), other) == made
    assert installed == ["vllm==1"]
    assert (one / vllm.LINK).resolve() == (other / vllm.LINK).resolve() == made
    assert (one / vllm.LINK / vllm.DONE).stat().st_mtime >= (one / vllm.LOCK).stat().st_mtime


def test_another_lock_has_an_environment_of_its_own_and_old_ones_go(tmp_path: Path, installed: list[str]) -> None:
    for number in range(4):
        place = checkout(tmp_path / "one", f"vllm=={number}")
        made = vllm.ensure(Progress.to_stderr(), place)
        assert (place / vllm.LINK).resolve() == made
    assert installed == [f"vllm=={number}" for number in range(4)]
    assert len(list(made.parent.iterdir())) == vllm.KEPT


def test_what_was_left_half_made_is_made_anew(
    tmp_path: Path, installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, works = checkout(tmp_path / "one", "vllm==1"), vllm.run

    def breaks(words: list[str | Path], **more: object) -> None:
        if "venv" not in words:
            raise KitError("`pip` failed with exit code 1:\n    no network")
        works(words, **more)

    monkeypatch.setattr(vllm, "PROJECT", place)
    monkeypatch.setattr(vllm, "run", breaks)
    with pytest.raises(KitError):
        vllm.ensure(Progress.to_stderr(), place)
    assert not (place / vllm.LINK).exists()
    monkeypatch.setattr(vllm, "run", works)
    made = vllm.ensure(Progress.to_stderr(), place)
    assert installed == ["vllm==1"]
    assert (made / vllm.DONE).is_file()


def test_an_environment_that_an_earlier_checkout_made_in_itself_is_replaced(
    tmp_path: Path, installed: list[str]
) -> None:
    place = checkout(tmp_path / "one", "vllm==1")
    (place / vllm.LINK / "bin").mkdir(parents=True)
    assert (place / vllm.LINK).resolve() != vllm.ensure(Progress.to_stderr(), place)
    assert (place / vllm.LINK).is_symlink()


def test_why_it_could_not_be_is_one_line(installed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(words: object, **_: object) -> None:
        raise KitError("`pip` failed with exit code 2:\n    no network")

    monkeypatch.setattr(vllm, "run", fails)
    assert vllm.missing(Progress.to_stderr()) == "it cannot be installed: `pip` failed with exit code 2: no network"
    monkeypatch.setattr(vllm, "DISK_BYTES", 2**62)
    assert "of disk are free" in (vllm.missing(Progress.to_stderr()) or "")


def test_the_suite_runs_in_the_environment_that_is_made() -> None:
    assert suites.VLLM.programs == suites.PROJECT / vllm.LINK / "bin"
