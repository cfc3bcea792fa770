"""The ledgers of a process: bounded in memory, whole wherever they are, and gone when they are freed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gym_rig.virtual import settle
from gym_servers.capture.arrays import float32, int32
from gym_servers.capture.ledger import CallRecord, Ledger
from gym_servers.capture.store import STRIPES, LedgerStore
from gym_servers.capture.tokens import Span
from gym_servers.protocol.errors import ProtocolError

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
    await settle()
    while store._spilling is not None:  # noqa: ASYNC110 - another's work
        await asyncio.sleep(0.01)
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
    while store._spilling is not None:  # noqa: ASYNC110 - another's work
        await asyncio.sleep(0.01)
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
    assert await store.record("r", found) == call(2, turn="after two")
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
    while store._spilling is not None:  # noqa: ASYNC110 - another's work
        await asyncio.sleep(0.01)
    assert files(tmp_path) == []
    assert (len(store), store.cached_bytes) == (0, 0)


async def test_a_file_that_was_changed_is_refused_and_one_that_is_gone_is_named(tmp_path: Path) -> None:
    store = await filled(tmp_path, 0, keys=1, calls=2)
    first, second = store.calls("r0")
    assert first.file is not None
    assert second.file is not None
    first.file.path.write_bytes(first.file.path.read_bytes()[:-4])
    second.file.path.unlink()
    with pytest.raises(ProtocolError, match="does not match its digest"):
        await store.record("r0", first)
    with pytest.raises(ProtocolError, match="cannot be read"):
        await store.record("r0", second)


async def test_a_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be written stays in memory: too much of it is better than a call that is lost."""

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    store = await filled(tmp_path, 0, keys=1, calls=2)
    assert await store.ledger("r0") == Ledger([call(0), call(1)])
    assert all(path.suffix == ".tmp" for path in files(tmp_path))


async def test_locks_do_not_grow_with_the_rollouts(tmp_path: Path) -> None:
    store = LedgerStore(0, tmp_path)
    for number in range(3 * STRIPES):
        store.append(f"r{number}", call(1))
    assert len(store._locks) == STRIPES
    ledgers = await asyncio.gather(*(store.ledger(f"r{number}") for number in range(3 * STRIPES)))
    assert all(ledger.calls == [call(1)] for ledger in ledgers)


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
