"""How far a participant's clock is from the coordinator's.

Deadlines on the wire are absolute (`deadline_ts`), and a receiver turns one into a duration by its own clock. Where
two clocks are minutes apart every verb would be late on arrival, and no cell could be checkpointed or recovered. So
the coordinator writes deadlines in the time of their receiver, which each of its answers tells (HTTP `Date`).
"""

from __future__ import annotations

from email.utils import parsedate_to_datetime
from typing import Final

TOLERATED_SECONDS: Final = 3.0
"""`Date` has whole seconds, and an answer takes a moment: less is no difference."""


class PeerClock:
    """The clock of one participant, as it was heard last. `ahead` is how many seconds it is ahead of ours; nothing is
    assumed of one that tells no time."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def heard(self, date: str | None, asked: float, answered: float) -> None:
        """An answer was dated so; it was asked for and came at these times of our clock, in Unix seconds."""
        try:
            told = parsedate_to_datetime(date).timestamp() if date else None
        except ValueError:
            told = None
        if told is None:
            return
        # Somewhere in this second, and somewhere between the question and the answer.
        least, most = told - answered, told + 1.0 - asked
        if least > TOLERATED_SECONDS or most < -TOLERATED_SECONDS:
            self.ahead = (least + most) / 2
        else:
            self.ahead = 0.0

    def of(self, time: float) -> float:
        """A time of our clock as the participant's clock has it."""
        return time + self.ahead
