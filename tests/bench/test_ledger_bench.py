"""The measurement of the capture ledger, in small."""

from __future__ import annotations

from gym_bench.ledger import CALLS, measured, told


async def test_it_measures_what_it_says() -> None:
    found = await measured(20, 0, training=True, idle_seconds=0.1)
    assert found["rollouts"] == 20
    assert 1 <= found["disk_files"] < 20 * CALLS
    assert found["disk_mib"] > 0
    assert found["append_ms"]["p50"] > 0
    assert told(found).startswith("    20 rollouts")
