"""The resources participant: effects happen once, a lost session is an error, and nothing is half done at a cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gym_rig.verbs import checkpoint, commit, prepare, ready, restore_built, resume, start
from gym_rig.virtual import now, settle
from gym_servers.control.plane import ControlPlane
from gym_servers.control.writes import Author
from gym_servers.participants.gate import Gate
from gym_servers.participants.resources import Hooks, ResourcesParticipant
from gym_servers.participants.tool_sessions import ToolSession
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.manifest import CodeIdentity

R0, R1, R2 = (Episode("r", attempt) for attempt in range(3))


class Tools:
    """A server's own state: a number per session, and what was done to it."""

    def __init__(self, mode: str = "exported", *, started: bool = True) -> None:
        self.values: dict[str, int] = {}
        self.log: list[str] = []
        self.turnstile = asyncio.Semaphore(1000)
        self.parked: set[str] = set()
        self.failing: str | None = None
        self.freeing = asyncio.Semaphore(1000)
        hooks = Hooks(self.export, self.restore, self.retire, self.park, self.unpark)
        self.participant = ResourcesParticipant(Gate(clock=now), mode, hooks)
        if started:
            start(self.participant)

    async def export(self, ids: Sequence[str]) -> Mapping[str, Any]:
        return {one: self.values[one] for one in ids}

    async def restore(self, states: Mapping[str, Any]) -> None:
        valid = {one: int(value) for one, value in states.items()}
        for one, value in valid.items():
            await self.turnstile.acquire()
            if one == self.failing:
                raise OSError("no room")
            self.values[one] = value

    async def retire(self, session_id: str) -> None:
        self.log.append(f"retire {session_id}")
        await self.freeing.acquire()
        self.values.pop(session_id, None)

    async def park(self, ids: Sequence[str]) -> None:
        await self.turnstile.acquire()
        self.parked |= set(ids)

    async def unpark(self, ids: Sequence[str]) -> None:
        await self.turnstile.acquire()
        self.parked -= set(ids)

    async def seed(
        self, session: str | None = "s", episode: Episode | None = R0, row: str = "row", fresh: str = "fresh"
    ) -> ToolSession:
        async def begin(name: str) -> None:
            self.log.append(f"seed {name}")
            await self.turnstile.acquire()
            self.values[name] = 0

        return await self.participant.seed(session, episode, begin, digest=row, fresh_id=fresh)

    async def add(
        self, call: str | None = "c1", *, session: str = "s", episode: Episode | None = R0, by: int = 1
    ) -> Any:
        async def work(found: ToolSession) -> Any:
            assert found.id not in self.parked
            await self.turnstile.acquire()
            self.values[found.id] += by
            self.log.append(f"{call}")
            return self.values[found.id]

        return await self.participant.call(session, episode, "add", work, call_id=call, digest=str(by))

    @property
    def calls(self) -> list[str]:
        return [entry for entry in self.log if not entry.startswith(("seed", "retire"))]

    def hold(self) -> None:
        self.turnstile = asyncio.Semaphore(0)


async def code(call: Awaitable[Any]) -> str:
    with pytest.raises(ProtocolError) as refused:
        await call
    return refused.value.code


# ---- effects ----------------------------------------------------------------------------------------------


async def test_a_repeated_call_is_answered_and_not_run_again() -> None:
    tools = Tools()
    await tools.seed()
    assert [await tools.add("c1"), await tools.add("c1"), await tools.add("c2")] == [1, 1, 2]
    assert tools.calls == ["c1", "c2"]
    assert await code(tools.add("c1", by=5)) == "checkpoint_conflict"
    assert await tools.add(None) == 3
    assert await tools.add(None) == 4


async def test_a_repeat_that_comes_while_the_call_runs_waits_for_its_reply() -> None:
    tools = Tools()
    await tools.seed()
    tools.hold()
    first, second = asyncio.create_task(tools.add()), asyncio.create_task(tools.add())
    await settle()
    tools.turnstile.release()
    assert [await first, await second] == [1, 1]
    assert tools.calls == ["c1"]


async def test_a_caller_that_leaves_does_not_tear_an_effect_from_its_reply() -> None:
    tools = Tools()
    await tools.seed()
    tools.hold()
    running = asyncio.create_task(tools.add())
    await settle()
    running.cancel()
    await settle()
    assert not prepare(tools.participant)
    tools.turnstile.release()
    await settle()
    assert ready(tools.participant)
    assert b'"effects":0' in (await commit(tools.participant))["s"]
    assert tools.calls == ["c1"]
    resume(tools.participant)
    tools.turnstile.release()
    assert await tools.add() == 1


