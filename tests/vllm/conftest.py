"""One vLLM for all tests here: it takes minutes to start."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from gym_vllm.engine import Engine

if find_spec("vllm") is None:  # an environment of its own has it: `make test-vllm`
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    """What others deprecate in their own code is not for us to mend."""
    for module in ("torch", "vllm", "transformers", "numba", "importlib"):
        config.addinivalue_line("filterwarnings", rf"ignore::DeprecationWarning:{module}(\..*)?")


def pytest_report_header() -> str | None:
    return (
        "tests/vllm are left out: vLLM is not installed here (make test-vllm)" if find_spec("vllm") is None else None
    )


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    from gym_vllm.engine import running_engine

    with running_engine(tmp_path_factory.mktemp("engine")) as running:
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a run is kept; not made yet."""
    return tmp_path / "run"
