"""The agent participant: sessions, activations that are idempotent, and boundaries inside the turn loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import pytest

from gym_rig.verbs import checkpoint, commit, prepare, ready, restore, restore_built, resume, start
from gym_rig.virtual import now, settle
from gym_servers.participants.agent import AgentParticipant
from gym_servers.participants.agent_state import Activation, AgentHooks, Session
from gym_servers.participants.agent_turns import ADMISSION_RETRY_SECONDS
from gym_servers.participants.gate import Gate
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.protocol.phases import Input, moved

R0, R1, R2 = (Episode("r", attempt) for attempt in range(3))
ACCESS = [{"peer": "counter", "jar": {"c": {"id": "1"}}, "headers": {}}]


class Loop:
    """A turn loop of `turns` model calls with a tool round after each; a test ends each step."""

    def __init__(self, participant: AgentParticipant, turns: int = 2) -> None:
        self.participant, self.turns = participant, turns
        self.model, self.tool = asyncio.Semaphore(0), asyncio.Semaphore(0)
        self.log: list[str] = []
        self.refusals: list[ProtocolError] = []
        self.error: Exception | None = None

    async def __call__(self, activation: Activation) -> dict[str, Any]:
        while True:
            await self.participant.boundary(activation)
            await self.participant.model_call(activation, self._model)
            activation.model_calls += 1
            if activation.model_calls > self.turns:
                return {"items": list(activation.items)}
            self.log.append("tool")
            await self.tool.acquire()
            activation.items = [*activation.items, {"turn": activation.model_calls}]

    async def _model(self) -> str:
        self.log.append("model")
        if self.refusals:
            raise self.refusals.pop()
        await self.model.acquire()
        if self.error is not None:
            raise self.error
        return "reply"

    def free(self) -> None:
        """Let it run to its end."""
        for _ in range(self.turns + 1):
            self.model.release()
            self.tool.release()


def agent(*, started: bool = True) -> AgentParticipant:
    participant = AgentParticipant(Gate(clock=now))
    if started:
        start(participant)
    return participant


async def seeded(participant: AgentParticipant, episode: Episode = R0, session: str = "s") -> Session:
    return await participant.seed(session, episode, list(ACCESS))


def activate(
    participant: AgentParticipant, session: Session, loop: Any, index: int | None = 1, digest: str = "d"
) -> asyncio.Task[dict[str, Any]]:
    return asyncio.create_task(participant.activate(session, index, digest, loop))


async def code(call: Awaitable[Any]) -> str:
    with pytest.raises(ProtocolError) as refused:
        await call
    return refused.value.code


async def stubborn(_: Activation) -> dict[str, Any]:
    """A turn loop that needs a second to end."""
    try:
        await asyncio.sleep(1000)
    finally:
        await asyncio.sleep(1)
    return {}


# ---- activations ------------------------------------------------------------------------------------------


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


# ---- boundaries -------------------------------------------------------------------------------------------


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


# ---- restore ----------------------------------------------------------------------------------------------


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


# ---- seed, close, retire ----------------------------------------------------------------------------------


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


# ---- agents that opt in, and those that do not --------------------------------------------------------------


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


# ---- what cannot be continued -------------------------------------------------------------------------------


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


# ---- rows ---------------------------------------------------------------------------------------------------


class Row:
    """The work of a row, ended by a test."""

    def __init__(self) -> None:
        self.end, self.runs = asyncio.Event(), 0
        self.error: Exception | None = None

    async def __call__(self) -> str:
        self.runs += 1
        await self.end.wait()
        if self.error is not None:
            raise self.error
        return "row"


async def test_a_repeated_row_joins_and_another_one_is_refused() -> None:
    participant, work = agent(), Row()
    first, second = (asyncio.create_task(participant.row(R0, "d", work)) for _ in range(2))
    await settle()
    assert await code(participant.row(R0, "other", work)) == "checkpoint_conflict"
    first.cancel()
    work.end.set()
    assert (await second, work.runs) == ("row", 1)


async def test_c17_a_row_that_failed_is_not_answered_again_and_its_attempt_is_used_up() -> None:
    participant, work = agent(), Row()
    work.error = ValueError("broken")
    work.end.set()
    with pytest.raises(ValueError, match="broken"):
        await participant.row(R0, "d", work)
    assert await code(participant.row(R0, "d", work)) == "stale_attempt"
    work.error = None
    assert await participant.row(R1, "d", work) == "row"


async def test_a_row_that_comes_while_a_checkpoint_is_open_waits_and_runs_once() -> None:
    participant, work = agent(), Row()
    prepare(participant)
    calls = [asyncio.create_task(participant.row(R0, "d", work)) for _ in range(2)]
    await settle()
    assert work.runs == 0
    resume(participant)
    work.end.set()
    assert await asyncio.gather(*calls) == ["row", "row"]
    assert work.runs == 1


async def test_an_answered_row_is_answered_again_also_by_another_process() -> None:
    participant, work = agent(), Row()
    session = await seeded(participant)
    await participant.answered(session, "d", "row")
    assert await participant.row(R0, "d", work) == "row"
    second = agent(started=False)
    assert restore(second, await checkpoint(participant, "r"), "r") == ["r-a1"]
    resume(second, "restore")
    assert await second.row(R1, "d", work) == "row"
    assert await code(second.row(R1, "other", work)) == "checkpoint_conflict"
    assert work.runs == 0


async def test_a_retired_or_forgotten_row_leaves_no_receipt() -> None:
    participant = agent()
    for name in ("r", "gone", "kept"):
        await participant.answered(await seeded(participant, Episode(name, 0), name), "d", "row")
    participant.gate.fence.mark("r", 0)
    await participant.retire([R0])
    participant.forget(["gone"])
    assert set(await checkpoint(participant)) == {"answered/kept"}


async def test_a_retire_ends_a_row_before_its_session() -> None:
    participant = agent()
    log: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            log.append("row")

    running = asyncio.create_task(participant.row(R0, "d", work))
    await settle()
    participant.gate.fence.mark("r", 0)
    await participant.retire([R0])
    assert log == ["row"]
    assert await code(running) == "stale_attempt"


# ---- what it costs ------------------------------------------------------------------------------------------


class Unseen(dict[Any, Any]):
    """A table that may be asked for a key, and not be walked over."""

    def _walked(self) -> Any:
        raise AssertionError("the whole table was walked over")

    __iter__ = items = values = keys = _walked  # type: ignore[assignment]


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
