"""When a server ends that was told to: never before a last checkpoint that may still come, nor long after it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gym_rig.stub import CODE, Stub
from gym_rig.virtual import now
from gym_servers import serve
from gym_servers.control.departure import AWAITED_SECONDS, Departure
from gym_servers.control.plane import ControlPlane
from gym_servers.control.writes import Author
from gym_servers.participants.gate import Gate
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.locate import open_store

GRACE = 60.0


class Process:
    """One server, in the phase that it has come to; `parked` counts how often its sessions were."""

    def __init__(self, folder: Path, *, patient: bool = True) -> None:
        self.wall = asyncio.get_running_loop().time
        self.participant = Stub(Gate(clock=self.wall))
        self.parked = 0
        self.participant.park = self._park  # type: ignore[method-assign]
        author = Author("agent", "agent", "session", CODE)
        self.plane = ControlPlane(self.participant, author, open_store, grace=GRACE, wall=self.wall)
        self.departure = Departure(self.plane, patient=patient)
        self.folder = folder

    async def _park(self) -> None:
        await asyncio.sleep(1)
        self.parked += 1

    def verb(self, id: str = "cp", **fields: Any) -> dict[str, Any]:
        return {"checkpoint_id": id, "deadline_ts": self.wall() + 30, **fields}

    async def in_service(self) -> Process:
        await self.plane.resume(m.ResumeRequest(**self.verb("start", cell_attempt=0)))
        return self

    async def prepare(self, id: str = "cp") -> None:
        await self.plane.prepare(m.PrepareRequest(**self.verb(id)))

    async def commit(self, id: str = "cp", **fields: Any) -> None:
        folder = str(self.folder / id)
        await self.plane.commit(m.CommitRequest(**self.verb(id, checkpoint_dir=folder, **fields)))

    async def resume(self, id: str = "cp") -> None:
        await self.plane.resume(m.ResumeRequest(**self.verb(id)))

    def dismiss(self, session: str = "session") -> None:
        self.plane.end(m.EndRequest(**self.verb("end", session=session)))

    def told(self) -> asyncio.Task[None] | None:
        waits = self.departure.told()
        return None if waits is None else asyncio.ensure_future(waits)


async def seconds_of(ending: asyncio.Task[None] | None) -> float:
    assert ending is not None
    began = now()
    await ending
    return now() - began


async def test_nothing_is_waited_for_where_whoever_ends_it_leaves_no_time(tmp_path: Path) -> None:
    assert (await Process(tmp_path, patient=False).in_service()).told() is None


async def test_a_process_that_is_not_in_service_yet_has_nothing_to_wait_for(tmp_path: Path) -> None:
    assert Process(tmp_path).told() is None


async def test_a_checkpoint_that_does_not_come_is_not_waited_for_long(tmp_path: Path) -> None:
    process = await Process(tmp_path).in_service()
    assert await seconds_of(process.told()) == AWAITED_SECONDS


async def test_it_stays_until_the_last_checkpoint_has_been_published_and_it_is_dismissed(tmp_path: Path) -> None:
    process = await Process(tmp_path).in_service()
    ending = process.told()
    await asyncio.sleep(AWAITED_SECONDS - 1)
    await process.prepare()
    await process.commit(stop=True)
    await asyncio.sleep(GRACE - 5)
    assert ending is not None and not ending.done()
    assert process.parked == 1, "it is about to end: its sessions outlive it"
    process.dismiss()
    assert await seconds_of(ending) < 0.1
    assert process.parked == 1


async def test_a_checkpoint_of_somebody_else_is_let_end_and_the_last_one_may_follow(tmp_path: Path) -> None:
    process = await Process(tmp_path).in_service()
    await process.prepare("theirs")
    ending = process.told()
    await process.commit("theirs", background=True)
    await process.resume("theirs")
    await asyncio.sleep(AWAITED_SECONDS - 1)
    await process.prepare("last")
    await asyncio.sleep(20)
    await process.commit("last", stop=True)
    assert ending is not None and not ending.done()
    process.dismiss()
    await ending


async def test_a_last_checkpoint_that_fails_takes_the_parked_sessions_back(tmp_path: Path) -> None:
    process = await Process(tmp_path).in_service()
    unparked = []
    process.participant.unpark = lambda: unparked.append(now())  # type: ignore[method-assign]
    ending = process.told()
    await process.prepare()
    await process.commit(stop=True)
    await asyncio.sleep(2)
    await process.resume()
    assert len(unparked) == process.parked == 1
    assert await seconds_of(ending) == AWAITED_SECONDS


async def test_without_a_coordinator_it_ends_when_its_lease_has(tmp_path: Path) -> None:
    process = await Process(tmp_path).in_service()
    ending = process.told()
    await process.prepare()
    await process.commit(stop=True)
    assert await seconds_of(ending) == pytest.approx(GRACE + AWAITED_SECONDS, abs=1)


async def test_one_that_was_dismissed_before_ends_at_once(tmp_path: Path) -> None:
    process = await Process(tmp_path).in_service()
    process.dismiss()
    assert process.told() is None


async def test_a_process_that_is_told_twice_ends_at_once(tmp_path: Path) -> None:
    process = await Process(tmp_path).in_service()
    first = process.told()
    assert first is not None
    assert process.told() is None
    first.cancel()


async def test_what_a_commit_has_stopped_already_only_parks_its_sessions(tmp_path: Path) -> None:
    process = await Process(tmp_path).in_service()
    await process.prepare()
    await process.commit(stop=True)
    assert await seconds_of(process.told()) == 1
    assert process.parked == 1


async def test_only_the_process_that_is_meant_is_dismissed(tmp_path: Path) -> None:
    process = await Process(tmp_path).in_service()
    with pytest.raises(ProtocolError, match="this is session"):
        process.dismiss("another")
    assert process.told() is not None


async def test_the_process_is_gone_when_nothing_is_left_to_wait_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process, ended = await Process(tmp_path).in_service(), list[float]()
    monkeypatch.setattr(serve.os, "_exit", lambda code: ended.append(now()))
    serve._end(SimpleNamespace(ending=process.departure.told))  # type: ignore[arg-type]
    await asyncio.sleep(AWAITED_SECONDS - 1)
    assert not ended
    process.dismiss()
    await asyncio.sleep(0.1)
    assert len(ended) == 1
