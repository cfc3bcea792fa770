"""Removing a checkpoint's data: all of its hold, in an order that is safe to be interrupted in, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gym_servers.protocol.digests import sha256
from gym_servers.storage.cells import CHECKPOINTS, PROPOSAL, directory_name, settle
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.manifest import (
    CHECKPOINT,
    MANIFEST,
    CodeIdentity,
    Manifest,
    Member,
    PackEntry,
    Publication,
    RecordEntry,
)
from gym_servers.storage.packs import pack_records, write_records
from gym_servers.storage.removal import HOLDER, Claim, NotOurs, Removed, hold, remove
from gym_servers.storage.store import ObjectConflict, StorageError

CODE = CodeIdentity(image="i", server="counter", config_digest="c", record_format=1)
STACK = "stack-uid"
MINE = "gckpt-uid"


class Recording(DirectoryStore):
    """Writes nothing, remembers what it has removed, and fails after so many removals."""

    def __init__(self, root: Path, fails_after: int | None = None) -> None:
        super().__init__(root)
        self.removed: list[str] = []
        self._left = fails_after

    def create(self, key: str, data: bytes) -> None:
        raise AssertionError("a removal writes nothing")

    replace = create

    def delete(self, key: str) -> None:
        if self._left is not None and len(self.removed) >= self._left:
            raise StorageError("the bucket does not answer")
        self.removed.append(key)
        super().delete(key)


def publication(number: int, state: str = "published") -> Publication:
    return Publication(
        state=state,
        checkpoint_id=f"cp{number}",
        name=f"cp{number}",
        stack_uid=STACK,
        cell=0,
        cell_attempt=0,
        sequence=number,
        created=1.0,
    )


def written(cell: Path, number: int, *, shares: str | None = None) -> tuple[str, Publication]:
    """A checkpoint with the records of two participants, not settled yet: its directory, and what it publishes."""
    wanted = publication(number)
    directory = directory_name(0, number, wanted.checkpoint_id)
    store, members = DirectoryStore(cell / directory), []
    for instance in ("a", "b"):

        def manifest(packs: list[PackEntry], records: list[RecordEntry], instance: str = instance) -> Manifest:
            others = [PackEntry(key=shares, size=4, sha256="x")] if shares else []
            return Manifest(
                checkpoint_id=wanted.checkpoint_id,
                kind="model",
                instance=instance,
                session="s",
                code=CODE,
                episodes=[],
                packs=[*packs, *others],
                records=records,
            )

        packs = pack_records(f"model/{instance}", {"r": f"{instance}{number}".encode()})
        digest = write_records(store, f"model/{instance}", packs, manifest)
        member = Member(
            kind="model", instance=instance, session="s", manifest_digest=digest, records=1, bytes=4, code=CODE
        )
        members.append(member)
    full = wanted.model_copy(update={"members": members})
    store.create(PROPOSAL, full.to_bytes())
    return directory.removeprefix(f"{CHECKPOINTS}/"), full


def published(cell: Path, number: int = 1, holder: str | None = MINE, **more: str) -> tuple[str, Claim]:
    directory, full = written(cell, number, **more)
    store = DirectoryStore(cell / CHECKPOINTS / directory)
    if holder is not None:
        hold(store, holder)
    settle(store, full)
    return directory, Claim(STACK, f"cp{number}", sha256(full.to_bytes()), MINE)


@pytest.fixture
def cell(tmp_path: Path) -> Path:
    return tmp_path / STACK / "cell-0"


def files(cell: Path, directory: str = "") -> set[str]:
    return {path.name for path in (cell / CHECKPOINTS / directory).rglob("*") if path.is_file()}


def test_everything_goes_in_an_order_that_is_safe(cell: Path) -> None:
    directory, claim = published(cell)
    above = Recording(cell / CHECKPOINTS)
    assert remove(above, directory, claim) == Removed(7)
    assert files(cell) == set()
    kinds = [key.rsplit("/", 1)[1].partition("-")[0] for key in above.removed]
    assert kinds[0] == CHECKPOINT
    assert set(kinds[1:3]) == {MANIFEST}
    assert set(kinds[3:5]) == {"pack0000"}
    assert kinds[5:] == [PROPOSAL, HOLDER]


@pytest.mark.parametrize("deaths", range(8))
def test_k2_a_removal_that_was_broken_off_anywhere_is_finished_by_the_next(cell: Path, deaths: int) -> None:
    directory, claim = published(cell)
    torn = Recording(cell / CHECKPOINTS, fails_after=deaths)
    if deaths < 7:
        with pytest.raises(StorageError):
            remove(torn, directory, claim)
        assert deaths == 0 or CHECKPOINT not in files(cell), "what is not whole is not published"
    remove(Recording(cell / CHECKPOINTS), directory, claim)
    assert files(cell) == set()


def test_k2_what_is_gone_already_is_a_success(cell: Path) -> None:
    directory, claim = published(cell)
    above = Recording(cell / CHECKPOINTS)
    remove(above, directory, claim)
    assert remove(above, directory, claim) == Removed(0)
    assert remove(Recording(cell / "nowhere"), directory, claim) == Removed(0)


@pytest.mark.parametrize(
    "other",
    [
        lambda claim: replace(claim, digest="0" * 64),
        lambda claim: replace(claim, stack_uid="another"),
        lambda claim: replace(claim, checkpoint_id="another"),
        lambda claim: replace(claim, holder="another"),
    ],
)
def test_k3_what_is_not_proved_to_be_its_own_is_left_alone(cell: Path, other: Callable[[Claim], Claim]) -> None:
    directory, claim = published(cell)
    before = files(cell)
    with pytest.raises(NotOurs):
        remove(Recording(cell / CHECKPOINTS), directory, other(claim))
    assert files(cell) == before


def test_k3_data_of_another_checkpoint_under_the_same_place_is_left_alone(cell: Path, tmp_path: Path) -> None:
    directory, _ = published(cell)
    _, elsewhere = published(tmp_path / "other" / STACK / "cell-0", number=1, holder="someone")
    other = replace(elsewhere, digest="f" * 64)
    with pytest.raises(NotOurs, match="does not hold the checkpoint with the digest ffffffffffff"):
        remove(Recording(cell / CHECKPOINTS), directory, other)


def test_s6_of_two_that_share_a_bucket_neither_removes_what_the_other_has(cell: Path) -> None:
    directory, claim = published(cell, holder="another")
    with pytest.raises(NotOurs, match="belongs to GymCheckpoint UID another"):
        remove(Recording(cell / CHECKPOINTS), directory, claim)
    unmarked, claim = published(cell, number=2, holder=None)
    with pytest.raises(NotOurs, match=r"has no holder\.json"):
        remove(Recording(cell / CHECKPOINTS), unmarked, claim)
    (cell / CHECKPOINTS / unmarked / HOLDER).write_text("not JSON")
    with pytest.raises(NotOurs):
        remove(Recording(cell / CHECKPOINTS), unmarked, claim)


def test_s6_a_claim_stands_for_good(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    hold(store, "one")
    hold(store, "one")
    with pytest.raises(ObjectConflict):
        hold(store, "two")
    assert json.loads(store.get(HOLDER)) == {"holder": "one"}


def test_packs_that_another_checkpoint_names_stay(cell: Path) -> None:
    directory, claim = published(cell)
    shared = next((cell / CHECKPOINTS / directory / "model" / "a").glob("pack*")).name
    published(cell, number=2, shares=f"../{directory}/model/a/{shared}")
    assert remove(Recording(cell / CHECKPOINTS), directory, claim) == Removed(6, (f"{directory}/model/a/{shared}",))
    assert files(cell, directory) == {shared}


def test_where_it_is_not_known_what_another_needs_nothing_goes(cell: Path) -> None:
    directory, claim = published(cell)
    other, _ = published(cell, number=2)
    (cell / CHECKPOINTS / other / "model" / "a" / MANIFEST).write_text('{"format": 9}')
    before = files(cell, directory)
    with pytest.raises(NotOurs, match="may need what is here"):
        remove(Recording(cell / CHECKPOINTS), directory, claim)
    assert files(cell, directory) == before


def test_a_copy_of_one_checkpoint_has_no_others_beside_it(tmp_path: Path) -> None:
    directory, claim = published(tmp_path)
    copied = tmp_path / "anything"
    (tmp_path / CHECKPOINTS).rename(copied)
    (copied / "not-a-checkpoint" / "x").mkdir(parents=True)
    (copied / "not-a-checkpoint" / "x" / MANIFEST).write_text("anything")
    assert remove(Recording(copied), directory, claim) == Removed(7)


# ---- what was never published ---------------------------------------------------------------------------------


def unpublished(claim: Claim) -> Claim:
    return replace(claim, digest=None)


def test_of_what_was_given_up_the_tombstone_stays(cell: Path) -> None:
    """An old upload that ends later must not bring it back."""
    directory, full = written(cell, 1)
    store = DirectoryStore(cell / CHECKPOINTS / directory)
    settle(store, publication(1, "abandoned"))
    above = Recording(cell / CHECKPOINTS)
    for _ in range(2):
        remove(above, directory, Claim(STACK, "cp1", None, MINE))
        assert files(cell) == {CHECKPOINT}
    assert settle(store, full).state == "abandoned"


def test_what_was_never_settled_goes(cell: Path) -> None:
    directory, _ = written(cell, 1)
    remove(Recording(cell / CHECKPOINTS), directory, Claim(STACK, "cp1", None, MINE))
    assert files(cell) == set()


def test_k3_what_was_never_published_is_known_by_its_names(cell: Path) -> None:
    directory, _ = written(cell, 1)
    for claim in (Claim("another", "cp1", None, MINE), Claim(STACK, "cp2", None, MINE)):
        with pytest.raises(NotOurs, match="is not where checkpoint"):
            remove(Recording(cell / CHECKPOINTS), directory, claim)


def test_what_was_published_after_all_is_left_alone(cell: Path) -> None:
    directory, claim = published(cell)
    before = files(cell)
    with pytest.raises(NotOurs, match="adopt it"):
        remove(Recording(cell / CHECKPOINTS), directory, unpublished(claim))
    (cell / CHECKPOINTS / directory / CHECKPOINT).write_text("{}")
    with pytest.raises(NotOurs, match="cannot be read"):
        remove(Recording(cell / CHECKPOINTS), directory, unpublished(claim))
    assert files(cell) == before
