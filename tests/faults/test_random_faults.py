"""Whatever happens to a cell, in whatever order: the invariants of the protocol hold. `make faults N=...` for more."""

from __future__ import annotations

from gym_faults.machine import Faults
from gym_faults.run import SHORT

TestFaults = Faults.TestCase
TestFaults.settings = SHORT
