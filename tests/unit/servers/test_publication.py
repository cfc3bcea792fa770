"""A checkpoint is published or it does not exist: one winner, the newest first, what was left open is settled."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gym_servers.coordination.record import OpenCheckpoint
from gym_servers.coordination.settle import choose, settle_left_open
from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.cells import (
    PROPOSAL,
    directory_name,
    highest_attempt,
    published,
    reserve_attempt,
    settle,
    use_attempt_up,
)
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.locate import join, open_store
from gym_servers.storage.manifest import (
    CHECKPOINT,
    CodeIdentity,
    Manifest,
    Member,
    PackEntry,
    Publication,
    RecordEntry,
)
from gym_servers.storage.packs import pack_records, write_records
from gym_servers.storage.store import ObjectConflict, StorageError

CODE = CodeIdentity(image="i", server="counter", config_digest="c", record_format=1)


def publication(number: int = 1, *, attempt: int = 0, state: str = "published", stack: str = "uid") -> Publication:
    return Publication(
        state=state,
        checkpoint_id=f"cp{number}",
        name=f"cp{number}",
        stack_uid=stack,
        cell=0,
        cell_attempt=attempt,
        sequence=number,
        created=1.0,
    )


def tombstone(number: int = 1) -> Publication:
    return publication(number, state="abandoned").model_copy(update={"reason": "given up"})


def written(cell: DirectoryStore, wanted: Publication, *, publish: bool = True) -> DirectoryStore:
    """A checkpoint with one participant's records, in its directory of the cell."""
    name = directory_name(wanted.cell_attempt, wanted.sequence, wanted.checkpoint_id)
    store = DirectoryStore(Path(join(cell.uri, name)))

    def manifest(packs: list[PackEntry], records: list[RecordEntry]) -> Manifest:
        return Manifest(
            checkpoint_id=wanted.checkpoint_id,
            kind="model",
            instance="m",
            session="s",
            code=CODE,
            episodes=[],
            packs=packs,
            records=records,
        )

    digest = write_records(store, "model/m", pack_records("model/m", {"r": b"1234"}), manifest)
    member = Member(kind="model", instance="m", session="s", manifest_digest=digest, records=1, bytes=4, code=CODE)
    full = wanted.model_copy(update={"members": [member]})
    store.create(PROPOSAL, full.to_bytes())
    if publish:
        assert settle(store, full) == full
    return store


