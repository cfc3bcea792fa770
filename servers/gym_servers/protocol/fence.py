"""Which attempts may still act: the floor of the cell and the watermark of each rollout.

Work below the floor, or at or below its rollout's watermark, is `stale_attempt`: it belongs to a process or an
attempt that was replaced. The floor only rises; watermarks are dropped when the driver forgets a rollout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode


@dataclass
class Fence:
    """The floor and the watermarks of one participant. `enforce_floor=False` is for a driver that cannot know the
    floor: it is kept for coordinators to see, and watermarks alone fence."""

    floor: int = 0
    marks: dict[str, int] = field(default_factory=dict)
    enforce_floor: bool = True

    def raise_floor(self, cell_attempt: int) -> None:
        """Set by restore, and by resume from starting. A lower one raises `stale_attempt`: it comes from a
        coordinator that does not know of a later recovery."""
        if cell_attempt < self.floor:
            raise ProtocolError("stale_attempt", f"cell attempt {cell_attempt} is below {self.floor}")
        self.floor = cell_attempt

    def is_stale(self, episode: Episode) -> bool:
        return episode.attempt < self.lowest(episode.rollout_id)

    def lowest(self, rollout_id: str) -> int:
        """The lowest attempt of a rollout that may still act."""
        return max(self.floor if self.enforce_floor else 0, self.marks.get(rollout_id, -1) + 1)

    def check(self, episode: Episode) -> None:
        """Raise `stale_attempt` where the episode was replaced or retired."""
        if self.is_stale(episode):
            raise ProtocolError(
                "stale_attempt",
                f"{episode.key} was replaced or retired; attempts below "
                f"{self.lowest(episode.rollout_id)} have no effect here",
            )

    def admit(self, episode: Episode) -> None:
        """Check the episode and fence everything below it."""
        self.check(episode)
        if episode.attempt > 0:
            self.mark(episode.rollout_id, episode.attempt - 1)

    def mark(self, rollout_id: str, attempt: int) -> None:
        """Nothing of this rollout at or below `attempt` has any effect from now on."""
        self.marks[rollout_id] = max(attempt, self.marks.get(rollout_id, -1))

    def restore(self, marks: Mapping[str, int]) -> None:
        """Take over the watermarks of a restore: what was retired, or replaced by it, stays so."""
        for rollout_id, attempt in marks.items():
            self.mark(rollout_id, attempt)

    def forget(self, rollout_id: str) -> None:
        self.marks.pop(rollout_id, None)
