"""What a driver's client does about a rollout whose call was refused or lost."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_servers.client.next_send import Send, Wait, next_send
from gym_servers.protocol.rollouts import RolloutState, Standing

State = Literal["restored", "running", "answered", "unknown"]


def state(
    stands: State, attempt: int | None, next_attempt: int, *, in_service: bool = True, **cell: Any
) -> RolloutState:
    rollout = Standing(rollout_id="r", state=stands, attempt=attempt, next_attempt=next_attempt)
    known = {"cell": 0, "cell_attempt": 0, "attempt_floor": True, **cell}
    return RolloutState(in_service=in_service, rollout=rollout, **known)


@pytest.mark.parametrize("stands", ["restored", "running", "answered"])
def test_what_stands_somewhere_is_sent_as_it_stands(stands: State) -> None:
    assert next_send(state(stands, 4, 5), None, None) == Send(4)
    assert next_send(state(stands, 4, 5), 3, 7) == Send(4)


@pytest.mark.parametrize("stands", ["running", "answered"])
def test_what_its_driver_has_had_an_answer_of_is_over(stands: State) -> None:
    assert next_send(state(stands, 4, 5), 4, 4) == Send(5)
    assert next_send(state(stands, 4, 5), 6, 9) == Send(10)


def test_what_is_unknown_starts_over_above_all_that_may_have_run() -> None:
    assert next_send(state("unknown", None, 0), None, None) == Send(0)
    assert next_send(state("unknown", None, 3), None, None) == Send(3)
    assert next_send(state("unknown", None, 3), None, 1) == Send(3)
    assert next_send(state("unknown", None, 3), 2, 5) == Send(6)


@pytest.mark.parametrize("stands", ["restored", "unknown"])
def test_a_cell_that_is_not_in_service_is_asked_again(stands: State) -> None:
    assert next_send(state(stands, None, 0, in_service=False), None, None) == Wait()


@given(st.none() | st.integers(0, 9), st.none() | st.integers(0, 9), st.integers(0, 9))
def test_no_number_is_used_for_two_starts(done: int | None, spent: int | None, lowest: int) -> None:
    spent = done if spent is None else max(spent, done or 0)
    move = next_send(state("unknown", None, lowest), done, spent)
    assert isinstance(move, Send)
    assert move.attempt >= lowest
    assert spent is None or move.attempt > spent
