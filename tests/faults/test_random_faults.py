"""Whatever happens to a cell, in whatever order: the invariants hold. `make faults N=...` runs more of it."""

from __future__ import annotations

import pytest

from gym_faults.machine import Faults
from gym_faults.run import SHORT


@pytest.mark.timeout(1800)  # where something is found, it is made as short as can be
class TestFaults(Faults.TestCase):  # type: ignore[name-defined,misc]
    settings = SHORT
