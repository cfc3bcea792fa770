"""The resources participant: effects happen once, a lost session is an error, and nothing is half done at a cut."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gym_rig.alone import R0, R1, R2, code
from gym_rig.tools import Tools
from gym_rig.verbs import checkpoint, commit, prepare, ready, restore_built, resume
from gym_rig.virtual import settle
from gym_servers.participants.gate import Gate
from gym_servers.participants.tool_sessions import ToolSession
from gym_servers.protocol.identity import Episode

# ---- effects -----------------------------------------------------------------------------------------------


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


# ---- who may call ------------------------------------------------------------------------------------------


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


# ---- checkpoints -------------------------------------------------------------------------------------------


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