async def test_a_failed_call_is_not_kept_as_a_reply() -> None:
    tools = Tools()
    await tools.seed()

    async def fails(_: ToolSession) -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await tools.participant.call("s", R0, "add", fails, call_id="c1", digest="1")
    assert await tools.add("c1") == 1


async def test_calls_of_one_session_run_one_after_another_and_of_two_beside_each_other() -> None:
    tools = Tools()
    await tools.seed()
    await tools.seed("o", Episode("o", 0))
    tools.hold()
    calls = [asyncio.create_task(tools.add(f"c{n}")) for n in range(3)]
    other = asyncio.create_task(tools.add("x", session="o", episode=Episode("o", 0)))
    await settle()
    assert tools.participant.survey().counts["busy"] == 2
    for _ in range(4):
        tools.turnstile.release()
    assert [await one for one in calls] == [1, 2, 3]
    assert await other == 1


# ---- who may call -----------------------------------------------------------------------------------------


async def test_a_lost_session_is_an_error_and_never_a_fresh_one() -> None:
    tools = Tools()
    assert await code(tools.add()) == "session_lost"
    await tools.seed()
    await tools.participant.close("s", R0)
    assert await code(tools.add()) == "session_lost"
    assert tools.values == {}


@pytest.mark.parametrize("episode", [Episode("other", 0), R1])
async def test_a_session_is_bound_to_its_episode(episode: Episode) -> None:
    tools = Tools()
    await tools.seed()
    assert await code(tools.add(episode=episode)) == "stale_attempt"
    assert await code(tools.participant.close("s", episode)) == "stale_attempt"
    assert tools.calls == []


async def test_work_without_an_episode_is_refused_where_one_is_needed() -> None:
    tools = Tools()
    assert await code(tools.seed(episode=None)) == "rollout_id_required"
    await tools.seed()
    assert await code(tools.add(episode=None)) == "rollout_id_required"


async def test_with_checkpointing_off_sessions_need_no_episode() -> None:
    tools = Tools()
    tools.participant.gate = Gate(enabled=False)
    await tools.seed(episode=None)
    assert await tools.add(episode=None) == 1


async def test_a_retired_attempt_has_no_effect_and_its_close_is_never_refused() -> None:
    tools = Tools()
    await tools.seed()
    tools.participant.gate.fence.mark("r", 0)
    assert await code(tools.add()) == "stale_attempt"
    await tools.participant.close("s", R0)
    await tools.participant.close("s", R0)
    assert tools.participant.survey().counts["sessions"] == 0


async def test_a_call_that_waited_behind_another_looks_at_the_watermark_again() -> None:
    tools = Tools()
    await tools.seed()
    tools.hold()
    first, second = asyncio.create_task(tools.add("c1")), asyncio.create_task(tools.add("c2"))
    await settle()
    tools.participant.gate.fence.mark("r", 0)
    retiring = asyncio.create_task(tools.participant.retire([R0]))
    tools.turnstile.release()
    assert await first == 1
    assert await code(second) in ("stale_attempt", "session_lost")
    await retiring
    assert tools.calls == ["c1"]
    assert tools.values == {}


async def test_retire_costs_only_its_own_rollout() -> None:
    tools = Tools()
    await tools.seed()
    await tools.seed("o", Episode("o", 0))
    await tools.participant.retire([R0])
    await tools.participant.retire([R0])
    assert tools.values == {"o": 0}


@pytest.mark.parametrize("attempts", [(2, 0), (0, 2)])
async def test_a_retire_of_several_attempts_of_a_rollout_waits_for_the_highest(attempts: tuple[int, int]) -> None:
    tools = Tools()
    await tools.seed(episode=R2)
    tools.hold()
    running = asyncio.create_task(tools.add(episode=R2))
    await settle()
    tools.participant.gate.fence.mark("r", 2)
    retiring = asyncio.create_task(tools.participant.retire([Episode("r", attempt) for attempt in attempts]))
    await asyncio.sleep(100)
    assert not retiring.done()
    tools.turnstile.release()
    await retiring
    assert (await running, tools.values) == (1, {})


# ---- seed -------------------------------------------------------------------------------------------------


async def test_a_repeated_seed_replaces_the_session_and_frees_its_state() -> None:
    tools = Tools()
    await tools.seed("s")
    await tools.seed("s2")
    assert tools.values == {"s2": 0}
    assert await code(tools.add()) == "session_lost"


