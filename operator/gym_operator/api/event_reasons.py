"""Reasons of Events that somebody counts, beside the people who read them."""

from __future__ import annotations

from enum import StrEnum


class Afterwards(StrEnum):
    """What is said of a GymCheckpoint after its end: it is no second end."""

    LET_GO = "LetGo"
    DATA_REMOVED = "DataRemoved"
    DATA_LEFT = "DataLeft"
    HELD_BY_ANOTHER = "HeldByAnother"
