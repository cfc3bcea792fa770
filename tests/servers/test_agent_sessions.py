"""The agent participant: when a session begins and ends, and what of it cannot be continued."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_rig.agents import Loop, activate, agent, seeded
from gym_rig.alone import R0, R1, R2, Unseen, code
from gym_rig.verbs import commit, prepare, resume, start
from gym_rig.virtual import now, settle
from gym_servers.participants.agent_state import Activation
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode


async def stubborn(_: Activation) -> dict[str, Any]:
    """A turn loop that needs a second to end."""
    try:
        await asyncio.sleep(1000)
    finally:
        await asyncio.sleep(1)
    return {}


# ---- seed, close, retire -----------------------------------------------------------------------------------


async def test_a_repeated_seed_replaces_the_session_of_its_episode() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    running = activate(participant, session, loop)
    await settle()
    await seeded(participant, session="s2")
    assert await code(running) == "session_lost"
    assert participant.survey().counts["sessions"] == 1
    with pytest.raises(ProtocolError, match="session_lost"):
        participant.session("s", R0)


async def test_seeds_that_come_together_leave_one_session() -> None:
    """Also where ending the old one takes a while."""
    participant = agent()
    session = await seeded(participant)
    running = activate(participant, session, stubborn)
    await settle()
    await asyncio.gather(*(seeded(participant, session=f"s{n}") for n in range(5)))
    assert participant.survey().counts == {"sessions": 1, "busy": 0}
    assert await code(running) == "session_lost"


async def test_a_seed_waits_while_a_checkpoint_is_open_and_looks_at_the_watermark_again() -> None:
    participant = agent()
    prepare(participant)
    waiting = asyncio.create_task(seeded(participant))
    late = asyncio.create_task(seeded(participant, Episode("late", 0), "l"))
    await asyncio.sleep(100)
    assert not waiting.done()
    participant.gate.fence.mark("late", 0)
    resume(participant)
    await waiting
    assert await code(late) == "stale_attempt"


async def test_a_close_waits_for_resume_and_is_repeatable() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    running = activate(participant, session, loop)
    await settle()
    prepare(participant)
    closing = asyncio.create_task(participant.close("s", R0))
    await asyncio.sleep(100)
    assert not closing.done()
    assert participant.survey().ready
    resume(participant)
    await closing
    assert await code(running) == "session_lost"
    await participant.close("s", R0)


async def test_a_close_of_another_attempt_is_refused() -> None:
    participant = agent()
    await seeded(participant)
    assert await code(participant.close("s", R1)) == "stale_attempt"


async def test_retire_costs_only_its_own_rollout_and_is_repeatable() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    running = activate(participant, session, loop)
    await seeded(participant, Episode("other", 0), "o")
    await settle()
    participant.gate.fence.mark("r", 0)
    await participant.retire([R0])
    await participant.retire([R0])
    assert await code(running) == "session_lost"
    assert participant.survey().counts["sessions"] == 1
    assert await code(seeded(participant)) == "stale_attempt"


@pytest.mark.parametrize("attempts", [(2, 0), (0, 2)])
async def test_a_retire_of_several_attempts_of_a_rollout_ends_the_highest_too(attempts: tuple[int, int]) -> None:
    participant = agent()
    session = await seeded(participant, R2)
    running = activate(participant, session, stubborn)
    await settle()
    participant.gate.fence.mark("r", 2)
    await participant.retire([Episode("r", attempt) for attempt in attempts])
    assert participant.survey().counts == {"sessions": 0, "busy": 0}
    assert await code(running) == "session_lost"


async def test_a_retire_waits_for_a_seed_in_progress_and_the_seed_brings_nothing_back() -> None:
    participant = agent()
    session = await seeded(participant, session="old")
    running = activate(participant, session, stubborn)
    await settle()
    seeding = asyncio.create_task(seeded(participant, session="new"))
    await settle()
    participant.gate.fence.mark("r", 0)
    began = now()
    await participant.retire([R0])
    assert now() - began == pytest.approx(1, abs=0.1)  # what the seed waits for
    assert participant.survey().counts == {"sessions": 0, "busy": 0}
    assert await code(seeding) == "stale_attempt"
    assert await code(running) == "session_lost"


async def test_a_fresh_process_takes_no_work_before_it_is_in_service() -> None:
    """Nor does it call a session lost that is to be restored."""
    participant = agent(started=False)
    assert await code(seeded(participant)) == "admission_closed"
    with pytest.raises(ProtocolError) as refused:
        participant.session("s", R0)
    assert refused.value.code == "admission_closed"
    start(participant)
    with pytest.raises(ProtocolError, match="session_lost"):
        participant.session("s", R0)


async def test_a_close_before_the_process_is_in_service_is_told_to_come_again() -> None:
    """Or the session that is to be restored would stay for ever."""
    participant = agent(started=False)
    assert await code(participant.close("s", R0)) == "admission_closed"


async def test_a_higher_attempt_ends_the_lower_ones_session() -> None:
    participant = agent()
    session = await seeded(participant)
    running = activate(participant, session, stubborn)
    await settle()
    await seeded(participant, R1, "s1")
    assert await code(running) == "session_lost"
    assert participant.survey().counts["sessions"] == 1


async def test_a_seed_under_another_rollouts_session_id_is_refused_and_disturbs_nothing() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    running = activate(participant, session, loop)
    assert await code(seeded(participant, Episode("other", 0))) == "invalid_request"
    loop.free()
    assert "items" in await running


# ---- what cannot be continued ------------------------------------------------------------------------------


async def test_a_session_with_headers_is_a_restart_and_no_record_ever_holds_one() -> None:
    participant = agent()
    access = {"peer": "counter", "jar": {}, "headers": {"authorization": "SECRET"}, "tools": None}
    await participant.seed("s", R0, [access], restart=True)
    plain = {"peer": "counter", "jar": {}, "headers": {"x": "SECRET"}, "url": "http://SECRET", "tools": None}
    await participant.seed("t", Episode("other", 0), [plain])
    assert prepare(participant)
    assert participant.survey().restarts == {"r"}
    records = await commit(participant)
    assert set(records) == {"t"}
    assert b"SECRET" not in records["t"]


async def test_an_activation_that_fails_while_a_checkpoint_is_open_parks_and_is_not_exported() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    running = activate(participant, session, loop)
    await settle()
    assert prepare(participant)
    loop.error = ValueError("broken")
    loop.model.release()
    await settle()
    survey = participant.survey()
    assert (survey.ready, survey.restarts) == (True, {"r"})
    assert not running.done()
    assert await commit(participant, "r") == {}
    resume(participant)
    with pytest.raises(ValueError, match="broken"):
        await running
    assert participant.survey().restarts == frozenset()


async def test_a_direct_call_is_a_restart_while_it_runs_and_holds_nothing_up() -> None:
    participant = agent()
    ended = asyncio.Event()
    running = asyncio.create_task(participant.direct(R0, ended.wait))
    await settle()
    assert prepare(participant)
    assert participant.survey().restarts == {"r"}
    assert await commit(participant, "r") == {}
    late = asyncio.create_task(participant.direct(Episode("late", 0), ended.wait))
    await settle()
    assert participant.survey().restarts == {"r"}  # new work waits
    resume(participant)
    ended.set()
    assert await running and await late
    assert participant.survey().restarts == frozenset()


async def test_a_retire_ends_a_direct_call() -> None:
    participant = agent()
    running = asyncio.create_task(participant.direct(R0, asyncio.Event().wait))
    beside = asyncio.create_task(participant.direct(Episode("other", 0), asyncio.Event().wait))
    await settle()
    participant.gate.fence.mark("r", 0)
    await participant.retire([R0])
    assert await code(running) == "stale_attempt"
    assert await code(participant.direct(R0, asyncio.Event().wait)) == "stale_attempt"
    assert not beside.done()
    beside.cancel()


# ---- what it costs -----------------------------------------------------------------------------------------


async def test_a_retire_looks_at_its_own_rollout_alone() -> None:
    participant = agent()
    for number in range(5):
        await seeded(participant, Episode(f"r{number}", 0), f"s{number}")
    participant._sessions = Unseen(participant._sessions)
    participant._by_rollout = Unseen(participant._by_rollout)
    participant._calls._by_rollout = Unseen()
    participant._busy._entries = Unseen()
    await participant.retire([Episode("r3", 0)])
    assert participant.session_of(Episode("r3", 0)) is None
    assert len(participant._sessions) == 4
