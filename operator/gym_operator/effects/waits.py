"""For how long something has been waited for, by a clock that nobody sets.

The time in an object's metadata is the API server's, and its clock may be minutes away from ours: what was made a
moment ago would have waited for too long already, or would never have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection


class Waits:
    """Counts from when something was first asked for; an operator that starts gives everything its time again."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._since: dict[str, float] = {}

    def seconds(self, uid: str) -> float:
        """For how long the object of this UID has been waiting."""
        now = self._monotonic()
        return now - self._since.setdefault(uid, now)

    def keep(self, uids: Collection[str]) -> None:
        """Forget all others."""
        self._since = {uid: since for uid, since in self._since.items() if uid in uids}
