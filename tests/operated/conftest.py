"""Every test here runs on virtual time."""

from gym_rig.virtual import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
