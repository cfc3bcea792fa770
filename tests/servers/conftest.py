"""Every test here runs on virtual time: leases, deadlines and retries cost nothing and are exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gym_rig.virtual import VirtualLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], VirtualLoop]]:
    return {"virtual": VirtualLoop}
