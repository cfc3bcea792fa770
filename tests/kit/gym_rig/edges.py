"""Of which stack the tests of the operator's edges speak, and how they wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

NS = "team"
STACK_UID = "stack-uid"


async def until(holds: Callable[[], bool]) -> None:
    """Raises TimeoutError after ten seconds."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0)