async def test_seeds_that_come_together_leave_one_session_and_one_state() -> None:
    tools = Tools()
    tools.hold()
    seeds = [asyncio.create_task(tools.seed(f"s{n}")) for n in range(4)]
    await settle()
    for _ in seeds:
        tools.turnstile.release()
    await asyncio.gather(*seeds)
    assert len(tools.values) == 1
    assert tools.participant.survey().counts["sessions"] == 1


async def test_a_seed_that_fails_leaves_no_session() -> None:
    tools = Tools()

    async def fails(_: str) -> None:
        raise ProtocolError("invalid_request", "the row")

    assert await code(tools.participant.seed("s", R0, fails, digest="", fresh_id="f")) == "invalid_request"
    assert tools.participant.survey().counts == {"sessions": 0, "busy": 0}


async def test_a_retire_waits_for_a_seed_in_progress_and_what_that_began_is_freed() -> None:
    tools = Tools()
    tools.hold()
    seeding = asyncio.create_task(tools.seed())
    other = asyncio.create_task(tools.seed("o", Episode("o", 0)))
    await settle()
    tools.participant.gate.fence.mark("r", 0)
    retiring = asyncio.create_task(tools.participant.retire([R0]))
    await asyncio.sleep(100)
    assert not retiring.done()
    tools.turnstile.release()
    await retiring
    assert tools.values == {}
    assert await code(seeding) == "stale_attempt"
    tools.turnstile.release()
    await other
    assert tools.values == {"o": 0}


# ---- checkpoints ------------------------------------------------------------------------------------------


async def test_a_call_in_progress_holds_a_checkpoint_up_and_later_ones_wait() -> None:
    tools = Tools()
    await tools.seed()
    tools.hold()
    running = asyncio.create_task(tools.add("c1"))
    await settle()
    assert not prepare(tools.participant)
    assert [(b.id, b.where) for b in tools.participant.survey().blockers] == [("r", "add")]
    later = asyncio.create_task(tools.add("c2"))
    await settle()
    for _ in range(2):
        tools.turnstile.release()
    await running
    assert ready(tools.participant)
    await asyncio.sleep(100)
    assert not later.done()
    records = await commit(tools.participant)
    assert json.loads(records["s"])["state"] == 1
    resume(tools.participant)
    assert await later == 2


async def test_a_close_that_waits_behind_calls_never_deadlocks_a_checkpoint() -> None:
    """What holds a checkpoint up must not wait for what the checkpoint lets wait."""
    tools = Tools()
    await tools.seed()
    tools.hold()
    running = [asyncio.create_task(tools.add(f"c{n}")) for n in range(2)]
    await settle()
    closing = asyncio.create_task(tools.participant.close("s", R0))
    await settle()
    prepare(tools.participant)
    tools.turnstile.release()
    await settle()
    assert await running[0] == 1
    assert ready(tools.participant), tools.participant.survey()
    assert json.loads((await commit(tools.participant))["s"])["state"] == 1
    resume(tools.participant)
    tools.turnstile.release()
    await closing
    assert tools.values == {}
    await asyncio.gather(*running, return_exceptions=True)


async def test_a_retire_never_waits_for_an_open_checkpoint() -> None:
    """It holds the checkpoint up itself: a call that waits for admission must not keep it from the session."""
    tools = Tools()
    await tools.seed()
    tools.hold()
    running = [asyncio.create_task(tools.add(f"c{n}")) for n in range(2)]
    await settle()
    tools.participant.gate.fence.mark("r", 0)
    retiring = asyncio.create_task(tools.participant.retire([R0]))
    prepare(tools.participant)
    tools.turnstile.release()
    await retiring
    assert tools.values == {}
    resume(tools.participant)
    assert await code(running[1]) in ("stale_attempt", "session_lost")
    assert tools.calls == ["c0"]


async def test_a_close_waits_for_resume() -> None:
    tools = Tools()
    await tools.seed()
    prepare(tools.participant)
    closing = asyncio.create_task(tools.participant.close("s", R0))
    await asyncio.sleep(100)
    assert not closing.done()
    assert tools.participant.survey().ready
    resume(tools.participant)
    await closing
    assert tools.values == {}


