"""Every test here runs on virtual time; a process whose control API is called may be in service, or fresh."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gym_rig.stub import Control
from gym_rig.virtual import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]


@pytest.fixture
def idle(tmp_path: Path) -> Callable[[], Control]:
    """Makes a process in service."""
    return lambda: Control(tmp_path, coordinated=False)


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[], Control]:
    """Makes a process that waits to be restored or resumed."""
    return lambda: Control(tmp_path)
