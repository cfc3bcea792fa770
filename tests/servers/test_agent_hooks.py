"""The agent participant: what an agent keeps of its own travels with its sessions and is freed when they end."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gym_rig.agents import Loop, activate, agent, seeded
from gym_rig.alone import R0, code
from gym_rig.verbs import checkpoint, commit, prepare, ready, restore_built, resume, start
from gym_rig.virtual import now, settle
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.agent_state import Activation, AgentHooks, Session
from gym_servers.participants.gate import Gate
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.protocol.phases import Input, moved


class Own:
    """What an agent keeps of its own, by capture key."""

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}
        self.retired: list[str] = []
        self.held: asyncio.Event | None = None
        self.broken = False
        self.failing: BaseException | None = None

    @property
    def hooks(self) -> AgentHooks:
        return AgentHooks(self.export, self.restore, self.retire)

    async def export(self, keys: Sequence[str]) -> dict[str, Any]:
        return {key: self.states[key] for key in keys}

    async def restore(self, sessions: Mapping[str, Any]) -> None:
        if any(not isinstance(state, int) for state in sessions.values()):
            raise ValueError("not a number")
        self.states = dict(sessions)
        if self.failing is not None:
            raise self.failing

    async def retire(self, key: str) -> None:
        if self.held is not None:
            await self.held.wait()
        if self.broken:
            raise OSError("the sandbox does not answer")
        self.retired.append(key)
        self.states.pop(key, None)


def opted(own: Own, *, exportable: bool = True, started: bool = True) -> AgentParticipant:
    participant = AgentParticipant(Gate(clock=now), own.hooks, exportable=exportable)
    if started:
        start(participant)
    return participant


# ---- agents that opt in, and those that do not -------------------------------------------------------------


async def test_what_an_agent_keeps_of_its_own_travels_under_the_new_attempt() -> None:
    own, after = Own(), Own()
    first = opted(own)
    for name in ("r", "other"):
        await seeded(first, Episode(name, 0), name)
        own.states[name] = len(name)
    second = opted(after, started=False)
    assert await restore_built(second, await checkpoint(first, "r"), "r") == ["r-a1"]
    assert after.states == {"r-a1": 1}


async def test_own_state_that_is_refused_installs_nothing() -> None:
    own, after = Own(), Own()
    first = opted(own)
    await seeded(first)
    own.states["r"] = "text"
    second = opted(after, started=False)
    with pytest.raises(ProtocolError, match="not a number") as refused:
        await restore_built(second, await checkpoint(first, "r"), "r")
    assert refused.value.code == "invalid_checkpoint_state"
    assert (second.survey().counts["sessions"], after.states) == (0, {})


async def test_a_restore_that_is_given_up_ends_what_the_agent_took_over() -> None:
    own, after = Own(), Own()
    first = opted(own)
    await seeded(first)
    own.states["r"] = 1
    second = opted(after, started=False)
    await restore_built(second, await checkpoint(first, "r"), "r")
    second.uninstall()
    await settle()
    assert (after.retired, after.states) == (["r-a1"], {})


async def test_a_restore_waits_for_what_the_one_before_it_still_ends() -> None:
    """Its sessions have the same names: ended late, the new ones would be without their state."""
    own, after = Own(), Own()
    first = opted(own)
    await seeded(first)
    own.states["r"] = 1
    records = await checkpoint(first, "r")
    second = opted(after, started=False)
    await restore_built(second, records, "r")
    after.held = asyncio.Event()
    second.uninstall()
    second.gate.move(moved(second.gate.control, Input.EXPIRE))
    again = asyncio.create_task(restore_built(second, records, "r"))
    await asyncio.sleep(5)
    assert not again.done()
    after.held.set()
    assert await again == ["r-a1"]
    await settle()
    assert (after.retired, after.states) == (["r-a1"], {"r-a1": 1})


@pytest.mark.parametrize("error", [ValueError, KeyError, TypeError, AttributeError, OSError, asyncio.CancelledError])
async def test_a_restore_that_fails_half_way_or_is_cut_leaves_nothing_and_can_be_tried_again(
    error: type[BaseException],
) -> None:
    """A refusal of the states is told from what failed here and now."""
    own, after = Own(), Own()
    first = opted(own)
    for name in ("r", "other"):
        await seeded(first, Episode(name, 0), name)
        own.states[name] = 1
    records = await checkpoint(first)
    second = opted(after, started=False)
    after.failing = error("half way")
    refuses = issubclass(error, ValueError | KeyError | TypeError | AttributeError)
    with pytest.raises(ProtocolError if refuses else error) as failed:
        await restore_built(second, records, "r", "other")
    assert not refuses or failed.value.code == "invalid_checkpoint_state"  # type: ignore[attr-defined]
    await settle()
    assert (after.states, second.survey().counts["sessions"]) == ({}, 0)
    after.failing = None
    assert await restore_built(second, records, "r", "other") == ["r-a1", "other-a1"]
    assert after.states == {"r-a1": 1, "other-a1": 1}


async def test_a_state_of_a_given_up_restore_that_cannot_be_ended_keeps_nobody_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    own, after = Own(), Own()
    first = opted(own)
    await seeded(first)
    own.states["r"] = 1
    records = await checkpoint(first, "r")
    second = opted(after, started=False)
    after.broken, after.failing = True, OSError("half way")
    with pytest.raises(OSError, match="half way"):
        await restore_built(second, records, "r")
    await settle()
    assert "could not be freed" in caplog.text
    after.broken, after.failing = False, None
    assert await restore_built(second, records, "r") == ["r-a1"]


@pytest.mark.parametrize("how", ["close", "retire", "seed"])
async def test_the_activation_is_stopped_before_the_retire_hook(how: str) -> None:
    own = Own()
    participant = opted(own)
    session = await seeded(participant)
    log: list[str] = []

    async def turn(_: Activation) -> dict[str, Any]:
        try:
            await asyncio.sleep(1000)
        finally:
            log.extend(own.retired)
        return {}

    running = activate(participant, session, turn)
    await settle()
    if how == "close":
        await participant.close("s", R0)
    elif how == "retire":
        await participant.retire([R0])
    else:
        await seeded(participant, session="s2")
    assert (log, own.retired) == ([], ["r"])
    assert await code(running) == "session_lost"


async def test_closes_and_retires_that_come_together_clean_up_once() -> None:
    """A client that leaves in the middle interrupts nothing."""
    own = Own()
    own.held = asyncio.Event()
    participant = opted(own)
    await seeded(participant)
    first = asyncio.create_task(participant.close("s", R0))
    await settle()
    first.cancel()
    rest = [asyncio.create_task(call) for call in (participant.close("s", R0), participant.retire([R0]))]
    await settle()
    assert not any(task.done() for task in rest)
    own.held.set()
    await asyncio.gather(*rest)
    assert own.retired == ["r"]


async def test_a_retire_frees_what_a_waiting_close_would_have_freed() -> None:
    own = Own()
    participant = opted(own)
    await seeded(participant)
    prepare(participant)
    closing = asyncio.create_task(participant.close("s", R0))
    await settle()
    resume(participant)
    participant.gate.fence.mark("r", 0)
    await participant.retire([R0])  # before the close has run again
    await closing
    assert (own.retired, participant.survey().counts) == (["r"], {"sessions": 0, "busy": 0})
    assert await checkpoint(participant) == {}


async def test_a_session_that_cannot_be_ended_stays_and_is_tried_again() -> None:
    own = Own()
    own.broken = True
    participant = opted(own)
    await seeded(participant)
    assert await code(participant.retire([R0])) == "checkpoint_error"
    assert participant.survey().counts["sessions"] == 1
    assert not prepare(participant)  # what is half ended is no boundary
    resume(participant)
    own.broken = False
    await participant.retire([R0])
    assert (own.retired, participant.survey().counts["sessions"]) == (["r"], 0)


async def test_an_agent_that_did_not_opt_in_is_restart_only() -> None:
    """Its sessions are reported and never exported, and hold nothing up - not even in a tool round."""
    own = Own()
    participant = opted(own, exportable=False)
    session, loop = await seeded(participant), Loop(participant)
    running = activate(participant, session, loop)
    loop.model.release()
    await settle()
    assert prepare(participant)
    assert participant.survey().restarts == {"r"}
    assert await commit(participant, "r") == {}
    running.cancel()


async def test_a_restart_only_seed_looks_at_the_watermark_again_after_it_waited() -> None:
    own = Own()
    participant = opted(own, exportable=False)
    prepare(participant)
    waiting = asyncio.create_task(seeded(participant))
    await settle()
    participant.gate.fence.mark("r", 0)
    resume(participant)
    assert await code(waiting) == "stale_attempt"


@pytest.mark.parametrize("exportable", [True, False])
async def test_a_seed_that_was_retired_while_it_began_leaves_no_sandbox(exportable: bool) -> None:
    own = Own()
    participant = opted(own, exportable=exportable)
    begun = asyncio.Event()

    async def begin(_: Session) -> None:
        own.states["r"] = "sandbox"
        await begun.wait()

    seeding = asyncio.create_task(participant.seed("s", R0, [], begin=begin))
    await settle()
    participant.gate.fence.mark("r", 0)
    retiring = asyncio.create_task(participant.retire([R0]))
    await asyncio.sleep(10)
    assert not retiring.done()
    begun.set()
    await retiring
    assert await code(seeding) == "stale_attempt"
    assert (own.states, participant.survey().counts["sessions"]) == ({}, 0)


async def test_a_seed_that_begins_holds_prepare_up() -> None:
    participant = agent()
    begun = asyncio.Event()

    async def begin(_: Session) -> None:
        await begun.wait()

    seeding = asyncio.create_task(participant.seed("s", R0, [], begin=begin))
    await settle()
    assert not prepare(participant)
    assert [blocker.where for blocker in participant.survey().blockers] == ["seed"]
    begun.set()
    await seeding
    assert ready(participant)


# ---- rollouts that are forgotten ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "retire"])
@pytest.mark.parametrize("still", [True, False])
async def test_a_session_whose_end_fails_is_named_with_its_age_and_holds_nothing_up_once_its_rollout_is_forgotten(
    how: str, still: bool, caplog: pytest.LogCaptureFixture
) -> None:
    own = Own()
    own.broken = True
    participant = opted(own)
    session = await seeded(participant)
    for _ in range(2):
        await asyncio.sleep(7)
        end = participant.close(session.id, R0) if how == "close" else participant.retire([R0])
        assert await code(end) == "checkpoint_error"
    await asyncio.sleep(3)
    assert not prepare(participant)
    assert [(one.id, one.where, one.age_seconds) for one in participant.survey().blockers] == [("r", "ending", 10.0)]
    resume(participant)
    own.broken = still
    participant.forget(["r"])
    await settle()
    assert await checkpoint(participant) == {}
    assert participant.survey().counts == {"sessions": 0, "busy": 0}
    assert own.retired == ([] if still else ["r"])
    assert ("could not be freed" in caplog.text) == still


async def test_a_forgotten_rollout_whose_session_is_not_ending_keeps_it() -> None:
    """Whoever forgets too early costs it its receipts, not its work."""
    participant = opted(Own())
    session = await seeded(participant)
    participant.forget(["r"])
    assert participant.session(session.id, R0) is session


async def test_an_end_that_is_under_way_when_its_rollout_is_forgotten_is_not_begun_again() -> None:
    own = Own()
    own.held = asyncio.Event()
    participant = opted(own)
    session = await seeded(participant)
    closing = asyncio.create_task(participant.close(session.id, R0))
    await settle()
    participant.forget(["r"])
    own.held.set()
    await closing
    assert (own.retired, participant.survey().counts) == (["r"], {"sessions": 0, "busy": 0})
