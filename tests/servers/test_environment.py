"""The environment participant: stages, boundaries, and who owns an episode."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable
from typing import Any

import pytest

from gym_rig.verbs import checkpoint, commit, prepare, ready, restore, resume, start
from gym_rig.virtual import now, settle
from gym_servers.participants.answered import REMEMBERED_RESULTS
from gym_servers.participants.environment import EnvironmentParticipant, Live, Unclaimed
from gym_servers.participants.gate import Gate
from gym_servers.participants.limits import Limits, OverLimit
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

R0, R1, R2 = (Episode("r", attempt) for attempt in range(3))


class Turn:
    """A body of two stages whose steps a test ends: `replay`, then `wait`."""

    def __init__(self, participant: EnvironmentParticipant) -> None:
        self.participant = participant
        self.log: list[str] = []
        self.ends = {"replay": asyncio.Event(), "wait": asyncio.Event()}
        self.error: Exception | None = None
        self.cleanup: asyncio.Event | None = None

    async def __call__(self, live: Live, restored: Unclaimed | None) -> Any:
        state = dict(restored.state) if restored else {}
        stages = ["replay", "wait"]
        try:
            async with self.participant.slot(live):
                return await self._stages(live, restored, stages, state)
        finally:
            if self.cleanup is not None:
                live.cleaning = True
                self.log.append("cleanup")
                await asyncio.shield(asyncio.ensure_future(self.cleanup.wait()))
                self.log.append("cleaned")

    async def _stages(
        self, live: Live, restored: Unclaimed | None, stages: list[str], state: dict[str, Any]
    ) -> dict[str, Any]:
        for stage in stages[stages.index(restored.stage) if restored else 0 :]:
            state = {**state, **await self._stage(live, stage, state)}
        return {"result": state}

    async def _stage(self, live: Live, stage: str, state: dict[str, Any]) -> dict[str, Any]:
        async def step() -> dict[str, Any]:
            self.log.append(stage)
            await self.ends[stage].wait()
            if self.error is not None:
                raise self.error
            return {stage: len(self.log)}

        return await self.participant.stage(
            live, stage, replay=stage == "replay", snapshot=lambda: dict(state), step=step
        )


def environment(*, started: bool = True, boundaries: bool = True, **limits: Any) -> EnvironmentParticipant:
    participant = EnvironmentParticipant(Gate(clock=now), boundaries=boundaries, limits=Limits(**limits))
    if started:
        start(participant)
    return participant


def run(participant: EnvironmentParticipant, episode: Episode, body: Any, digest: str = "d") -> asyncio.Task[Any]:
    return asyncio.create_task(participant.run(episode, digest, body))


async def code(call: Awaitable[Any]) -> str:
    with pytest.raises(ProtocolError) as refused:
        await call
    return refused.value.code


async def at_stage(participant: EnvironmentParticipant, stage: str) -> tuple[Turn, asyncio.Task[Any]]:
    turn = Turn(participant)
    running = run(participant, R0, turn)
    await settle()
    if stage == "wait":
        turn.ends["replay"].set()
        await settle()
    return turn, running


# ---- boundaries -------------------------------------------------------------------------------------------


async def test_a_replay_step_does_not_hold_a_checkpoint_up_and_its_result_is_held() -> None:
    participant = environment()
    turn, running = await at_stage(participant, "replay")
    assert prepare(participant)
    turn.ends["replay"].set()
    await settle()
    assert turn.log == ["replay"]
    survey = participant.survey()
    assert (survey.ready, survey.episodes, survey.restarts) == (True, {"r"}, frozenset())
    records = await commit(participant)
    assert b'"stage":"replay"' in records["r"]
    resume(participant)
    await settle()
    assert turn.log == ["replay", "wait"]
    turn.ends["wait"].set()
    assert await running == {"result": {"replay": 1, "wait": 2}}


async def test_a_wait_step_holds_a_checkpoint_up_until_it_is_done() -> None:
    participant = environment()
    turn, running = await at_stage(participant, "wait")
    assert not prepare(participant)
    assert [(b.id, b.where) for b in participant.survey().blockers] == [("r", "wait")]
    await asyncio.sleep(5)
    assert participant.survey().blockers[0].age_seconds == pytest.approx(5, abs=0.1)
    turn.ends["wait"].set()
    await running
    assert ready(participant)


async def test_a_stage_that_would_begin_while_a_checkpoint_is_open_parks_at_its_boundary() -> None:
    participant = environment()
    assert prepare(participant)
    resume(participant)
    turn = Turn(participant)
    running = run(participant, R0, turn)
    await asyncio.sleep(0)
    assert not prepare(participant, "second")  # admitted, and not at its first boundary yet
    await settle()
    assert ready(participant)
    assert turn.log == []
    assert participant.survey().episodes == {"r"}
    resume(participant, "second")
    for end in turn.ends.values():
        end.set()
    await running


async def test_a_replay_step_that_fails_while_a_checkpoint_is_open_leaves_the_restorable_set() -> None:
    participant = environment()
    turn, running = await at_stage(participant, "replay")
    assert prepare(participant)
    turn.error = ValueError("failed")
    turn.ends["replay"].set()
    await settle()
    survey = participant.survey()
    assert (survey.ready, survey.episodes, survey.restarts) == (True, set(), {"r"})
    assert await commit(participant, "r") == {}
    assert not running.done()
    resume(participant)
    with pytest.raises(ValueError, match="failed"):
        await running


async def test_a_replay_step_that_fails_outside_of_a_checkpoint_fails_at_once() -> None:
    participant = environment()
    turn, running = await at_stage(participant, "replay")
    turn.error = ValueError("failed")
    turn.ends["replay"].set()
    with pytest.raises(ValueError, match="failed"):
        await running
    assert participant.survey().counts["live"] == 0


async def test_a_quick_resume_and_prepare_keep_it_parked_for_the_new_checkpoint() -> None:
    participant = environment()
    turn, running = await at_stage(participant, "replay")
    assert prepare(participant)
    turn.ends["replay"].set()
    await settle()
    resume(participant)
    assert prepare(participant, "second")
    await settle()
    assert turn.log == ["replay"]
    resume(participant, "second")
    await settle()
    assert turn.log == ["replay", "wait"]
    running.cancel()


async def test_a_restart_only_episode_is_reported_and_never_in_the_way() -> None:
    participant = environment()

    async def body(live: Live, _: Unclaimed | None) -> Any:
        participant.restart_only(live)
        step = asyncio.get_running_loop().create_future
        return await participant.stage(live, "wait", replay=False, snapshot=dict, step=lambda: step())  # type: ignore[arg-type]

    running = run(participant, R0, body)
    await settle()
    assert prepare(participant)
    assert (participant.survey().restarts, participant.survey().episodes) == ({"r"}, set())
    assert await commit(participant) == {}
    running.cancel()


async def test_with_checkpointing_off_no_payload_is_built_and_nothing_is_kept() -> None:
    participant = EnvironmentParticipant(Gate(enabled=False))

    def never() -> dict[str, Any]:
        raise AssertionError("a snapshot was built")

    async def body(live: Live, _: Unclaimed | None) -> Any:
        async def step() -> str:
            return "done"

        return await participant.stage(live, "s", replay=True, snapshot=never, step=step)

    assert await participant.run(R0, "d", body) == "done"
    assert await participant.run(R0, "d", body) == "done"
    assert participant.survey().counts == {"live": 0, "unclaimed": 0}


# ---- one run per episode ----------------------------------------------------------------------------------


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


# ---- restore ----------------------------------------------------------------------------------------------


async def parked(stage: str = "replay") -> dict[str, bytes]:
    """The records of an environment with one episode at a stage."""
    participant = environment()
    turn, running = await at_stage(participant, "replay")
    if stage == "wait":
        prepare(participant)
        resume(participant)
    records = await checkpoint(participant)
    running.cancel()
    turn.log.clear()
    return records


def restored(records: dict[str, bytes], *keys: str, cell_attempt: int = 1) -> EnvironmentParticipant:
    participant = environment(started=False)
    restore(participant, records, *keys, cell_attempt=cell_attempt)
    return participant


async def test_a_restored_boundary_waits_for_its_run_and_never_starts_by_itself() -> None:
    participant = restored(await parked(), "r")
    resume(participant, "restore")
    await asyncio.sleep(1000)
    assert participant.survey().counts == {"live": 0, "unclaimed": 1}
    turn = Turn(participant)
    for end in turn.ends.values():
        end.set()
    assert "result" in await participant.run(R1, "d", turn)
    assert participant.survey().counts["unclaimed"] == 0


async def test_a_run_before_the_resume_is_told_to_come_again() -> None:
    participant = restored(await parked(), "r")
    assert await code(participant.run(R1, "d", Turn(participant))) == "admission_closed"
    assert participant.survey().counts["unclaimed"] == 1


@pytest.mark.parametrize("episode", [R0, R1])
async def test_a_run_under_a_replaced_attempt_is_stale(episode: Episode) -> None:
    participant = restored(await parked(), "r", cell_attempt=2)
    resume(participant, "restore")
    assert await code(participant.run(episode, "d", Turn(participant))) == "stale_attempt"
    assert participant.survey().counts == {"live": 0, "unclaimed": 1}


async def test_an_unclaimed_record_is_exported_again_and_survives_a_second_crash() -> None:
    records = await parked()
    first = restored(records, "r")
    resume(first, "restore")
    again = await checkpoint(first)
    assert set(again) == {"r-a1"}
    second = restored(again, "r-a1", cell_attempt=2)
    resume(second, "restore")
    turn = Turn(second)
    for end in turn.ends.values():
        end.set()
    assert "result" in await second.run(R2, "d", turn)


async def test_its_replacement_is_admitted_to_a_later_checkpoint_and_parks() -> None:
    participant = restored(await parked(), "r")
    resume(participant, "restore")
    assert prepare(participant)
    turn = Turn(participant)
    running = run(participant, R1, turn)
    assert participant.survey().ready  # at no moment in between does it block
    await settle()
    assert turn.log == []
    assert participant.survey().ready
    assert participant.survey().episodes == {"r-a1"}
    assert set(await commit(participant)) == {"r-a1"}
    resume(participant)
    await settle()
    assert turn.log == ["replay"]
    running.cancel()


async def test_a_start_over_drops_the_unclaimed_record() -> None:
    participant = restored(await parked(), "r")
    resume(participant, "restore")
    turn = Turn(participant)
    for end in turn.ends.values():
        end.set()
    assert "result" in await participant.run(R2, "d", turn)
    assert participant.survey().counts["unclaimed"] == 0


@pytest.mark.parametrize(
    "damage", [b"", b"{}", b'{"format":1}', b'{"format":1,"digest":"d","stage":"s","state":3}', b"[1]"]
)
async def test_a_record_that_cannot_be_read_is_named(damage: bytes) -> None:
    participant = environment(started=False)
    with pytest.raises(ProtocolError, match="record r") as refused:
        restore(participant, {"r": damage}, "r")
    assert refused.value.code == "invalid_checkpoint_state"


async def test_restore_is_all_or_nothing() -> None:
    records = await parked()
    participant = environment(started=False)
    with pytest.raises(ProtocolError, match="no record of"):
        restore(participant, records, "r", "missing")
    assert participant.survey().counts["unclaimed"] == 0
    restore(participant, records, "r")
    participant.uninstall()
    assert participant.survey().counts["unclaimed"] == 0


# ---- retire -----------------------------------------------------------------------------------------------


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


# ---- limits -----------------------------------------------------------------------------------------------


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


async def test_without_boundaries_every_episode_is_a_restart() -> None:
    participant = environment(boundaries=False)
    for stage in ("replay", "wait"):
        _, running = await at_stage(participant, stage)
        assert prepare(participant)
        assert (participant.survey().restarts, participant.survey().episodes) == ({"r"}, set())
        assert await commit(participant) == {}
        resume(participant)
        await participant.retire([R0])
        await asyncio.wait([running])
        participant.gate.fence.forget("r")


class Unseen(dict[Any, Any]):
    """A table that may be asked for a key, and not be walked over."""

    def _walked(self) -> Any:
        raise AssertionError("the whole table was walked over")

    __iter__ = items = values = keys = _walked  # type: ignore[assignment]


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
