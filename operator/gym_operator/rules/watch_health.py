"""Whether the watches still tell what happens. A watch may fall silent without an error.

Resource versions only grow. So a watch is silent when a list has shown a version that the watch has not reached some
time after.
"""

from __future__ import annotations

from typing import Final

SILENT_SECONDS: Final = 90.0
"""Longer than the framework takes to notice a dead connection by itself, which is 70 s."""

Watch = tuple[str, str | None]
"""Kind of object, and the namespace if the operator watches some only."""


class Watches:
    """What each watch has told, and what lists have shown since. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._told: dict[Watch, int] = {}
        self._behind: dict[Watch, tuple[int, float]] = {}

    def told(self, watch: Watch, version: int) -> None:
        """The watch has delivered an object of this version."""
        self._told[watch] = max(version, self._told.get(watch, 0))

    def listed(self, watch: Watch, latest: int, now: float) -> None:
        """A list has shown that there is an object of this version."""
        told = self._told.get(watch, 0)
        if watch in self._behind and told < self._behind[watch][0]:
            return  # still behind an older list
        self._behind.pop(watch, None)
        if told < latest:
            self._behind[watch] = (latest, now)

    def silent(self, now: float) -> list[str]:
        """The watches that have been behind for too long."""
        return sorted(
            plural if namespace is None else f"{plural} in {namespace}"
            for (plural, namespace), (version, since) in self._behind.items()
            if self._told.get((plural, namespace), 0) < version and now - since > SILENT_SECONDS
        )
