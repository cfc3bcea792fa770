"""What checkpoints leave behind goes where it is certain to be dead, and nothing else does."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_servers.storage.cells import CHECKPOINTS, PROPOSAL, directory_name, settle
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.leftovers import CUTS, given_up, remove_given_up, remove_staged, staged
from gym_servers.storage.manifest import CHECKPOINT, Publication

STACK = "stack-uid"
TOMBSTONE_ALONE = {CHECKPOINT}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / STACK / "cell-0"


def begun(root: Path, number: int, state: str | None, stack_uid: str = STACK) -> str:
    """A checkpoint with records, settled as given, or not at all; the name of its folder."""
    directory = directory_name(0, number, f"cp{number}")
    store = DirectoryStore(root / directory)
    store.create("model/policy/pack0000-abc", b"records")
    store.create("model/policy/manifest.json", b"{}")
    store.create(PROPOSAL, b"{}")
    if state is not None:
        document = Publication(
            state=state,
            checkpoint_id=f"cp{number}",
            name=f"cp{number}",
            stack_uid=stack_uid,
            cell=0,
            cell_attempt=0,
            sequence=number,
            created=float(number),
        )
        settle(store, document)
    return directory.removeprefix(f"{CHECKPOINTS}/")


def files(root: Path, directory: str) -> set[str]:
    return {path.name for path in (root / CHECKPOINTS / directory).rglob("*") if path.is_file()}


def test_of_what_was_given_up_the_tombstone_stays(root: Path) -> None:
    lost = begun(root, 1, "abandoned")
    store = DirectoryStore(root / CHECKPOINTS)
    found = given_up(store, STACK)
    assert {directory: grave.created for directory, grave in found.items()} == {lost: 1.0}
    assert remove_given_up(store, lost, STACK) == 3
    assert files(root, lost) == TOMBSTONE_ALONE
    assert given_up(store, STACK) == {}
    assert remove_given_up(store, lost, STACK) == 0


@pytest.mark.parametrize("what", ["published", "not settled", "of another stack", "unreadable", "gone"])
def test_nothing_else_goes(root: Path, what: str) -> None:
    states = {"published": "published", "not settled": None}
    kept = begun(root, 1, states.get(what, "abandoned"), "another" if what == "of another stack" else STACK)
    if what == "unreadable":
        (root / CHECKPOINTS / kept / CHECKPOINT).write_bytes(b'{"format":2}')
    if what == "gone":
        (root / CHECKPOINTS / kept / CHECKPOINT).unlink()
    before, store = files(root, kept), DirectoryStore(root / CHECKPOINTS)
    assert given_up(store, STACK) == {}
    assert remove_given_up(store, kept, STACK) == 0
    assert files(root, kept) == before


def test_staged_tokens_are_known_by_their_checkpoint(root: Path) -> None:
    store = DirectoryStore(root)
    for key in ("one/a", "one/b", "one-2/a"):
        store.create(f"{CUTS}/{key}", b"tokens")
    store.create(f"{CUTS}/loose", b"nobody's")
    assert staged(store) == {"one", "one-2"}
    assert remove_staged(store, "one") == 2
    assert set(store.list(CUTS)) == {f"{CUTS}/one-2/a", f"{CUTS}/loose"}
    assert remove_staged(store, "one") == 0
    assert staged(DirectoryStore(root / "nowhere")) == set()