@pytest.fixture
def cell(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


def chosen(cell: DirectoryStore, *, refused: tuple[str, ...] = ()) -> tuple[str | None, list[str]]:
    said: list[str] = []
    choice = choose(cell, open_store, "uid", refused, said.append)
    return (choice.checkpoint_id if choice else None), said


def test_publication_and_tombstone_race_and_both_sides_learn_what_landed(tmp_path: Path) -> None:
    for round_ in range(20):
        store = DirectoryStore(tmp_path / str(round_))
        barrier = threading.Barrier(4)

        def decide(
            wanted: Publication, store: DirectoryStore = store, barrier: threading.Barrier = barrier
        ) -> Publication:
            barrier.wait()
            return settle(store, wanted)

        with ThreadPoolExecutor(4) as pool:
            landed = list(pool.map(decide, [publication(), tombstone(), publication(), tombstone()]))
        assert len({one.to_bytes() for one in landed}) == 1
        assert landed[0].to_bytes() == store.get(CHECKPOINT)


def test_a_late_publication_loses_against_the_tombstone(tmp_path: Path) -> None:
    """A checkpoint was given up; an old upload that ends later does not bring it back."""
    store = DirectoryStore(tmp_path)
    settle(store, tombstone())
    assert settle(store, publication()).state == "abandoned"
    assert settle(store, publication()).reason == "given up"


def test_newest_is_the_highest_attempt_then_sequence_and_tombstones_are_no_checkpoints(cell: DirectoryStore) -> None:
    written(cell, publication(3, attempt=1))
    written(cell, publication(9, attempt=0))
    written(cell, publication(2, attempt=1))
    settle(DirectoryStore(Path(join(cell.uri, directory_name(2, 10, "dead")))), tombstone(10))
    written(cell, publication(11, attempt=2), publish=False)
    assert [found.checkpoint_id for _, found, _ in published(cell)] == ["cp3", "cp2", "cp9"]
    assert chosen(cell) == ("cp3", [])


@pytest.mark.parametrize("document", [b"", b"{", b"{}", b'{"format":2}', b"\xff\xfe"])
def test_a_publication_that_cannot_be_read_is_none(cell: DirectoryStore, document: bytes) -> None:
    written(cell, publication(1))
    store = written(cell, publication(2), publish=False)
    store.create(CHECKPOINT, document)
    assert chosen(cell) == ("cp1", [])


def damaged(store: DirectoryStore, name: str, data: bytes | None) -> None:
    path = next(Path(store.uri).rglob(name))
    path.unlink()
    if data is not None:
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("pack*", None, "pack model/m/pack0000-"),
        ("pack*", b"123", "does not match its digest"),
        ("pack*", b"4321", "does not match its digest"),
        ("manifest.json", None, "model/m has no manifest"),
        ("manifest.json", b"{}", "the manifest of model/m is not the published one"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_older_one_and_named(
    cell: DirectoryStore, name: str, data: bytes | None, says: str
) -> None:
    written(cell, publication(1))
    damaged(written(cell, publication(2)), name, data)
    found, said = chosen(cell)
    assert found == "cp1"
    assert len(said) == 1
    assert "cp2 is passed over" in said[0]
    assert says in said[0]


def test_nothing_usable_means_the_input(cell: DirectoryStore) -> None:
    assert chosen(cell) == (None, [])
    damaged(written(cell, publication(1)), "pack*", None)
    found, said = chosen(cell)
    assert found is None
    assert len(said) == 1


def test_refused_ones_and_other_stacks_are_left_alone(cell: DirectoryStore) -> None:
    written(cell, publication(1))
    refused = written(cell, publication(2))
    written(cell, publication(3, stack="another"))
    assert chosen(cell, refused=(refused.uri,)) == ("cp1", [])


def test_the_choice_names_the_document_by_its_digest(cell: DirectoryStore) -> None:
    store = written(cell, publication(1))
    choice = choose(cell, open_store, "uid", (), lambda _: None)
    assert choice is not None
    assert choice.uri == store.uri
    assert choice.digest == sha256(store.get(CHECKPOINT))


def test_storage_that_is_away_is_not_taken_for_an_empty_one(cell: DirectoryStore) -> None:
    """Else a network fault at the wrong moment would start a whole run over."""

    class Away(DirectoryStore):
        def list(self, prefix: str) -> dict[str, int]:
            raise StorageError("away")

    with pytest.raises(StorageError):
        choose(Away(Path(cell.uri)), open_store, "uid", (), lambda _: None)


def left_open(number: int) -> OpenCheckpoint:
    return OpenCheckpoint(checkpoint_id=f"cp{number}", name=f"cp{number}", uri="", sequence=number)


def test_what_was_left_open_is_published_if_all_of_it_is_durable(cell: DirectoryStore) -> None:
    store = written(cell, publication(1), publish=False)
    landed, digest = settle_left_open(store, left_open(1), tombstone())
    assert landed.state == "published"
    assert digest == sha256(store.get(CHECKPOINT))
    assert settle_left_open(store, left_open(1), tombstone()) == (landed, digest)


@pytest.mark.parametrize("missing", ["pack*", "manifest.json", "proposal.json"])
def test_what_was_left_open_is_given_up_if_anything_is_missing(cell: DirectoryStore, missing: str) -> None:
    store = written(cell, publication(1), publish=False)
    damaged(store, missing, None)
    landed, _ = settle_left_open(store, left_open(1), tombstone())
    assert landed.state == "abandoned"
    assert published(cell) == []


def test_a_proposal_that_cannot_be_read_is_given_up(cell: DirectoryStore) -> None:
    store = written(cell, publication(1), publish=False)
    damaged(store, "proposal.json", b"half a docu")
    assert settle_left_open(store, left_open(1), tombstone())[0].state == "abandoned"


def test_a_settled_document_that_cannot_be_read_does_not_stop_the_recovery(cell: DirectoryStore) -> None:
    """It is no publication for `published` either, so it counts as given up."""
    store = written(cell, publication(1), publish=False)
    store.create(CHECKPOINT, b"not JSON")
    landed, digest = settle_left_open(store, left_open(1), tombstone())
    assert landed.state == "abandoned"
    assert digest == sha256(b"not JSON")


def test_attempts_are_used_up_once_and_counted_by_number(cell: DirectoryStore) -> None:
    assert highest_attempt(cell) == 0
    for attempt in (2, 10, 9, 10):
        use_attempt_up(cell, attempt, "driver")
    cell.create("attempts/not-a-number", b"")
    assert highest_attempt(cell) == 10


def test_a_number_is_used_up_by_one_owner_alone(tmp_path: Path) -> None:
    cell = DirectoryStore(tmp_path)
    use_attempt_up(cell, 1, "driver")
    use_attempt_up(cell, 1, "driver")  # its own, again after a lost answer
    with pytest.raises(ObjectConflict):
        use_attempt_up(cell, 1, "recovery")
    assert reserve_attempt(cell, 0, "recovery") == 2
    with pytest.raises(ObjectConflict):
        use_attempt_up(cell, 2, "driver")


def test_a_reserved_number_is_above_what_the_record_knows(tmp_path: Path) -> None:
    assert reserve_attempt(DirectoryStore(tmp_path), 6, "recovery") == 7


def test_reading_a_tombstone_back_is_not_an_error(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    settle(store, tombstone())
    assert settle(store, tombstone()) == tombstone()
    with pytest.raises(ProtocolError):
        store2 = DirectoryStore(tmp_path / "x")
        store2.create(CHECKPOINT, b"{}")
        settle(store2, tombstone())
