"""The ledgers of a process: bounded in memory, whole wherever they are, and gone when they are freed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from gym_rig.ledgers import HURTS, HeldReads, hurt, spilled
from gym_rig.verbs import checkpoint, prepare, restore, start
from gym_rig.virtual import now
from gym_servers.capture.arrays import float32, int32
from gym_servers.capture.ledger import CallRecord, Ledger, decode, encode
from gym_servers.capture.segments import SEGMENT_BYTES
from gym_servers.capture.store import LedgerStore
from gym_servers.capture.tokens import Span
from gym_servers.participants.base import Scope
from gym_servers.participants.gate import Gate
from gym_servers.participants.model import ModelParticipant
from gym_servers.participants.model_call import Asked, Call
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

TOKENS = 1000


def call(number: int, *, position: str | None = None, turn: str = "", parent: str = "") -> CallRecord:
    ids = int32([number] * TOKENS)
    where = f"1.{number}" if position is None else position
    logprobs = float32([number / 4] * TOKENS)
    return CallRecord(where, f"d{number}", int32([7]), ids, logprobs, (Span("w", 0, TOKENS),), {}, parent, turn)


async def filled(folder: Path, cache_bytes: int, keys: int = 4, calls: int = 5) -> LedgerStore:
    store = LedgerStore(cache_bytes, folder)
    for number in range(calls):
        for key in range(keys):
            store.append(f"r{key}", call(number))
    await spilled(store)
    return store


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_memory_is_bounded_and_nothing_is_lost_by_it(tmp_path: Path) -> None:
    bound = 5 * 4 * 2 * TOKENS
    store = await filled(tmp_path, bound)
    assert store.cached_bytes <= bound
    assert files(tmp_path)
    for key in range(4):
        assert await store.ledger(f"r{key}") == Ledger([call(number) for number in range(5)])
    await spilled(store)
    assert store.cached_bytes <= bound


async def test_within_the_bound_nothing_is_written_and_nothing_is_waited_for(tmp_path: Path) -> None:
    store = await filled(tmp_path, 10**9)
    assert files(tmp_path) == []
    reading = store.ledger("r1")
    with pytest.raises(StopIteration) as done:
        reading.send(None)
    assert len(done.value.value.calls) == 5


async def test_calls_are_found_wherever_their_tokens_are(tmp_path: Path) -> None:
    store = LedgerStore(0, tmp_path)
    store.append("r", call(1, position="", turn="after one"))
    store.append("r", call(2, turn="after two"))
    await asyncio.sleep(0.1)
    found = store.at("r", "1.2")
    assert found is not None
    assert await store.record(found) == call(2, turn="after two")
    assert store.at("r", "") is None
    assert store.at("r", "9.9") is None
    assert store.at("other", "1.2") is None
    parent = store.parent("r", ("before", "after one", "after two", "now"))
    assert parent is not None
    assert parent.position == "1.2"
    assert store.parent("r", ("nothing",)) is None


async def test_what_is_freed_leaves_no_file_also_while_it_is_written(tmp_path: Path) -> None:
    store = await filled(tmp_path, 0)
    store.append("late", call(9))
    store.drop("late")
    for key in list(store):
        store.drop(key)
    await spilled(store)
    assert files(tmp_path) == []
    assert (len(store), store.cached_bytes) == (0, 0)


async def test_no_file_stays_open_however_many_calls_were_written_and_read(tmp_path: Path) -> None:
    store = await filled(tmp_path, 0, keys=300, calls=2)
    assert len(files(tmp_path)) > 1
    assert still_open(tmp_path) == []
    for key in range(300):
        assert await store.ledger(f"r{key}") == Ledger([call(0), call(1)])
    await spilled(store)
    assert still_open(tmp_path) == []


def still_open(folder: Path) -> list[str]:
    """What this process has open below a folder, also where it is there no more."""
    found = []
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of this very look
            found.append(str(handle.readlink()))
    return [path for path in found if path.startswith(str(folder))]


async def test_files_hold_many_calls_and_go_with_the_last_of_them(tmp_path: Path) -> None:
    store = await filled(tmp_path, 0, keys=300, calls=2)
    size = len(encode("r0", Ledger([call(0)])))
    assert 1 < len(files(tmp_path)) <= 2 + 600 * size / SEGMENT_BYTES
    for key in range(299):
        store.drop(f"r{key}")
    assert 0 < len(files(tmp_path)) <= 2
    assert await store.ledger("r299") == Ledger([call(0), call(1)])
    store.drop("r299")
    assert files(tmp_path) == []


async def test_what_a_call_takes_in_memory_is_what_is_counted(tmp_path: Path) -> None:
    """Also a reply that brings its token ids along."""
    tokens = list(range(100_000, 100_000 + TOKENS))
    chat = {"choices": [{"message": {"content": "x" * 5000}}]}
    trained = {"output": [{"generation_token_ids": tokens, "prompt_token_ids": tokens * 20}]}
    store = LedgerStore(10**9, tmp_path)
    for number, response in enumerate((chat, trained)):
        one = call(number)
        record = CallRecord(one.position, one.digest, one.prompt_ids, one.ids, one.logprobs, one.spans, response)
        before = store.cached_bytes
        store.append("r", record)
        assert store.cached_bytes - before == len(encode("r", Ledger([record])))
    assert store.cached_bytes > 7 * 21 * TOKENS


async def test_a_file_that_was_changed_is_refused_and_one_that_is_gone_is_named(tmp_path: Path) -> None:
    store = await filled(tmp_path, 0, keys=1, calls=1)
    (kept,) = store.calls("r0")
    assert kept.place is not None
    path = kept.place.segment.path
    whole = path.read_bytes()
    for data in (whole[:-4], whole[:-4] + b"abcd"):
        path.write_bytes(data)
        with pytest.raises(ProtocolError, match="does not match its digest"):
            await store.record(kept)
    path.unlink()
    with pytest.raises(ProtocolError, match="cannot be read"):
        await store.record(kept)


READS: dict[str, Callable[[LedgerStore], Awaitable[Any]]] = {
    "ledger": lambda store: store.ledger("r0"),
    "record": lambda store: store.record(store.calls("r0")[0]),
}
FREES: dict[str, Callable[[LedgerStore], None]] = {
    "drop": lambda store: store.drop("r0"),
    "clear": LedgerStore.clear,
}


@pytest.mark.parametrize("free", FREES)
@pytest.mark.parametrize("read", READS)
async def test_what_is_freed_while_it_is_read_is_read_whole_and_then_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str, free: str
) -> None:
    """Its reader began before: it is no fault that nobody needs it any more."""
    store = await filled(tmp_path, 0, keys=1, calls=2)
    held = HeldReads(monkeypatch)
    reading = asyncio.ensure_future(READS[read](store))
    await held.begun()
    FREES[free](store)
    held.go_on()
    assert await reading == (Ledger([call(0), call(1)]) if read == "ledger" else call(0))
    assert files(tmp_path) == []
    assert await store.ledger("r0") == Ledger()


async def test_a_file_goes_also_where_its_reader_was_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await filled(tmp_path, 0, keys=1, calls=2)
    held = HeldReads(monkeypatch)
    reading = asyncio.ensure_future(store.ledger("r0"))
    await held.begun()
    store.drop("r0")
    assert files(tmp_path)
    reading.cancel()
    held.go_on()
    await asyncio.wait([reading])
    assert files(tmp_path) == []


async def test_what_cannot_be_written_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too much of it is better than a call that is lost."""

    def full(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    store = await filled(tmp_path, 0, keys=1, calls=2)
    assert await store.ledger("r0") == Ledger([call(0), call(1)])
    assert files(tmp_path) == []
    monkeypatch.undo()
    store.append("r0", call(2))
    await spilled(store)
    assert store.cached_bytes == 0
    assert await store.ledger("r0") == Ledger([call(0), call(1), call(2)])


async def test_memory_stays_bounded_where_the_folder_was_removed(tmp_path: Path) -> None:
    """As by whoever cleans temporary folders up."""
    store = await filled(tmp_path / "tmp", 0, keys=1, calls=1)
    shutil.rmtree(tmp_path / "tmp")
    store.append("r1", call(1))
    await spilled(store)
    assert store.cached_bytes == 0
    assert await store.ledger("r1") == Ledger([call(1)])
    (folder,) = (tmp_path / "tmp").iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def left_over(folder: Path) -> str:
    """The name of a folder whose process has ended, beside others."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for name in (f"gym-ledgers-{ended.pid}-x", f"gym-ledgers-{os.getppid()}-y", "gym-ledgers-no-pid", "other"):
        (folder / name).mkdir()
        (folder / name / "file").touch()
    return f"gym-ledgers-{ended.pid}-x"


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_what_a_killed_process_left_is_removed_by_the_next_and_what_a_living_one_has_is_not(
    tmp_path: Path,
) -> None:
    gone = left_over(tmp_path)
    await filled(tmp_path, 0, keys=1, calls=1)
    assert gone not in names(tmp_path)
    assert {f"gym-ledgers-{os.getppid()}-y", "gym-ledgers-no-pid", "other"} <= names(tmp_path)


async def test_what_an_earlier_process_of_the_same_number_left_is_removed_and_what_this_one_has_is_not(
    tmp_path: Path,
) -> None:
    """A container that was restarted has the folder of the one before, and its process the same number."""
    earlier = tmp_path / f"gym-ledgers-{os.getpid()}-z"
    earlier.mkdir()
    store = await filled(tmp_path, 0, keys=1, calls=1)
    assert not earlier.exists()
    await filled(tmp_path, 0, keys=1, calls=1)
    assert await store.ledger("r0") == Ledger([call(0)])


# ---- at a participant -------------------------------------------------------------------------------------


async def captured(folder: Path, *keys: str) -> ModelParticipant:
    """One that has two calls of each episode, all of them in files; each key's are in a file of their own."""
    store = LedgerStore(0, folder)
    participant = ModelParticipant(Gate(clock=now), store)
    start(participant)
    for key in keys:
        for number in range(2):
            store.append(key, call(number, turn=f"t{number}"))
        await spilled(store)
    return participant


@pytest.mark.parametrize("end", ["retire", "forget", "delete"])
async def test_a_manifest_that_is_freed_while_it_is_read_is_as_it_was_and_then_as_if_it_had_never_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    participant = await captured(tmp_path, "r")
    held = HeldReads(monkeypatch)
    reading = asyncio.ensure_future(participant.ledger("r"))
    await held.begun()
    if end == "retire":
        await participant.retire([Episode("r", 0)])
    elif end == "forget":
        participant.forget(["r"])
    else:
        assert participant.delete("r")
    held.go_on()
    ledger = await reading
    assert ledger is not None
    assert [one.position for one in ledger.calls] == ["1.0", "1.1"]
    assert await participant.ledger("r") is None
    assert files(tmp_path) == []


async def test_a_call_goes_on_without_its_parent_where_that_was_freed_before_it_began(tmp_path: Path) -> None:
    participant = await captured(tmp_path, "r")
    seen: list[Call] = []

    async def generate(running: Call) -> CallRecord:
        seen.append(running)
        return call(2)

    asked = participant.call(Episode("r", 0), Asked("1.2", "d2", ("t1",)), generate)
    going = asyncio.ensure_future(asked)
    await asyncio.sleep(0)
    assert len(participant._calls) == 1
    participant.delete("r")
    assert await going == call(2)
    assert seen[0].parent is None


def fresh() -> ModelParticipant:
    return ModelParticipant(Gate(clock=now))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("how", HURTS)
async def test_calls_that_are_lost_cost_their_own_rollout_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str, number: int
) -> None:
    """Every other is in the checkpoint; this one is a restart, and nothing can continue it by mistake."""
    participant = await captured(tmp_path, "r", "s", "t")
    assert hurt(participant._ledgers, participant._ledgers.calls("r")[number], how) == {"r"}
    records = await checkpoint(participant)
    assert participant.lost == {"r"}
    assert "r: captured calls are lost" in caplog.text
    assert participant.generations() == {"ledgers_lost": 1}
    for key in "st":
        assert [one.position for one in decode(key, records[key])[1].calls] == ["1.0", "1.1"]
    second = fresh()
    assert restore(second, records, "s", "t") == ["s-a1", "t-a1"]
    assert list(second._ledgers) == ["s-a1", "t-a1"]
    with pytest.raises(ProtocolError, match="r cannot be continued: captured calls are lost") as refused:
        restore(fresh(), records, "r", "s", "t")
    assert refused.value.code == "invalid_checkpoint_state"


