"""The agent participant: activations that are idempotent, boundaries inside the turn loop, and what of both is
restored."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_rig.agents import Loop, activate, agent, seeded
from gym_rig.alone import R0, R1, code
from gym_rig.verbs import checkpoint, commit, prepare, ready, restore, resume
from gym_rig.virtual import now, settle
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.agent_state import Activation
from gym_servers.participants.agent_turns import ADMISSION_RETRY_SECONDS
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

# ---- activations -------------------------------------------------------------------------------------------


async def test_a_completed_index_is_answered_without_another_call() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    loop.free()
    reply = await activate(participant, session, loop)
    done = list(loop.log)
    assert await activate(participant, session, loop) == reply
    assert loop.log == done


async def test_a_running_index_is_joined() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    first, second = activate(participant, session, loop), activate(participant, session, loop)
    await settle()
    assert loop.log == ["model"]
    first.cancel()  # a caller that leaves does not end it
    loop.free()
    assert (await second)["items"] == [{"turn": 1}, {"turn": 2}]


@pytest.mark.parametrize("index", [2, 3])
async def test_an_index_out_of_order_is_refused(index: int) -> None:
    participant = agent()
    session = await seeded(participant)
    assert await code(activate(participant, session, Loop(participant), index)) == "activation_out_of_order"


async def test_an_index_below_the_last_is_refused() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    for index in (1, 2):
        loop.free()
        await activate(participant, session, loop, index)
    assert await code(activate(participant, session, loop, 1)) == "activation_out_of_order"


@pytest.mark.parametrize("when", ["running", "finished"])
async def test_a_reply_is_bound_to_its_request(when: str) -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    running = activate(participant, session, loop)
    await settle()
    if when == "finished":
        loop.free()
        await running
    assert await code(activate(participant, session, loop, digest="other")) == "checkpoint_conflict"
    running.cancel()


async def test_a_failure_is_not_stored_as_a_reply() -> None:
    participant = agent()
    session = await seeded(participant)

    async def fails(_: Activation) -> dict[str, Any]:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await activate(participant, session, fails)
    loop = Loop(participant)
    loop.free()
    assert "items" in await activate(participant, session, loop)


async def test_without_an_index_every_request_is_a_new_activation() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    for _ in range(2):
        loop.free()
        await activate(participant, session, loop, None)
    assert loop.log.count("model") == 6


async def test_activations_without_an_index_are_told_apart_also_after_a_restore() -> None:
    """Their model calls are named after them: two of one name would be one call."""
    ordinals: list[int] = []

    async def note(activation: Activation) -> dict[str, Any]:
        ordinals.append(activation.ordinal)
        return {}

    first = agent()
    session, loop = await seeded(first), Loop(first)
    for digest in ("a", "b"):
        await activate(first, session, note, None, digest)
    running = activate(first, session, loop, None, "c")
    await settle()
    records = await checkpoint(first)
    running.cancel()
    second = await restored(records)
    found = second.session("s", R1)
    for digest in ("c", "d"):
        await activate(second, found, note, None, digest)
    assert ordinals == [1, 2, 3, 4]


async def test_an_activation_that_is_cancelled_before_its_first_step_leaves_nothing() -> None:
    participant = agent()
    session = await seeded(participant)
    running = activate(participant, session, Loop(participant))
    retiring = asyncio.create_task(participant.retire([R0]))  # in the same turn of the event loop
    await asyncio.wait([running, retiring])
    assert await code(running) == "session_lost"
    assert session.activation is None
    assert prepare(participant)


@pytest.mark.parametrize("episode", [R1, Episode("other", 0), None])
async def test_a_call_of_another_episode_never_reaches_the_session(episode: Episode | None) -> None:
    participant = agent()
    await seeded(participant)
    wanted = "stale_attempt" if episode is not None else "rollout_id_required"
    with pytest.raises(ProtocolError, match=wanted):
        participant.session("s", episode)
    assert await code(participant.close("s", episode)) == wanted
    for unknown in ("t", None):
        with pytest.raises(ProtocolError, match="session_lost"):
            participant.session(unknown, R0)


# ---- boundaries --------------------------------------------------------------------------------------------


async def test_waiting_for_the_model_counts_as_standing_and_a_reply_is_held() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    running = activate(participant, session, loop)
    await settle()
    assert prepare(participant)
    loop.model.release()
    await settle()
    assert loop.log == ["model"]
    assert participant.survey().ready
    records = await commit(participant)
    assert b'"items":[]' in records["s"]
    resume(participant)
    await settle()
    assert loop.log == ["model", "tool"]
    loop.free()
    await running


async def test_a_tool_round_holds_a_checkpoint_up_until_the_next_boundary() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    running = activate(participant, session, loop)
    loop.model.release()
    await settle()
    assert not prepare(participant)
    assert [(b.id, b.where) for b in participant.survey().blockers] == [("r", "tools")]
    loop.tool.release()
    await settle()
    assert ready(participant)
    assert loop.log == ["model", "tool"]
    records = await commit(participant)
    assert b'"items":[{"turn":1}]' in records["s"]
    resume(participant)
    loop.free()
    await running


async def test_an_episode_that_must_restart_anyway_holds_nothing_up_and_is_not_exported() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    running = activate(participant, session, loop)
    loop.model.release()
    await settle()
    assert prepare(participant, restarts=frozenset({"r"}))
    assert await commit(participant) == {}
    running.cancel()


async def test_closed_admission_at_the_model_never_fails_an_activation() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    loop.refusals = [ProtocolError("admission_closed", "closed")] * 50
    loop.free()
    began = now()
    assert "items" in await activate(participant, session, loop)
    assert now() - began == pytest.approx(50 * ADMISSION_RETRY_SECONDS, abs=1)


async def test_a_refusal_that_comes_while_a_checkpoint_is_open_here_waits_for_its_end() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    loop.refusals = [ProtocolError("admission_closed", "closed")]
    running = activate(participant, session, loop)
    await asyncio.sleep(0)
    prepare(participant)
    await asyncio.sleep(100)
    assert participant.survey().ready
    assert len(loop.log) <= 1
    resume(participant)
    loop.free()
    assert "items" in await running


async def test_another_refusal_of_the_model_ends_the_activation() -> None:
    participant = agent()
    session, loop = await seeded(participant), Loop(participant)
    loop.refusals = [ProtocolError("stale_attempt", "replaced")]
    assert await code(activate(participant, session, loop)) == "stale_attempt"
    assert session.activation is None


# ---- restore -----------------------------------------------------------------------------------------------


async def restored(records: dict[str, bytes]) -> AgentParticipant:
    participant = agent(started=False)
    assert restore(participant, records, "r") == ["r-a1"]
    resume(participant, "restore")
    return participant


async def test_a_restored_activation_continues_at_its_boundary_under_the_new_attempt() -> None:
    first = agent()
    session, loop = await seeded(first), Loop(first)
    running = activate(first, session, loop)
    loop.model.release()
    loop.tool.release()
    await settle()
    records = await checkpoint(first)
    running.cancel()
    second = await restored(records)
    again = Loop(second)
    again.free()
    found = second.session("s", R1)
    assert found.accesses == [{"peer": "counter", "jar": {"c": {"id": "1"}}, "tools": None}]
    reply = await activate(second, found, again)
    assert reply["items"] == [{"turn": 1}, {"turn": 2}]
    assert again.log == ["model", "tool", "model"]
    with pytest.raises(ProtocolError, match="stale_attempt"):
        second.session("s", R0)


async def test_a_restored_reply_is_given_again_and_bound_to_its_request() -> None:
    first = agent()
    session, loop = await seeded(first), Loop(first)
    loop.free()
    reply = await activate(first, session, loop)
    second = await restored(await checkpoint(first))
    again = Loop(second)
    found = second.session("s", R1)
    assert await activate(second, found, again) == reply
    assert again.log == []
    assert await code(activate(second, found, again, digest="other")) == "checkpoint_conflict"
    assert await code(activate(second, found, again, 3)) == "activation_out_of_order"


async def test_a_restored_activation_of_another_request_is_refused_and_kept() -> None:
    first = agent()
    session, loop = await seeded(first), Loop(first)
    running = activate(first, session, loop)
    await settle()
    records = await checkpoint(first)
    running.cancel()
    second = await restored(records)
    found, again = second.session("s", R1), Loop(second)
    again.free()
    assert await code(activate(second, found, again, digest="other")) == "checkpoint_conflict"
    assert "items" in await activate(second, found, again)


async def test_a_restored_session_that_nobody_claimed_survives_a_second_crash() -> None:
    first = agent()
    session, loop = await seeded(first), Loop(first)
    running = activate(first, session, loop)
    loop.model.release()
    loop.tool.release()
    await settle()
    records = await checkpoint(first)
    running.cancel()
    second = await restored(records)
    third = agent(started=False)
    assert restore(third, await checkpoint(second), "r-a1", cell_attempt=2) == ["r-a2"]
    resume(third, "restore")
    again = Loop(third)
    again.free()
    reply = await activate(third, third.session("s", Episode("r", 2)), again)
    assert reply["items"] == [{"turn": 1}, {"turn": 2}]


@pytest.mark.parametrize("damage", [b"", b'{"format":1}', b'{"format":1,"session":"s","episode":"r-a0"}'])
async def test_a_record_that_cannot_be_read_is_named_and_nothing_is_installed(damage: bytes) -> None:
    participant = agent(started=False)
    with pytest.raises(ProtocolError, match="record s"):
        restore(participant, {"s": damage}, "r")
    assert participant.survey().counts["sessions"] == 0
