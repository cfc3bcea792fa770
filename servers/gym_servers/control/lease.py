"""A participant's promise to stay closed has an end: the lease that its coordinator renews."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Lease:
    """Calls `expired` once, `grace` seconds after the last renewal. Times are the event loop's; `wall` gives Unix
    time."""

    def __init__(self, grace: float, expired: Callable[[], None], wall: Callable[[], float]) -> None:
        self._grace, self._expired, self._wall = grace, expired, wall
        self._timer: asyncio.TimerHandle | None = None

    def renew(self) -> None:
        self.end()
        self._timer = asyncio.get_running_loop().call_later(self._grace, self._fire)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def expires_at(self) -> float | None:
        """Unix time, seconds; None while nothing is leased."""
        if self._timer is None:
            return None
        return self._wall() + self._timer.when() - asyncio.get_running_loop().time()

    def _fire(self) -> None:
        self._timer = None
        self._expired()