async def test_a_file_of_several_costs_those_that_have_calls_in_it(tmp_path: Path) -> None:
    participant = await captured(tmp_path, "r")
    for number in range(2):
        for key in "st":
            participant._ledgers.append(key, call(number))
    await spilled(participant._ledgers)
    assert hurt(participant._ledgers, participant._ledgers.calls("s")[0], "removed") == {"s", "t"}
    records = await checkpoint(participant)
    assert participant.lost == {"s", "t"}
    assert restore(fresh(), records, "r") == ["r-a1"]


async def test_calls_that_are_out_of_scope_are_not_missed(tmp_path: Path) -> None:
    participant = await captured(tmp_path, "r", "s")
    hurt(participant._ledgers, participant._ledgers.calls("r")[0], "removed")
    assert list(await checkpoint(participant, "s")) == ["s"]
    assert participant.lost == frozenset()


async def test_what_can_be_read_again_is_continued_again(tmp_path: Path) -> None:
    participant = await captured(tmp_path, "r")
    place = participant._ledgers.calls("r")[0].place
    assert place is not None
    whole = place.segment.path.read_bytes()
    hurt(participant._ledgers, participant._ledgers.calls("r")[0], "cut")
    await checkpoint(participant)
    place.segment.path.write_bytes(whole)
    records = await checkpoint(participant)
    assert participant.lost == frozenset()
    assert restore(fresh(), records, "r") == ["r-a1"]


@pytest.mark.parametrize("lacks", [errno.EMFILE, errno.ENFILE, errno.ENOMEM])
async def test_what_the_process_lacks_for_a_moment_makes_nothing_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: int
) -> None:
    """All would be, at once: the commit is asked for again instead."""
    participant = await captured(tmp_path, "r", "s")
    assert prepare(participant)

    def short(self: Path, mode: str) -> Any:
        raise OSError(lacks, os.strerror(lacks))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", short)
        with pytest.raises(ProtocolError, match=os.strerror(lacks)) as refused:
            await participant.export(Scope(None))
    assert refused.value.code == "checkpoint_error"
    assert len(await participant.export(Scope(None))) == 2
    assert participant.lost == frozenset()