async def test_a_verify_that_may_run_again_passes_closed_admission() -> None:
    tools = Tools()
    await tools.seed()
    prepare(tools.participant)

    async def score(session: ToolSession) -> Any:
        return tools.values[session.id]

    assert await tools.participant.call("s", R0, "verify", score, replay=True) == 0
    assert tools.participant.survey().ready
    waits = asyncio.create_task(tools.participant.call("s", R0, "verify", score))
    await asyncio.sleep(10)
    assert not waits.done()
    resume(tools.participant)
    assert await waits == 0


async def test_an_episode_that_must_restart_anyway_is_neither_waited_for_nor_exported() -> None:
    tools = Tools()
    await tools.seed()
    tools.hold()
    running = asyncio.create_task(tools.add())
    await settle()
    assert prepare(tools.participant, restarts=frozenset({"r"}))
    assert await commit(tools.participant) == {}
    tools.turnstile.release()
    await running


async def test_a_server_that_cannot_be_checkpointed_reports_its_episodes_as_restarts() -> None:
    tools = Tools("restart_only")
    await tools.seed()
    assert prepare(tools.participant)
    assert tools.participant.survey().restarts == {"r"}
    assert await commit(tools.participant) == {}


async def test_a_stateless_server_restores_its_sessions() -> None:
    tools = Tools("stateless")
    await tools.seed()
    records = await checkpoint(tools.participant)
    other = Tools("stateless", started=False)
    assert await restore_built(other.participant, records, "r") == ["r-a1"]


# ---- restore ----------------------------------------------------------------------------------------------


async def restored() -> Tools:
    first = Tools()
    await first.seed()
    await first.seed("o", Episode("o", 0))
    await first.add("c1", by=5)
    records = await checkpoint(first.participant)
    second = Tools(started=False)
    await restore_built(second.participant, records, "r")
    resume(second.participant, "restore")
    return second


async def test_a_call_of_before_the_checkpoint_is_answered_also_after_the_restore() -> None:
    tools = await restored()
    assert tools.values == {"s": 5}
    assert await tools.add("c1", episode=R1, by=5) == 5
    assert await tools.add("c2", episode=R1, by=1) == 6
    assert tools.calls == ["c2"]
    assert await code(tools.add("c1", episode=R1, by=4)) == "checkpoint_conflict"


async def test_a_call_under_the_replaced_attempt_is_stale() -> None:
    tools = await restored()
    assert await code(tools.add("c2")) == "stale_attempt"
    assert await code(tools.seed("n", R0)) == "stale_attempt"
    assert tools.calls == []


@pytest.mark.parametrize("damage", [b"", b'{"format":1}', b'{"format":1,"session":"s","episode":"r","effects":"x"}'])
async def test_a_record_that_cannot_be_read_is_named_and_nothing_is_installed(damage: bytes) -> None:
    tools = Tools(started=False)
    with pytest.raises(ProtocolError, match="record s") as refused:
        await restore_built(tools.participant, {"s": damage}, "r")
    assert refused.value.code == "invalid_checkpoint_state"
    assert tools.participant.survey().counts["sessions"] == 0


async def test_a_state_that_the_server_refuses_installs_nothing() -> None:
    first = Tools()
    await first.seed()
    records = await checkpoint(first.participant)
    changed = {"s": json.dumps({**json.loads(records["s"]), "state": "no number"}).encode()}
    second = Tools(started=False)
    with pytest.raises(ProtocolError, match="session states") as refused:
        await restore_built(second.participant, changed, "r")
    assert refused.value.code == "invalid_checkpoint_state"
    assert second.participant.survey().counts["sessions"] == 0


async def test_uninstall_leaves_nothing() -> None:
    tools = await restored()
    tools.participant.uninstall()
    await settle()
    assert tools.values == {}
    assert tools.participant.survey().counts["sessions"] == 0


# ---- seeds and closes that come twice or late -------------------------------------------------------------


def begun(tools: Tools) -> list[str]:
    return [entry for entry in tools.log if entry.startswith("seed")]


async def test_c20_a_seed_that_a_proxy_repeats_begins_once() -> None:
    """While the first is under way, after it, and after calls that a second start would undo."""
    tools = Tools()
    tools.hold()
    first, second = asyncio.create_task(tools.seed()), asyncio.create_task(tools.seed())
    await settle()
    first.cancel()  # the proxy gave its first try up
    await settle()
    for _ in range(2):
        tools.turnstile.release()
    session = await second
    assert await tools.add() == 1
    assert await tools.seed() is session
    assert tools.values == {"s": 1}
    assert begun(tools) == ["seed s"]


