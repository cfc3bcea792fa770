"""Our own programs as child processes that never outlive whoever started them.

A runner that is told to end takes its servers along; one that is killed cannot, so the kernel does it for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Mapping
from typing import IO, Any, Final, TypeVar

T = TypeVar("T")
PARENT: Final = "GYM_PARENT_PID"
PR_SET_PDEATHSIG: Final = 1  # prctl(2)


async def start(
    log: IO[bytes], *arguments: str, environment: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """Start `gym-servers` with `arguments`; what it says goes to `log`. Call it from the main thread: the kernel
    takes the end of the thread that starts a process for the end of its parent."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gym_servers", *arguments),
        env={**os.environ, **(environment or {}), PARENT: str(os.getpid())},
        stdout=log,
        stderr=log,
    )


def end_with_parent() -> None:
    """In a child: have the kernel end this process with the one that started it. Linux only; elsewhere nothing."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before we had asked
        os._exit(0)


class Told(Exception):
    """A signal ended the work; its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


async def until_told(work: Coroutine[Any, Any, T]) -> T:
    """Do `work`; SIGTERM and SIGINT cancel it, so that what it started is ended on the way out. Raises Told."""
    task = asyncio.ensure_future(work)
    told: list[int] = []

    def end(number: int) -> None:
        told.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    try:
        return await task
    except asyncio.CancelledError:
        if told:
            raise Told(told[0]) from None
        raise
