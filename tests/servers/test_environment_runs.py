"""The environment participant: one run per episode, and a retire that ends it."""

from __future__ import annotations

import asyncio
import gc

import pytest

from gym_rig.alone import R0, R1, R2, Unseen, code
from gym_rig.environments import Turn, at_stage, environment, parked, restored, run
from gym_rig.verbs import checkpoint, prepare, restore, resume
from gym_rig.virtual import settle
from gym_servers.participants.answered import REMEMBERED_RESULTS
from gym_servers.participants.environment import Live, Unclaimed
from gym_servers.protocol.identity import Episode

# ---- one run per episode -----------------------------------------------------------------------------------


async def test_a_duplicate_joins_and_a_later_one_is_answered_again() -> None:
    participant = environment()
    turn, first = await at_stage(participant, "replay")
    second = run(participant, R0, turn)
    for end in turn.ends.values():
        end.set()
    assert await first == await second == await participant.run(R0, "d", turn)
    assert turn.log == ["replay", "wait"]


async def test_c17_an_episode_that_failed_is_not_answered_again_and_its_attempt_is_used_up() -> None:
    """Whoever waits for it gets the failure; whoever asks later has to use the next attempt."""
    participant = environment()
    turn, first = await at_stage(participant, "replay")
    second = run(participant, R0, turn)
    await settle()
    turn.error = ValueError("broken")
    turn.ends["replay"].set()
    for task in (first, second):
        with pytest.raises(ValueError, match="broken"):
            await task
    assert await code(participant.run(R0, "d", turn)) == "stale_attempt"
    assert turn.log == ["replay"]
    turn.error = None
    turn.ends["wait"].set()
    assert "result" in await participant.run(R1, "d", turn)


async def test_a_failure_that_nobody_waits_for_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    participant = environment()
    turn, running = await at_stage(participant, "replay")
    running.cancel()
    turn.error = ValueError("broken")
    turn.ends["replay"].set()
    await settle()
    assert participant.survey().counts["live"] == 0
    del turn, running
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_caller_that_leaves_does_not_end_the_episode() -> None:
    participant = environment()
    turn, first = await at_stage(participant, "replay")
    first.cancel()
    await settle()
    assert participant.survey().counts["live"] == 1
    second = run(participant, R0, turn)
    for end in turn.ends.values():
        end.set()
    assert (await second)["result"]["replay"] == 1


@pytest.mark.parametrize("when", ["live", "finished", "restored"])
async def test_another_task_under_the_same_episode_is_refused_and_disturbs_nothing(when: str) -> None:
    participant = environment()
    turn, first = await at_stage(participant, "replay")
    episode = R0
    if when == "restored":
        records = await checkpoint(participant)
        first.cancel()
        participant = environment(started=False)
        restore(participant, records, "r")
        resume(participant, "restore")
        turn.participant, episode = participant, R1
    elif when == "finished":
        for end in turn.ends.values():
            end.set()
        await first
    assert await code(participant.run(episode, "other", turn)) == "checkpoint_conflict"
    for end in turn.ends.values():
        end.set()
    assert "result" in await participant.run(episode, "d", turn)


async def test_a_refused_duplicate_of_another_attempt_does_not_disturb_the_live_one() -> None:
    participant = environment()
    turn, running = await at_stage(participant, "replay")
    prepare(participant)
    assert await code(participant.run(R1, "d", turn)) == "admission_closed"
    assert await code(participant.run(Episode("new", 0), "d", turn)) == "admission_closed"
    resume(participant)
    for end in turn.ends.values():
        end.set()
    assert "result" in await running


async def test_a_higher_attempt_retires_the_lower_one() -> None:
    participant = environment()
    turn, old = await at_stage(participant, "replay")
    new = Turn(participant)
    for end in new.ends.values():
        end.set()
    assert "result" in await participant.run(R1, "d", new)
    assert await code(old) == "stale_attempt"
    assert await code(participant.run(R0, "d", turn)) == "stale_attempt"


async def test_results_are_kept_up_to_a_bound_and_older_ones_are_never_run_again() -> None:
    participant = environment()

    async def body(live: Live, _: Unclaimed | None) -> str:
        return live.episode.key

    for number in range(REMEMBERED_RESULTS + 1):
        await participant.run(Episode(f"r{number}", 0), "d", body)
    assert await participant.run(Episode("r1", 0), "d", body) == "r1"
    assert await code(participant.run(Episode("r0", 0), "d", body)) == "stale_attempt"
    participant.forget(["r1"])
    assert "r1" not in [episode.rollout_id for episode, _, _ in participant._answered]


# ---- retire ------------------------------------------------------------------------------------------------


async def test_retire_ends_the_work_before_it_replies() -> None:
    participant = environment()
    _, running = await at_stage(participant, "wait")
    participant.gate.fence.mark("r", 0)
    await participant.retire([R0])
    assert participant.survey().counts["live"] == 0
    assert await code(running) == "stale_attempt"
    await participant.retire([R0])


