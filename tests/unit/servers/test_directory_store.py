"""A directory as an object store: one writer wins, the same bytes are a success, nothing leaves the folder."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gym_servers.protocol.digests import sha256
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.locate import join, open_store
from gym_servers.storage.store import ObjectConflict, ObjectMissing, StorageError

WRITERS = 12


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


def race(store: DirectoryStore, contents: list[bytes]) -> list[bool]:
    """Create one key from many threads at once; who was told that it stands."""
    barrier = threading.Barrier(len(contents))

    def create(data: bytes) -> bool:
        barrier.wait()
        try:
            store.create("a/b/key", data)
            return True
        except ObjectConflict:
            return False

    with ThreadPoolExecutor(len(contents)) as pool:
        return list(pool.map(create, contents))


def test_of_many_writers_of_different_bytes_exactly_one_wins(store: DirectoryStore) -> None:
    for round_ in range(10):
        path = Path(store.uri) / "a/b/key"
        path.unlink(missing_ok=True)
        contents = [f"{round_}-{number}".encode() * 500 for number in range(WRITERS)]
        won = race(store, contents)
        assert won.count(True) == 1
        assert store.get("a/b/key") == contents[won.index(True)]


def test_the_same_bytes_again_are_a_success_for_everybody(store: DirectoryStore) -> None:
    assert all(race(store, [b"same"] * WRITERS))
    store.create("a/b/key", b"same")
    with pytest.raises(ObjectConflict):
        store.create("a/b/key", b"other")
    assert store.get("a/b/key") == b"same"


def test_no_temporary_file_is_left_or_listed(store: DirectoryStore) -> None:
    race(store, [b"x", b"y", b"x"])
    store.replace("hint", b"1")
    store.replace("hint", b"2")
    assert sorted(p.name for p in Path(store.uri).rglob("*") if p.is_file()) == ["hint", "key"]
    assert store.list("") == {"a/b/key": 1, "hint": 1}
    (Path(store.uri) / "a" / ".tmp-crashed").write_bytes(b"half")
    assert store.list("a") == {"a/b/key": 1}


def test_a_write_that_fails_leaves_nothing(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    store.create("first", b"1")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        store.create("second", b"22")
    with pytest.raises(StorageError, match="No space left"):
        store.replace("first", b"22")
    monkeypatch.undo()
    assert [p.name for p in Path(store.uri).rglob("*")] == ["first"]
    assert store.get("first") == b"1"


def test_a_missing_object_and_an_empty_store_are_told_apart_from_faults(store: DirectoryStore) -> None:
    assert store.list("") == {}
    assert store.list("none") == {}
    with pytest.raises(ObjectMissing):
        store.get("none")


@pytest.mark.parametrize("key", ["../outside", "a/../../outside", "/etc/passwd"])
def test_a_key_cannot_leave_the_store(store: DirectoryStore, key: str) -> None:
    uses: list[Callable[[], object]] = [
        lambda: store.create(key, b""),
        lambda: store.get(key),
        lambda: store.replace(key, b""),
        lambda: store.list(key),
    ]
    for use in uses:
        with pytest.raises(StorageError, match="leaves the store"):
            use()


def test_a_place_that_cannot_be_used_says_what_to_check(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = DirectoryStore(tmp_path / "file")
    for use in (lambda: store.create("a", b""), lambda: store.replace("a", b"")):
        with pytest.raises(StorageError, match="check its permissions"):
            use()
    (tmp_path / "dir" / "key").mkdir(parents=True)
    with pytest.raises(StorageError, match="cannot use"):
        DirectoryStore(tmp_path / "dir").get("key")


def test_uris(tmp_path: Path) -> None:
    assert open_store(f"file://{tmp_path}").uri == str(tmp_path)
    assert open_store(str(tmp_path)).uri == str(tmp_path)
    assert join("s3://bucket/prefix/", "a", "b") == "s3://bucket/prefix/a/b"
    for uri in ("gs://bucket/x", "http://host/x"):
        with pytest.raises(StorageError, match="s3://bucket/prefix"):
            open_store(uri)
    with pytest.raises(StorageError, match="names no bucket"):
        open_store("s3:///x")


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("where", ["store", "b", "key"])
def test_a_listing_that_cannot_be_read_to_its_end_is_an_error_and_no_shorter_listing(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    """At its root, in a folder below, and at a file: whoever takes it for whole would begin a run anew."""
    store.create("a/b/key", b"1")
    scandir, stat = os.scandir, Path.stat

    def fails(path: object) -> None:
        if Path(str(path)).name == where:
            raise OSError(number, os.strerror(number))

    def failing_scandir(path: Any = ".") -> Any:
        fails(path)
        return scandir(path)

    def failing_stat(self: Path, **options: Any) -> Any:
        fails(self)
        return stat(self, **options)

    monkeypatch.setattr(os, "scandir", failing_scandir)
    monkeypatch.setattr(Path, "stat", failing_stat)
    for prefix in ("", "a"):
        if where == "store" and prefix:
            continue
        with pytest.raises(StorageError, match=os.strerror(number)):
            store.list(prefix)


def test_what_vanishes_while_it_is_listed_is_left_out(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.create("a/one", b"1")
    store.create("b/two", b"22")
    stat = Path.stat

    def gone(self: Path, **options: Any) -> Any:
        if self.name == "one":
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return stat(self, **options)

    monkeypatch.setattr(Path, "stat", gone)
    assert store.list("") == {"b/two": 2}


@pytest.mark.parametrize("size", [0, 1, 3_000_000])
def test_a_fingerprint_is_of_the_whole_object(store: DirectoryStore, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    store.create("a/key", data[:size])
    assert store.fingerprint("a/key") == (size, sha256(data[:size]))
    with pytest.raises(ObjectMissing):
        store.fingerprint("a/other")
    with pytest.raises(StorageError, match="cannot use"):
        store.fingerprint("a")
