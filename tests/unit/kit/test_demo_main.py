"""`make demo KEEP=1` ends with the way to what it leaves up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gym_kit.demo import __main__ as demo
from gym_kit.demo.options import Options
from gym_kit.errors import KitError

COUNTED = {"ok": True}


def played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, keep: bool, fails: bool = False) -> int:
    """`main` without a cluster."""

    @contextmanager
    def grounds(*_: Any, **__: Any) -> Iterator[Any]:
        yield SimpleNamespace(cluster=SimpleNamespace(kubeconfig=tmp_path / "my files" / "kubeconfig"))

    @contextmanager
    def staged(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(kube=SimpleNamespace(namespace="gym-demo-0a1b2c"))

    def play() -> Any:
        if fails:
            raise KitError("it came to nothing")
        return SimpleNamespace()

    scenario = SimpleNamespace(play=play, bare_restart=lambda: 1.0)
    monkeypatch.setattr(demo, "from_environment", lambda _: Options(keep=keep, output=tmp_path))
    monkeypatch.setattr(demo, "grounds", grounds)
    monkeypatch.setattr(demo, "staged", staged)
    monkeypatch.setattr(demo, "Scenario", lambda *_: scenario)
    monkeypatch.setattr(demo, "report", lambda *_: COUNTED)
    monkeypatch.setattr(demo, "told", lambda _: "OK")
    return demo.main()


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_kept_is_found_by_the_last_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, fails: bool
) -> None:
    assert played(monkeypatch, tmp_path, keep=True, fails=fails) == int(fails)
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "left up, until `make down` removes it all; to see it:",
        f"  export KUBECONFIG='{tmp_path}/my files/kubeconfig'",
        "  kubectl gym status demo -n gym-demo-0a1b2c",
    ]


def test_what_is_removed_is_not_told_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert played(monkeypatch, tmp_path, keep=False) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"report: {tmp_path / 'report.json'}"