async def test_c20_a_seed_of_another_row_under_the_same_name_is_refused() -> None:
    tools = Tools()
    tools.hold()
    first = asyncio.create_task(tools.seed())
    await settle()
    assert await code(tools.seed(row="other")) == "checkpoint_conflict"
    tools.turnstile.release()
    await first
    assert await code(tools.seed(row="other")) == "checkpoint_conflict"
    assert await code(tools.seed(episode=Episode("o", 0))) == "checkpoint_conflict"
    assert begun(tools) == ["seed s"]


async def test_c20_a_seed_without_a_name_is_the_same_until_its_session_is_called() -> None:
    tools = Tools()
    tools.hold()
    seeds = [asyncio.create_task(tools.seed(None, fresh=f"f{n}")) for n in range(3)]
    await settle()
    tools.turnstile.release()
    assert {(await one).id for one in seeds} == {"f0"}
    tools.turnstile = asyncio.Semaphore(1000)
    assert (await tools.seed(None, fresh="f3")).id == "f0"
    await tools.add(session="f0")
    assert (await tools.seed(None, fresh="f4")).id == "f4"  # a start-over: what was done is not its history
    assert tools.values == {"f4": 0}


async def test_c20_the_same_tool_call_at_once_and_again_runs_once() -> None:
    tools = Tools()
    await tools.seed()
    assert await asyncio.gather(*(tools.add("c1") for _ in range(5))) == [1] * 5
    assert tools.calls == ["c1"]


async def test_a_late_seed_of_a_closed_session_begins_nothing() -> None:
    tools = Tools()
    await tools.seed()
    await tools.participant.close("s", R0)
    assert await code(tools.seed()) == "session_lost"
    await tools.participant.close("never", R0)
    assert await code(tools.seed("never")) == "session_lost"
    assert tools.values == {}
    await tools.seed("s", R1)  # another attempt's session may have the name
    assert tools.values == {"s": 0}


async def test_a_close_before_the_process_is_in_service_is_told_to_come_again() -> None:
    """Or the session that is to be restored would stay for ever; while a checkpoint is open it waits."""
    tools = Tools(started=False)
    assert await code(tools.participant.close("s", R0)) == "admission_closed"
    start(tools.participant)
    await tools.seed()  # nothing was remembered of the close that was refused
    await tools.participant.close("unknown", R0)


async def test_a_close_that_comes_while_its_session_is_seeded_ends_it() -> None:
    tools = Tools()
    tools.hold()
    seeding = asyncio.create_task(tools.seed())
    await settle()
    closing = asyncio.create_task(tools.participant.close("s", R0))
    await settle()
    assert not closing.done()
    tools.turnstile.release()
    await closing
    assert await code(seeding) == "session_lost"
    assert tools.values == {}


async def test_what_a_failed_seed_has_begun_is_freed() -> None:
    tools = Tools()

    async def fails(name: str) -> None:
        tools.values[name] = 0
        raise ValueError("half way")

    with pytest.raises(ValueError, match="half way"):
        await tools.participant.seed("s", R0, fails, digest="", fresh_id="f")
    assert tools.values == {}
    await tools.seed()


async def test_a_higher_attempt_retires_the_session_of_the_lower_one_before_it_begins() -> None:
    tools = Tools()
    await tools.seed("s0", R0)
    await tools.seed("o", Episode("o", 0))
    tools.hold()
    running = asyncio.create_task(tools.add(session="s0"))
    await settle()
    seeding = asyncio.create_task(tools.seed("s1", R1))
    await settle()
    assert begun(tools)[-1] == "seed o"
    for _ in range(2):
        tools.turnstile.release()
    assert await running == 1  # begun before the higher one came: it is waited for
    await seeding
    assert tools.values == {"o": 0, "s1": 0}
    assert tools.log.index("retire s0") < tools.log.index("seed s1")
    assert await code(tools.add(session="s0")) in ("stale_attempt", "session_lost")


async def test_a_higher_attempt_that_waits_for_the_lower_one_never_deadlocks_a_checkpoint() -> None:
    tools = Tools()
    await tools.seed("s0", R0)
    tools.hold()
    running = [asyncio.create_task(tools.add(f"c{n}", session="s0")) for n in range(2)]
    await settle()
    seeding = asyncio.create_task(tools.seed("s1", R1))
    await settle()
    prepare(tools.participant)
    tools.turnstile.release()
    await settle()
    assert ready(tools.participant), tools.participant.survey()
    assert await commit(tools.participant) == {}  # what was replaced is not exported
    resume(tools.participant)
    tools.turnstile.release()
    await seeding
    assert tools.values == {"s1": 0}
    await asyncio.gather(*running, return_exceptions=True)


