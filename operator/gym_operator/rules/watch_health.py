"""Whether the watches still tell what happens. A watch may fall silent without an error.

Resource versions only grow, and what happened is asked for beside the watches. So a watch is behind when an object is
there in a version that the watch has not reached; it has been behind for as long as that was found again and again.
An API server that does not answer shows nothing, and so makes no watch silent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Final

LATE_SECONDS: Final = 20.0
"""A watch that is behind for so long is worth another one: less than the time between two looks, so that it is opened
anew at the second."""
SILENT_SECONDS: Final = 150.0
"""Another watch has not helped either, more than once: the process had better begin anew."""

Watch = tuple[str, str | None]
"""Kind of object, and the namespace if the operator watches some only."""


class Watches:
    """What each watch has told, and what was found beside it. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._told: dict[Watch, int] = {}
        self._missed: defaultdict[Watch, dict[str, tuple[int, float]]] = defaultdict(dict)
        self._looked: dict[Watch, float] = {}

    def told(self, watch: Watch, version: int) -> None:
        """The watch has delivered an object of this version."""
        self._told[watch] = max(version, self._told.get(watch, 0))

    def found(self, watch: Watch, versions: Mapping[str, int], gone: Collection[str], now: float) -> None:
        """The API server has said that these objects, by UID, are there in these versions, and those are gone."""
        missed, told = self._missed[watch], self._told.get(watch, 0)
        for uid in gone:
            missed.pop(uid, None)
        for uid, version in versions.items():
            if version > told:
                missed.setdefault(uid, (version, now))  # the oldest that it has missed says since when
        self._missed[watch] = {uid: one for uid, one in missed.items() if one[0] > told}
        self._looked[watch] = now

    def listed(self, watch: Watch, versions: Mapping[str, int], now: float) -> None:
        """As `found`, where these objects are all that there are."""
        self.found(watch, versions, self._missed[watch].keys() - versions.keys(), now)

    def late(self) -> list[str]:
        """The watches that are to be opened anew."""
        return self._behind(LATE_SECONDS)

    def silent(self) -> list[str]:
        """The watches that have been behind for too long."""
        return self._behind(SILENT_SECONDS)

    def _behind(self, seconds: float) -> list[str]:
        return sorted(
            plural if namespace is None else f"{plural} in {namespace}"
            for (plural, namespace), missed in self._missed.items()
            if any(
                version > self._told.get((plural, namespace), 0) and self._looked[plural, namespace] - since > seconds
                for version, since in missed.values()
            )
        )
