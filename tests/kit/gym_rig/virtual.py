"""An event loop with virtual time: when nothing can run, the clock jumps to the next timer.

Work in threads (reading and writing checkpoints) takes real time; while some is under way the clock stands still,
or every timer would fire while a file is being read. With `thread_seconds` it takes virtual time instead: it is done
in the loop, all at once, that much later - so that a test is repeatable and a store can be slow.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

# Whether the process lives whose task this is: what its threads had still to do dies with it.
lives: ContextVar[Callable[[], bool]] = ContextVar("lives", default=lambda: True)

START = 1_000_000.0  # also serves as Unix time in tests, where 0 would be refused


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual. Raises RuntimeError where all wait for something that can never come."""

    def __init__(self, thread_seconds: float | None = None) -> None:
        self.now = START
        self.in_threads = 0
        self.thread_seconds = thread_seconds
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(  # type: ignore[override]  # the stub's overloads say no more
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        if self.thread_seconds is not None:
            return self._later(self.thread_seconds, func, *args)
        future: asyncio.Future[Any] = super().run_in_executor(executor, func, *args)
        self.in_threads += 1
        future.add_done_callback(self._back)
        return future

    def _later(self, seconds: float, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self.create_future()
        alive = lives.get()

        def run() -> None:
            if not alive():
                return
            # Also where nobody waits for it any more: a thread that has begun cannot be called back.
            try:
                result = func(*args)
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.call_later(seconds, run)
        return future

    async def shutdown_default_executor(self, *arguments: Any) -> None:
        self.in_threads += 1
        try:
            await super().shutdown_default_executor(*arguments)
        finally:
            self.in_threads -= 1

    def _back(self, _: asyncio.Future[Any]) -> None:
        self.in_threads -= 1


class _Selector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if self._loop.in_threads:
            return super().select(None)
        if timeout is None:
            raise RuntimeError("everything waits and no timer is set: this would hang for ever")
        self._loop.now += timeout
        return []


def now() -> float:
    """The running loop's time: the wall clock of a test."""
    return asyncio.get_running_loop().time()


async def settle() -> None:
    """Let everything run that can run without time passing."""
    await asyncio.sleep(1e-6)


async def end_all() -> None:
    """End every other task of the loop. What belongs to a process that was killed waits for ever, and again after
    each cancellation it wants to clean up after."""
    ours = asyncio.current_task()
    while left := [task for task in asyncio.all_tasks() if task is not ours]:
        for task in left:
            task.cancel()
        await asyncio.wait(left, timeout=1.0)


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], VirtualLoop]]:
    """For the `conftest.py` of tests that run on virtual time: leases, deadlines and retries cost nothing there, and
    are exact."""
    return {"virtual": VirtualLoop}
