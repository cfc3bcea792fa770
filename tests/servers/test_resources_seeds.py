"""The resources participant: seeds and closes, also such as come twice, late or beside each other."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gym_rig.alone import R0, R1, code
from gym_rig.tools import Tools, begun
from gym_rig.verbs import checkpoint, commit, prepare, ready, resume, start
from gym_rig.virtual import settle
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

# ---- seed --------------------------------------------------------------------------------------------------


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


# ---- seeds and closes that come twice or late --------------------------------------------------------------


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