async def test_what_is_being_freed_is_not_exported() -> None:
    tools = Tools()
    await tools.seed("s0", R0)
    tools.freeing = asyncio.Semaphore(0)
    seeding = asyncio.create_task(tools.seed("s1", R1))
    await settle()
    assert prepare(tools.participant)
    assert await commit(tools.participant) == {}
    tools.freeing.release()
    resume(tools.participant)
    await seeding
    assert tools.values == {"s1": 0}


async def test_a_seed_that_replaces_a_session_never_waits_for_a_call_that_waits_for_its_checkpoint() -> None:
    """The seed holds the checkpoint up, the checkpoint the call, and the call must not hold the session."""
    tools = Tools()
    await tools.seed("s")
    tools.hold()
    running = [asyncio.create_task(tools.add(f"c{n}")) for n in range(2)]
    seeding = asyncio.create_task(tools.seed("s2"))
    await settle()
    prepare(tools.participant)
    for _ in range(2):
        tools.turnstile.release()
    await seeding
    assert ready(tools.participant)
    resume(tools.participant)
    assert await running[0] == 1
    assert await code(running[1]) == "session_lost"
    assert tools.values == {"s2": 0}


async def test_a_refused_call_fences_nothing() -> None:
    """It names an attempt that nobody seeded: the live one goes on."""
    tools = Tools()
    await tools.seed()
    assert await code(tools.add(episode=R1)) == "stale_attempt"
    assert await code(tools.add(session="unknown", episode=R1)) == "session_lost"
    assert await tools.add() == 1


async def test_a_retire_whose_hook_fails_can_be_repeated_and_frees_what_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tools = Tools()
    await tools.seed()
    with monkeypatch.context() as patched:

        async def fails(_: str) -> None:
            raise OSError("busy")

        patched.setattr(tools.participant, "hooks", replace(tools.participant.hooks, retire=fails))
        with pytest.raises(OSError, match="busy"):
            await tools.participant.retire([R0])
    assert await code(tools.add()) == "session_lost"
    await tools.participant.retire([R0])
    assert tools.values == {}
    assert tools.participant.survey().counts["sessions"] == 0


@pytest.mark.parametrize("still", [True, False])
async def test_a_session_whose_end_failed_is_not_kept_once_its_rollout_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, still: bool, caplog: pytest.LogCaptureFixture
) -> None:
    tools = Tools()
    await tools.seed()
    await tools.seed("t", Episode("other", 0))

    async def fails(_: str) -> None:
        raise OSError("busy")

    working = tools.participant.hooks
    monkeypatch.setattr(tools.participant, "hooks", replace(working, retire=fails))
    with pytest.raises(OSError, match="busy"):
        await tools.participant.close("s", R0)
    if not still:
        monkeypatch.setattr(tools.participant, "hooks", working)
    tools.participant.forget(["r", "other"])
    await settle()
    assert set(await checkpoint(tools.participant)) == {"t"}  # what has not ended is kept
    assert tools.participant.survey().counts["sessions"] == 1
    assert ("s" in tools.values) == still == ("could not be freed" in caplog.text)


async def test_c8_a_call_that_slips_in_around_a_cut_is_in_it_or_after_it() -> None:
    """At every moment between the closing of admission and the freeze: never in neither, never in both."""
    for moment in range(8):
        tools = Tools()
        await tools.seed()
        steps = 0
        calls: list[asyncio.Task[Any]] = []

        async def step(tools: Tools = tools, calls: list[asyncio.Task[Any]] = calls, moment: int = moment) -> None:
            nonlocal steps
            if steps == moment:
                calls.append(asyncio.create_task(tools.add("c1")))
            steps += 1
            await asyncio.sleep(0)

        await step()
        prepare(tools.participant)
        while not ready(tools.participant):
            await step()
        await step()
        frozen = json.loads((await commit(tools.participant))["s"])
        while steps <= moment:
            await step()
        resume(tools.participant)
        assert await calls[0] == 1
        second = Tools(started=False)
        await restore_built(second.participant, {"s": json.dumps(frozen).encode()}, "r")
        resume(second.participant, "restore")
        assert await second.add("c1", episode=R1) == 1
        assert len(second.calls) == (frozen["state"] == 0)


# ---- what a restore builds --------------------------------------------------------------------------------


