"""Why nobody goes on behind tokens that were generated: few words, by which such calls are counted."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The first four: the engine would not know what it had matched, counted or drawn before."""

    CONSTRAINED = "constrained"
    PENALTIES = "penalties"
    STOP_TEXTS = "stop_texts"
    SEED = "seed"
    FAILED = "failed"  # the tokens could not be frozen
    ERROR = "error"  # the call ended in an error
    ANOTHER_REQUEST = "another_request"  # the call is made again, with other content
    UNCLAIMED = "unclaimed"  # the call was not made again before its rollout was over
    OTHER = "other"  # a record of another version says why


def counted(what: str, reason: str) -> dict[str, int]:
    """One more, of all and of its reason."""
    known = reason if reason in set(Reason) else Reason.OTHER
    return {what: 1, f"{what}_{known}": 1}
