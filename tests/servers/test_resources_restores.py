"""The resources participant: a restore builds all or nothing, and a commit that stops parks what it has frozen."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gym_rig.alone import R0, R1, code
from gym_rig.tools import Tools, begun
from gym_rig.verbs import checkpoint, restore_built, resume
from gym_rig.virtual import now, settle
from gym_servers.control.plane import ControlPlane
from gym_servers.control.writes import Author
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.manifest import CodeIdentity


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


# ---- restore -----------------------------------------------------------------------------------------------


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


# ---- what a restore builds ---------------------------------------------------------------------------------


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


# ---- a commit that stops -----------------------------------------------------------------------------------


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
