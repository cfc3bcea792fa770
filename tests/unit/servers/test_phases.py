"""The phase table: every state is reached, and every verb is tried in each of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_servers.protocol.errors import STATUS, ProtocolError, refusal_of
from gym_servers.protocol.phases import (
    LEASED,
    OPEN_CHECKPOINT,
    REMEMBERED_IDS,
    TABLE,
    Control,
    Input,
    Phase,
    Verdict,
    judge,
    moved,
    remember,
)

VERBS = (Input.PREPARE, Input.COMMIT, Input.RESTORE, Input.RESUME)
SETTLED = (Phase.STARTING, Phase.IDLE)

# Written down a second time, from the protocol's text: (phase, verb) -> what the verb of the open id means there.
MEANING: dict[tuple[Phase, Input], Verdict] = {
    (Phase.STARTING, Input.RESTORE): Verdict.PROCEED,
    (Phase.STARTING, Input.RESUME): Verdict.PROCEED,
    (Phase.IDLE, Input.PREPARE): Verdict.PROCEED,
    (Phase.IDLE, Input.RESUME): Verdict.NOTHING,
    (Phase.PREPARING, Input.PREPARE): Verdict.REPEAT,
    (Phase.PREPARING, Input.RESUME): Verdict.PROCEED,
    (Phase.PREPARED, Input.PREPARE): Verdict.REPEAT,
    (Phase.PREPARED, Input.COMMIT): Verdict.PROCEED,
    (Phase.PREPARED, Input.RESUME): Verdict.PROCEED,
    (Phase.COMMITTED, Input.COMMIT): Verdict.REPEAT,
    (Phase.COMMITTED, Input.RESUME): Verdict.PROCEED,
    (Phase.RESTORED, Input.RESTORE): Verdict.REPEAT,
    (Phase.RESTORED, Input.RESUME): Verdict.PROCEED,
}


def at(phase: Phase) -> Control:
    """A participant in a phase, with checkpoint `mine` open where one is."""
    return Control(phase, None if phase in SETTLED else "mine", generation=3)


def code(control: Control, verb: Input, checkpoint_id: str) -> str:
    with pytest.raises(ProtocolError) as refused:
        judge(control, verb, checkpoint_id)
    return refused.value.code


@pytest.mark.parametrize(("phase", "verb"), list(itertools.product(Phase, VERBS)))
def test_the_open_id_may_do_what_the_table_says_and_nothing_else(phase: Phase, verb: Input) -> None:
    if (meaning := MEANING.get((phase, verb))) is not None:
        assert judge(at(phase), verb, "mine") is meaning
    else:
        assert code(at(phase), verb, "mine") == "invalid_phase"


@pytest.mark.parametrize(("phase", "verb"), list(itertools.product(Phase, VERBS)))
def test_another_id_never_touches_what_is_open(phase: Phase, verb: Input) -> None:
    if phase in SETTLED:
        if (phase, verb) in MEANING:
            assert judge(at(phase), verb, "other") is MEANING[phase, verb]
        else:
            assert code(at(phase), verb, "other") == "invalid_phase"
    else:
        wanted = "stale_checkpoint" if verb is Input.RESUME else "checkpoint_conflict"
        assert code(at(phase), verb, "other") == wanted


@pytest.mark.parametrize(
    ("phase", "verb"), list(itertools.product(SETTLED, (Input.PREPARE, Input.COMMIT, Input.RESTORE)))
)
def test_an_id_that_is_over_is_stale_for_every_verb_but_a_resume_in_idle(phase: Phase, verb: Input) -> None:
    control = remember(at(phase), "mine")
    assert code(control, verb, "mine") == "stale_checkpoint"
    if phase is Phase.IDLE:
        assert judge(control, Input.RESUME, "mine") is Verdict.NOTHING
    else:  # an expired restore must not open a process that has uninstalled it
        assert code(control, Input.RESUME, "mine") == "stale_checkpoint"


@pytest.mark.parametrize(("phase", "by"), list(itertools.product(Phase, Input)))
def test_a_move_outside_of_the_table_is_a_fault(phase: Phase, by: Input) -> None:
    if (phase, by) in TABLE:
        assert moved(at(phase), by, "mine").phase is TABLE[phase, by]
    else:
        with pytest.raises(KeyError):
            moved(at(phase), by, "mine")


def test_the_end_of_a_lease_never_leaves_a_checkpoint_open() -> None:
    for phase in LEASED:
        after = moved(at(phase), Input.EXPIRE)
        assert after.phase not in LEASED
        assert after.checkpoint_id is None
        assert "mine" in after.finished
    assert {Phase.RESTORED} == LEASED - OPEN_CHECKPOINT
    assert moved(at(Phase.RESTORED), Input.EXPIRE).phase is Phase.STARTING


@given(st.lists(st.tuples(st.sampled_from([*Input]), st.sampled_from(["a", "b", "c"])), max_size=40))
def test_no_walk_reuses_an_id_or_loses_count(walk: list[tuple[Input, str]]) -> None:
    """The generation counts what was opened; an id that is over is never open again."""
    control, opened = Control(Phase.STARTING), 0
    for by, checkpoint_id in walk:
        before = control
        if by in VERBS:
            try:
                verdict = judge(control, by, checkpoint_id)
            except ProtocolError:
                assert control == before
                continue
            if verdict is Verdict.NOTHING:
                control = remember(control, checkpoint_id)
                continue
            if verdict is Verdict.REPEAT:
                assert control.checkpoint_id == checkpoint_id
                continue
        elif (control.phase, by) not in TABLE:
            continue
        control = moved(control, by, checkpoint_id)
        opened += by in (Input.PREPARE, Input.RESTORE)
        assert control.generation == opened
        assert (control.checkpoint_id is not None) == (control.phase in LEASED)
        if by in (Input.PREPARE, Input.RESTORE):
            assert checkpoint_id not in before.finished
        assert set(before.finished) <= set(control.finished)


def test_ids_that_are_over_are_remembered_up_to_a_bound() -> None:
    control = Control(Phase.IDLE)
    for number in range(REMEMBERED_IDS + 10):
        control = remember(control, f"id{number}")
    assert len(control.finished) == REMEMBERED_IDS
    assert "id9" not in control.finished
    assert f"id{REMEMBERED_IDS + 9}" in control.finished
    assert remember(control, "id100") is control


@pytest.mark.parametrize("wanted", sorted(STATUS))
def test_every_refusal_goes_over_the_wire_and_comes_back(wanted: str) -> None:
    error = ProtocolError(wanted, "why")  # type: ignore[arg-type]
    back = refusal_of(error.status, error.body())
    assert back is not None
    assert (back.code, back.detail) == (wanted, "why")


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (409, None),
        (409, []),
        (409, {"error": "text"}),
        (409, {"error": {"code": "unknown"}}),
        (500, {"error": {"code": "stale_attempt"}}),
        (409, {"detail": "x"}),
    ],
)
def test_a_reply_that_is_not_one_of_ours_is_no_refusal(status: int, body: object) -> None:
    assert refusal_of(status, body) is None
