"""The environment participant: how long an episode may take, and how many run at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_rig.alone import R0, R1, code
from gym_rig.environments import Turn, at_stage, environment, parked, run
from gym_rig.verbs import checkpoint, prepare, restore, resume
from gym_rig.virtual import now, settle
from gym_servers.participants.environment import EnvironmentParticipant
from gym_servers.participants.gate import Gate
from gym_servers.participants.limits import Limits, OverLimit
from gym_servers.protocol.identity import Episode


async def timed_out(participant: EnvironmentParticipant, turn: Turn, running: asyncio.Task[Any]) -> float:
    """How long it still works before its limit ends it."""
    began = now()
    with pytest.raises(OverLimit):
        await running
    return now() - began


async def test_an_episode_over_its_limit_is_ended_after_its_cleanup() -> None:
    participant = environment(episode_timeout_seconds=100)
    turn = Turn(participant)
    turn.cleanup = asyncio.Event()
    running = run(participant, R0, turn)
    await asyncio.sleep(150)
    assert turn.log == ["replay", "cleanup"]
    turn.cleanup.set()
    with pytest.raises(OverLimit):
        await running
    assert participant.survey().counts["live"] == 0


async def test_the_limit_is_of_the_whole_episode_not_of_a_stage() -> None:
    participant = environment(episode_timeout_seconds=100)
    turn, running = await at_stage(participant, "replay")
    await asyncio.sleep(60)
    turn.ends["replay"].set()
    assert await timed_out(participant, turn, running) == pytest.approx(40, abs=0.1)


async def test_time_in_an_open_checkpoint_does_not_count_as_the_episodes_work() -> None:
    """Neither inside of a replay step, nor parked before a stage; and the clock goes on afterwards."""
    participant = environment(episode_timeout_seconds=100)
    turn, running = await at_stage(participant, "replay")
    await asyncio.sleep(30)
    prepare(participant)
    participant.closing(frozenset())  # a prepare that is repeated
    await asyncio.sleep(1000)
    assert not running.done()
    turn.ends["replay"].set()
    await asyncio.sleep(1000)
    resume(participant)
    assert await timed_out(participant, turn, running) == pytest.approx(70, abs=0.1)


async def test_what_is_left_of_the_limit_travels_with_the_boundary() -> None:
    first = environment(episode_timeout_seconds=100)
    _, running = await at_stage(first, "replay")
    await asyncio.sleep(30)
    records = await checkpoint(first)
    running.cancel()
    participant = environment(started=False, episode_timeout_seconds=100)
    restore(participant, records, "r")
    resume(participant, "restore")
    await asyncio.sleep(500)  # unclaimed: nothing works
    again = await checkpoint(participant)
    assert b'"remaining":70.0' in again["r-a1"]
    turn = Turn(participant)
    assert await timed_out(participant, turn, run(participant, R1, turn)) == pytest.approx(70, abs=0.1)


async def test_a_record_of_before_there_were_limits_has_all_of_its_time() -> None:
    records = {"r": b'{"digest":"d","format":1,"stage":"replay","state":{}}'}
    participant = environment(started=False, episode_timeout_seconds=100)
    restore(participant, records, "r")
    resume(participant, "restore")
    turn = Turn(participant)
    assert await timed_out(participant, turn, run(participant, R1, turn)) == pytest.approx(100, abs=0.1)


async def test_a_limit_also_holds_with_checkpointing_off() -> None:
    participant = EnvironmentParticipant(Gate(enabled=False, clock=now), limits=Limits(10))
    turn = Turn(participant)
    assert await timed_out(participant, turn, run(participant, R0, turn)) == pytest.approx(10, abs=0.1)


async def test_episodes_above_the_limit_queue_in_their_order() -> None:
    participant = environment(max_concurrent_episodes=1)
    turns = [Turn(participant) for _ in range(3)]
    running = [run(participant, Episode(f"r{n}", 0), turn) for n, turn in enumerate(turns)]
    await settle()
    assert [turn.log for turn in turns] == [["replay"], [], []]
    running[1].cancel()  # the caller leaves; its episode stays in the queue
    for turn in turns:
        for end in turn.ends.values():
            end.set()
    await asyncio.gather(running[0], running[2])
    assert [turn.log for turn in turns] == [["replay", "wait"]] * 3


async def test_a_queued_episode_holds_no_checkpoint_up_starts_over_and_does_not_begin_in_one() -> None:
    participant = environment(max_concurrent_episodes=1, queue_timeout_seconds=10)
    first, second = Turn(participant), Turn(participant)
    ahead = run(participant, R0, first)
    queued = run(participant, Episode("q", 0), second)
    await settle()
    assert prepare(participant)
    assert (participant.survey().episodes, participant.survey().restarts) == ({"r"}, {"q"})
    await asyncio.sleep(1000)  # the queue stands still too: no episode can end meanwhile
    assert not queued.done()
    ahead_ended = asyncio.create_task(participant.retire([R0]))
    await settle()
    assert (second.log, participant.survey().restarts) == ([], {"q"})
    resume(participant)
    await settle()
    assert second.log == ["replay"]
    await ahead_ended
    assert await code(ahead) == "stale_attempt"
    queued.cancel()


async def test_an_episode_that_queues_too_long_is_given_up_and_frees_nobodys_place() -> None:
    participant = environment(max_concurrent_episodes=1, queue_timeout_seconds=10)
    turn, running = await at_stage(participant, "replay")
    late = Turn(participant)
    began = now()
    with pytest.raises(OverLimit):
        await participant.run(Episode("q", 0), "d", late)
    assert now() - began == pytest.approx(10, abs=0.1)
    assert late.log == []
    for end in turn.ends.values():
        end.set()
    assert "result" in await running


async def test_a_retire_of_a_queued_episode_gives_its_turn_to_the_next() -> None:
    participant = environment(max_concurrent_episodes=1)
    turn, running = await at_stage(participant, "replay")
    second, third = Turn(participant), Turn(participant)
    queued = [run(participant, Episode(name, 0), one) for name, one in (("q", second), ("s", third))]
    await settle()
    await participant.retire([Episode("q", 0)])
    assert await code(queued[0]) == "stale_attempt"
    for end in (*turn.ends.values(), *third.ends.values()):
        end.set()
    await running
    assert "result" in await queued[1]
    assert second.log == []


async def test_a_restored_episode_does_not_queue_behind_new_ones() -> None:
    participant = environment(started=False, max_concurrent_episodes=1)
    restore(participant, await parked(), "r")
    resume(participant, "restore")
    new, old = Turn(participant), Turn(participant)
    running = [run(participant, Episode("new", 1), new), run(participant, R1, old)]
    await settle()
    assert old.log == ["replay"]
    for task in running:
        task.cancel()