@pytest.mark.parametrize("attempts", [(2, 0), (0, 2)])
async def test_a_retire_of_several_attempts_of_a_rollout_ends_the_highest_too(attempts: tuple[int, int]) -> None:
    participant = environment()
    running = run(participant, R2, Turn(participant))
    await settle()
    participant.gate.fence.mark("r", 2)
    await participant.retire([Episode("r", attempt) for attempt in attempts])
    assert participant.survey().counts["live"] == 0
    assert await code(running) == "stale_attempt"


async def test_cleanup_is_never_interrupted_and_retire_waits_for_it() -> None:
    participant = environment()
    turn = Turn(participant)
    turn.cleanup = asyncio.Event()
    running = run(participant, R0, turn)
    await settle()
    first = asyncio.create_task(participant.retire([R0]))
    await settle()
    second = asyncio.create_task(participant.retire([R0]))
    await asyncio.sleep(100)
    assert turn.log == ["replay", "cleanup"]
    assert not first.done()
    assert not second.done()
    turn.cleanup.set()
    await asyncio.gather(first, second)
    assert turn.log == ["replay", "cleanup", "cleaned"]
    assert await code(running) == "stale_attempt"


async def test_c12_an_episode_that_is_retired_during_its_last_cleanup_has_no_row_and_leaves_no_receipt() -> None:
    """Its stages are done: the cleanup is not interrupted, and what it would have answered is never handed out."""
    participant = environment()
    turn = Turn(participant)
    turn.cleanup = asyncio.Event()
    for end in turn.ends.values():
        end.set()
    running = run(participant, R0, turn)
    await settle()
    assert turn.log == ["replay", "wait", "cleanup"]
    participant.gate.fence.mark("r", 0)
    retiring = asyncio.create_task(participant.retire([R0]))
    await settle()
    assert not retiring.done()
    turn.cleanup.set()
    await retiring
    assert len(participant._answered) == 0
    assert await code(running) == "stale_attempt"
    assert await code(participant.run(R0, "d", turn)) == "stale_attempt"


async def test_an_episode_that_is_cancelled_before_its_first_step_does_not_stay_live() -> None:
    participant = environment()
    running = run(participant, R0, Turn(participant))
    retiring = asyncio.create_task(participant.retire([R0]))  # in the same turn of the event loop
    await asyncio.wait([running, retiring])
    assert await code(running) == "stale_attempt"
    assert participant.survey().counts["live"] == 0
    assert prepare(participant)


async def test_a_retire_of_an_unclaimed_record_frees_it() -> None:
    participant = restored(await parked(), "r")
    await participant.retire([R1])
    assert participant.survey().counts["unclaimed"] == 0


async def test_a_retire_costs_only_its_own_rollout() -> None:
    participant = environment()
    _, running = await at_stage(participant, "replay")
    other = Turn(participant)
    beside = run(participant, Episode("other", 0), other)
    await settle()
    await participant.retire([R0])
    for end in other.ends.values():
        end.set()
    assert "result" in await beside
    assert await code(running) == "stale_attempt"


@pytest.mark.parametrize("stage", ["replay", "wait"])
async def test_an_episode_that_is_cancelled_while_parked_leaves_nothing(stage: str) -> None:
    participant = environment()
    turn, running = await at_stage(participant, stage)
    prepare(participant)
    turn.ends["replay"].set()
    await settle()
    retiring = asyncio.create_task(participant.retire([R0]))
    await settle()
    assert retiring.done()
    assert participant.survey().ready
    assert participant.survey().episodes == set()
    resume(participant)
    assert await code(running) == "stale_attempt"


async def test_a_retire_and_a_new_attempt_look_at_their_own_rollout_alone() -> None:
    participant = environment()
    turns = [Turn(participant) for _ in range(3)]
    running = [run(participant, Episode(f"r{n}", 0), turn) for n, turn in enumerate(turns)]
    await settle()
    participant._live, participant._by_rollout = Unseen(participant._live), Unseen(participant._by_rollout)
    await participant.retire([Episode("r0", 0)])
    again = run(participant, Episode("r1", 1), turns[1])
    assert [await code(task) for task in running[:2]] == ["stale_attempt"] * 2
    assert len(participant._live) == 2
    for task in (running[2], again):
        task.cancel()


async def test_a_retired_episode_leaves_no_receipt() -> None:
    participant = environment()
    turn, running = await at_stage(participant, "replay")
    for end in turn.ends.values():
        end.set()
    await running
    participant.gate.fence.mark("r", 0)
    await participant.retire([R0])
    assert len(participant._answered) == 0
    assert await code(participant.run(R0, "d", turn)) == "stale_attempt"
