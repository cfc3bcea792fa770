"""The shape of the repository: what must stay true of its folders, layers and public texts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("folder", ["operator", "servers"])
def test_the_two_roots_are_folders_and_no_packages(folder: str) -> None:
    """`operator/__init__.py` would shadow the standard library's `operator` for anything run from the root."""
    assert not list((ROOT / folder).glob("*.py"))


def test_the_standard_library_is_found_from_the_root() -> None:
    code = "import operator; print(operator.add(1, 2), operator.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("3 ")
    assert str(ROOT) not in done.stdout.replace(sys.prefix, "")


def test_every_shipped_package_is_typed() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert packages["packages"] == ["operator/gym_operator", "servers/gym_servers"]
    for package in packages["packages"]:
        assert (ROOT / package / "py.typed").is_file()
        folders = {path.parent for path in (ROOT / package).rglob("*.py")}
        assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_the_layers_hold() -> None:
    lint = Path(sys.executable).parent / "lint-imports"
    environment = {**os.environ, "PYTHONPATH": "operator:servers"}
    done = subprocess.run(
        [lint, "--no-cache"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_modules_say_where_they_stand() -> None:
    for path in [*(ROOT / "servers").rglob("*.py"), *(ROOT / "operator").rglob("*.py")]:
        text = path.read_text()
        assert not text or text.startswith('"""'), f"{path} has no docstring"


def test_no_module_is_longer_than_can_be_read() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for root in ("servers", "operator", "tests")
        for path in (ROOT / root).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 600
    }
    assert not long


def test_no_pickle_in_what_is_shipped() -> None:
    """Checkpoints are read back from storage that others can write to."""
    unsafe = re.compile(r"^\s*(import|from) (pickle|marshal|shelve|dill)\b|yaml\.(load|unsafe_load)\(", re.MULTILINE)
    for root in ("servers", "operator"):
        for path in (ROOT / root).rglob("*.py"):
            assert not unsafe.search(path.read_text()), path
