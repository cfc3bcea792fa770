"""What becomes of model calls, and why nobody goes on behind tokens that were generated: few words, by which such
calls are counted, here and by whoever adds the counts of processes up."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class What(StrEnum):
    """What is counted; docs/protocol.md says which calls each is about."""

    CUT_KEPT = "cut_kept"
    CUT_SKIPPED = "cut_skipped"
    CUT_FAILED = "cut_failed"
    CUT_EMPTY = "cut_empty"
    CUT_ENGINE_FAILED = "cut_engine_failed"
    CUT_TOKENS = "cut_tokens"
    CONTINUED = "continued"
    CONTINUED_TOKENS = "continued_tokens"
    REGENERATED = "regenerated"
    BEGUN_ANEW = "begun_anew"
    DROPPED = "dropped"
    ANSWERED = "answered"
    ABANDONED = "abandoned"
    LEDGERS_LOST = "ledgers_lost"


BY_REASON: Final = frozenset({What.CUT_SKIPPED, What.REGENERATED, What.BEGUN_ANEW, What.DROPPED})
"""What is counted once more by its reason."""
TOKENS: Final = frozenset({What.CUT_TOKENS, What.CONTINUED_TOKENS})
"""What counts tokens, and no calls."""


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


def counted(what: What, reason: str) -> dict[str, int]:
    """One more, of all and of its reason."""
    known = Reason(reason) if reason in set(Reason) else Reason.OTHER
    return {what: 1, of_reason(what, known): 1}


def of_reason(what: What, reason: Reason) -> str:
    """Under which word calls of one reason are counted."""
    return f"{what}_{reason}"