async def test_c15_a_replayed_seed_after_a_restore_finds_the_restored_session() -> None:
    tools = await restored()
    session = await tools.seed("s", R1)
    assert (session.effects, tools.values, begun(tools)) == (0, {"s": 5}, [])
    await tools.seed("another", R1)
    assert tools.values == {"another": 0}


async def test_a_record_of_before_seeds_were_remembered_answers_a_replayed_seed(tmp_path: Path) -> None:
    first = Tools()
    await first.seed()
    record = json.loads((await checkpoint(first.participant))["s"])
    for field in ("seed", "touched"):
        del record[field]
    second = Tools(started=False)
    await restore_built(second.participant, {"s": json.dumps(record).encode()}, "r")
    resume(second.participant, "restore")
    await second.seed("s", R1)
    assert (second.values, begun(second)) == ({"s": 0}, [])


@pytest.mark.parametrize("episode", [None, R0, Episode("r", 2)])
async def test_a_call_on_a_restored_session_must_name_its_attempt(episode: Episode | None) -> None:
    tools = await restored()
    wanted = "rollout_id_required" if episode is None else "stale_attempt"
    assert await code(tools.add("c2", episode=episode, by=1)) == wanted
    assert tools.values == {"s": 5}


async def test_a_restore_that_fails_half_way_leaves_nothing_and_can_be_tried_again() -> None:
    first = Tools()
    for name in "abc":
        await first.seed(name, Episode(name, 0))
    records = await checkpoint(first.participant)
    second = Tools(started=False)
    second.failing = "c"
    with pytest.raises(OSError, match="no room"):
        await restore_built(second.participant, records, "a", "b", "c")
    await settle()
    assert second.values == {}
    second.failing = None
    assert await restore_built(second.participant, records, "a", "b", "c") == ["a-a1", "b-a1", "c-a1"]
    assert second.values == {"a": 0, "b": 0, "c": 0}


def control(tools: Tools, folder: Path) -> ControlPlane:
    code = CodeIdentity(image="", server="tools", config_digest="", record_format=1)
    author = Author("resources", "tools", "session", code)
    return ControlPlane(tools.participant, author, lambda uri: DirectoryStore(Path(uri)), grace=60.0, wall=now)


def verb(checkpoint_id: str, seconds: float = 20.0, **fields: Any) -> dict[str, Any]:
    return {"checkpoint_id": checkpoint_id, "deadline_ts": now() + seconds, **fields}


async def stored(folder: Path) -> None:
    """A checkpoint of two sessions."""
    tools = Tools()
    plane = control(tools, folder)
    await tools.seed()
    await tools.seed("o", Episode("o", 0))
    await tools.add(by=5)
    await plane.prepare(m.PrepareRequest(**verb("cp")))
    await plane.commit(m.CommitRequest(**verb("cp", checkpoint_dir=str(folder))))


def restoring(folder: Path, checkpoint_id: str = "restore", seconds: float = 20.0) -> m.RestoreRequest:
    fields = {"checkpoint_dir": str(folder), "episode_ids": ["r", "o"], "cell_attempt": 1}
    return m.RestoreRequest(**verb(checkpoint_id, seconds, **fields))


async def building(tools: Tools) -> None:
    """The records are read, in a thread, and the first session is being built."""
    while not tools.turnstile._waiters:  # noqa: ASYNC110 - nothing tells of it
        await asyncio.sleep(0.01)


async def test_what_is_being_built_cannot_be_reached_and_then_all_is_there(tmp_path: Path) -> None:
    await stored(tmp_path)
    tools = Tools(started=False)
    plane = control(tools, tmp_path)
    tools.hold()
    task = asyncio.create_task(plane.restore(restoring(tmp_path)))
    await building(tools)
    tools.turnstile.release()
    await settle()
    assert len(tools.values) == 1
    assert await code(tools.add("c2", episode=R1)) == "admission_closed"
    assert tools.participant.survey().counts["sessions"] == 0
    assert plane.status().phase == "starting"
    tools.turnstile.release()
    assert sorted((await task).restored) == ["o-a1", "r-a1"]
    assert tools.values == {"s": 5, "o": 0}


async def test_a_restore_that_is_cut_by_its_deadline_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    await stored(tmp_path)
    tools = Tools(started=False)
    plane = control(tools, tmp_path)
    tools.turnstile = asyncio.Semaphore(1)
    assert await code(plane.restore(restoring(tmp_path, seconds=3))) == "deadline_exceeded"
    await settle()
    assert (tools.values, plane.status().phase) == ({}, "starting")
    tools.turnstile = asyncio.Semaphore(1000)
    assert (await plane.restore(restoring(tmp_path))).restored == ["o-a1", "r-a1"]


