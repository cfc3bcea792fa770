"""The environment participant: where an episode stands at a checkpoint, and where it goes on after a restore."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gym_rig.alone import R0, R1, R2, code
from gym_rig.environments import Turn, at_stage, environment, parked, restored, run
from gym_rig.verbs import checkpoint, commit, prepare, ready, restore, resume
from gym_rig.virtual import settle
from gym_servers.participants.environment import EnvironmentParticipant, Live, Unclaimed
from gym_servers.participants.gate import Gate
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

# ---- boundaries --------------------------------------------------------------------------------------------


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


# ---- restore -----------------------------------------------------------------------------------------------


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
