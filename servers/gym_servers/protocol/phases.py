"""The phases of a participant, as one table over verbs and lease expiry. What is not in it is refused.

`judge` decides what one verb means in one state; the control plane carries it out and reports back by `moved`.
Nothing here waits or knows the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from gym_servers.protocol.errors import ProtocolError

REMEMBERED_IDS = 256  # resumed checkpoint ids kept, so that a verb that comes late is told apart from a new one


class Phase(StrEnum):
    """Where a participant stands. `starting`: a fresh process, closed until it is restored or resumed."""

    STARTING = "starting"
    IDLE = "idle"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTED = "committed"
    RESTORED = "restored"


class Input(StrEnum):
    """What moves a participant: the coordinator's verbs, its own readiness, and the end of its lease."""

    PREPARE = "prepare"
    READY = "ready"
    COMMIT = "commit"
    RESTORE = "restore"
    RESUME = "resume"
    EXPIRE = "expire"


TABLE: Mapping[tuple[Phase, Input], Phase] = {
    (Phase.STARTING, Input.RESTORE): Phase.RESTORED,
    (Phase.STARTING, Input.RESUME): Phase.IDLE,
    (Phase.STARTING, Input.EXPIRE): Phase.STARTING,
    (Phase.IDLE, Input.PREPARE): Phase.PREPARING,
    (Phase.PREPARING, Input.READY): Phase.PREPARED,
    (Phase.PREPARING, Input.RESUME): Phase.IDLE,
    (Phase.PREPARING, Input.EXPIRE): Phase.IDLE,
    (Phase.PREPARED, Input.COMMIT): Phase.COMMITTED,
    (Phase.PREPARED, Input.RESUME): Phase.IDLE,
    (Phase.PREPARED, Input.EXPIRE): Phase.IDLE,
    (Phase.COMMITTED, Input.RESUME): Phase.IDLE,
    (Phase.COMMITTED, Input.EXPIRE): Phase.IDLE,
    (Phase.RESTORED, Input.RESUME): Phase.IDLE,
    (Phase.RESTORED, Input.EXPIRE): Phase.STARTING,
}

OPEN_CHECKPOINT = frozenset({Phase.PREPARING, Phase.PREPARED, Phase.COMMITTED})
LEASED = OPEN_CHECKPOINT | {Phase.RESTORED}


@dataclass(frozen=True)
class Control:
    """A participant's protocol state. `generation` counts checkpoints and restores, so that a wake-up that
    belongs to an older one can be told apart; `finished` are ids that can never be used again."""

    phase: Phase
    checkpoint_id: str | None = None
    generation: int = 0
    finished: tuple[str, ...] = field(default=())


class Verdict(StrEnum):
    """PROCEED: do it. REPEAT: it was done, give the same reply. NOTHING: it needs no doing (a resume in idle)."""

    PROCEED = "proceed"
    REPEAT = "repeat"
    NOTHING = "nothing"


def judge(control: Control, verb: Input, checkpoint_id: str) -> Verdict:
    """What a coordinator's verb means now. Raises ProtocolError where it may have no effect."""
    same = control.checkpoint_id == checkpoint_id
    if verb is Input.RESUME:
        if control.phase is Phase.IDLE:
            return Verdict.NOTHING
        if control.phase is Phase.STARTING and checkpoint_id in control.finished:
            raise ProtocolError("stale_checkpoint", f"{checkpoint_id} expired here; restore again with a new id")
        if control.phase is Phase.STARTING or same:
            return Verdict.PROCEED
        raise ProtocolError(
            "stale_checkpoint", f"checkpoint {control.checkpoint_id} is open here, not {checkpoint_id}"
        )
    if checkpoint_id in control.finished:
        raise ProtocolError("stale_checkpoint", f"checkpoint {checkpoint_id} is over; use a new id")
    if control.checkpoint_id is not None and not same:
        raise ProtocolError(
            "checkpoint_conflict", f"checkpoint {control.checkpoint_id} is open here; resume it first"
        )
    if (control.phase, verb) in TABLE:
        return Verdict.PROCEED
    if same and (control.phase, verb) in _REPEATS:
        return Verdict.REPEAT
    raise ProtocolError("invalid_phase", f"{verb} is not possible in phase {control.phase}")


_REPEATS = frozenset(
    {
        (Phase.PREPARING, Input.PREPARE),
        (Phase.PREPARED, Input.PREPARE),
        (Phase.COMMITTED, Input.COMMIT),
        (Phase.RESTORED, Input.RESTORE),
    }
)


def moved(control: Control, by: Input, checkpoint_id: str | None = None) -> Control:
    """The state after one input of the table. Raises KeyError for a pair that is not in it: a fault of ours."""
    phase = TABLE[control.phase, by]
    if by in (Input.PREPARE, Input.RESTORE):
        return replace(control, phase=phase, checkpoint_id=checkpoint_id, generation=control.generation + 1)
    if by in (Input.RESUME, Input.EXPIRE):
        over = control.checkpoint_id or checkpoint_id
        closed = replace(control, phase=phase, checkpoint_id=None)
        return remember(closed, over) if over else closed
    return replace(control, phase=phase)


def remember(control: Control, checkpoint_id: str) -> Control:
    """Never accept `checkpoint_id` again: it was resumed, expired, or given up before it came here."""
    if checkpoint_id in control.finished:
        return control
    return replace(control, finished=(*control.finished, checkpoint_id)[-REMEMBERED_IDS:])
