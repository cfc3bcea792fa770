"""How long an episode may work, and how many may work at once.

A budget counts working time alone: whoever makes an episode stand - a checkpoint, a peer that admits nothing - holds
its budget meanwhile. What is left of it travels with the episode's boundary and goes on after a restore.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Of one environment server. Seconds; None is no limit."""

    episode_timeout_seconds: float = 21600.0
    max_concurrent_episodes: int | None = None
    queue_timeout_seconds: float | None = None
    cleanup_timeout_seconds: float = 180.0


class OverLimit(Exception):
    """A budget is used up."""


class Budget:
    """Seconds that are left to work in, None for no limit. `clock` is monotonic seconds."""

    def __init__(self, seconds: float | None, clock: Callable[[], float]) -> None:
        self._left, self._clock = seconds, clock
        self._holds: set[object] = set()
        self._timer: asyncio.Timeout | None = None
        self._since: float | None = None

    @property
    def left(self) -> float | None:
        """What is left now."""
        if self._left is None or self._since is None:
            return self._left
        return max(0.0, self._left - (self._clock() - self._since))

    async def spend(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do `work` within the budget. Raises OverLimit, after `work` was cancelled and has ended."""
        timer = asyncio.timeout(None)
        try:
            async with timer:
                self._timer = timer
                self._turn()
                try:
                    return await work()
                finally:
                    self._left, self._since, self._timer = self.left, None, None
        except TimeoutError as error:
            if timer.expired():
                raise OverLimit from error
            raise

    def hold(self, reason: object) -> None:
        """Stop counting until this reason is released. Repeatable."""
        self._holds.add(reason)
        self._turn()

    def release(self, reason: object) -> None:
        self._holds.discard(reason)
        self._turn()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Time in this block does not count."""
        reason = object()
        self.hold(reason)
        try:
            yield
        finally:
            self.release(reason)

    def _turn(self) -> None:
        """Start or stop counting, as the holds say."""
        timer = self._timer
        if timer is None or self._left is None or timer.expired():
            return
        if self._holds and self._since is not None:
            self._left, self._since = self.left, None
            timer.reschedule(None)
        elif not self._holds and self._since is None:
            self._since = self._clock()
            timer.reschedule(asyncio.get_running_loop().time() + self._left)


class Slots:
    """At most `limit` at once, first come, first served."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Wait for a slot."""
        if self.take_at_once():
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif not turn.cancelled():
                self.free()  # handed over in the moment in which its owner gave up
            raise

    def take_at_once(self, *, over: bool = False) -> bool:
        """Take a slot if one is free. `over`: in any case, for one that held a slot before - rather over the limit
        than behind newcomers."""
        if not over and self._limit is not None and (self._waiting or self._taken >= self._limit):
            return False
        self._taken += 1
        return True

    def free(self) -> None:
        self._taken -= 1
        while self._waiting and self._limit is not None and self._taken < self._limit:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._taken += 1