async def test_a_resume_that_overtakes_a_restore_frees_what_it_built(tmp_path: Path) -> None:
    await stored(tmp_path)
    tools = Tools(started=False)
    plane = control(tools, tmp_path)
    tools.hold()
    task = asyncio.create_task(plane.restore(restoring(tmp_path)))
    await building(tools)
    await plane.resume(m.ResumeRequest(**verb("input", cell_attempt=1)))
    for _ in range(2):
        tools.turnstile.release()
    assert await code(task) in ("invalid_phase", "stale_checkpoint")
    await settle()
    assert tools.values == {}


async def test_an_expired_restore_frees_every_session_before_the_next_one_builds(tmp_path: Path) -> None:
    await stored(tmp_path)
    tools = Tools(started=False)
    plane = control(tools, tmp_path)
    await plane.restore(restoring(tmp_path))
    await asyncio.sleep(61)
    assert (tools.values, tools.participant.survey().counts["sessions"]) == ({}, 0)
    await plane.restore(restoring(tmp_path, "again"))
    assert tools.values == {"s": 5, "o": 0}
    assert {"retire s", "retire o"} <= set(tools.log)


async def test_a_restore_waits_for_what_the_one_before_it_still_frees(tmp_path: Path) -> None:
    """Its sessions have the same names: freed late, the new ones would be gone."""
    await stored(tmp_path)
    tools = Tools(started=False)
    plane = control(tools, tmp_path)
    await plane.restore(restoring(tmp_path))
    tools.freeing = asyncio.Semaphore(0)
    await asyncio.sleep(61)
    again = asyncio.create_task(plane.restore(restoring(tmp_path, "again")))
    await asyncio.sleep(5)
    assert not again.done()
    for _ in range(2):
        tools.freeing.release()
    assert (await again).restored == ["o-a1", "r-a1"]
    await settle()
    assert tools.values == {"s": 5, "o": 0}


# ---- a commit that stops ----------------------------------------------------------------------------------


async def committed(tools: Tools, folder: Path, **fields: Any) -> ControlPlane:
    plane = control(tools, folder)
    await plane.prepare(m.PrepareRequest(**verb("cp")))
    await plane.commit(m.CommitRequest(**verb("cp", checkpoint_dir=str(folder), **fields)))
    return plane


async def test_sessions_are_parked_at_the_end_of_the_process_and_not_before(tmp_path: Path) -> None:
    tools = Tools()
    await tools.seed()
    plane = await committed(tools, tmp_path, stop=True)
    await asyncio.sleep(50)
    assert tools.parked == set()
    parking = plane.parking()
    assert parking is not None
    await parking
    assert tools.parked == {"s"}


async def test_a_resume_takes_parked_sessions_back_before_a_call_reaches_them(tmp_path: Path) -> None:
    tools = Tools()
    await tools.seed()
    plane = await committed(tools, tmp_path, stop=True)
    parking = plane.parking()
    assert parking is not None
    await parking
    tools.hold()
    await plane.resume(m.ResumeRequest(**verb("cp")))
    call = asyncio.create_task(tools.add())
    await settle()
    assert not call.done()
    for _ in range(2):
        tools.turnstile.release()
    assert await call == 1
    assert tools.parked == set()
    assert plane.parking() is None


async def test_an_expired_lease_takes_parked_sessions_back_too(tmp_path: Path) -> None:
    tools = Tools()
    await tools.seed()
    plane = await committed(tools, tmp_path, stop=True)
    parking = plane.parking()
    assert parking is not None
    await parking
    await asyncio.sleep(61)
    assert plane.status().phase == "idle"
    assert await tools.add() == 1


async def test_only_a_commit_that_stops_parks(tmp_path: Path) -> None:
    tools = Tools()
    await tools.seed()
    assert control(tools, tmp_path).parking() is None
    assert (await committed(tools, tmp_path, background=True)).parking() is None


async def test_a_process_ends_also_where_its_sessions_cannot_be_parked(tmp_path: Path) -> None:
    tools = Tools()
    await tools.seed()
    plane = await committed(tools, tmp_path, stop=True)
    tools.hold()
    parking = plane.parking()
    assert parking is not None
    began = now()
    await parking
    assert now() - began < 20
