"""Work that goes on though whoever waits for it is broken off, by a client that leaves or a look that is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


def unattended(work: Awaitable[T]) -> asyncio.Task[T]:
    """Begin it as a task, to be awaited behind `asyncio.shield`. What it raises is told to whoever still waits; where
    nobody does, it is no fault of ours, and asyncio does not log it with its traceback."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task
