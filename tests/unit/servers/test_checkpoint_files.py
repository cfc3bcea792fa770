"""Packs, manifests and their verification: whatever is damaged is named and refused, before anything is used."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gym_servers.control.writes import Author, read_back
from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage import packs
from gym_servers.storage.cells import directory_name, published, verify
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.manifest import (
    CHECKPOINT,
    CodeIdentity,
    Manifest,
    Member,
    PackEntry,
    Publication,
    RecordEntry,
)
from gym_servers.storage.packs import load_manifest, load_records, pack_records, write_records
from gym_servers.storage.parallel import PARALLEL

CODE = CodeIdentity(image="i", server="counter", config_digest="c", record_format=1)
AUTHOR = Author("resources", "counter", "session-1", CODE)
RECORDS = {"a": b"first", "b": b"second", "c": b""}


def write(
    store: DirectoryStore, records: dict[str, bytes], author: Author = AUTHOR, checkpoint: str = "cp"
) -> Member:
    """A participant's records as it writes them; what the publication says of them."""

    def manifest(entries: list[PackEntry], index: list[RecordEntry]) -> Manifest:
        return Manifest(
            checkpoint_id=checkpoint,
            kind=author.kind,
            instance=author.instance,
            session=author.session,
            code=author.code,
            episodes=[],
            packs=entries,
            records=index,
        )

    digest = write_records(store, author.directory, pack_records(author.directory, records), manifest)
    return Member(
        kind=author.kind,
        instance=author.instance,
        session=author.session,
        manifest_digest=digest,
        records=len(records),
        bytes=sum(map(len, records.values())),
        code=author.code,
    )


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(records=st.dictionaries(st.text(min_size=1, max_size=8), st.binary(max_size=40), max_size=12))
def test_records_come_back_as_they_were_written_whatever_the_pack_size(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, records: dict[str, bytes]
) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 50)
    store = DirectoryStore(tmp_path_factory.mktemp("packs"))
    member = write(store, records)
    manifest, digest = load_manifest(store, AUTHOR.directory, member.manifest_digest)
    assert digest == member.manifest_digest
    assert load_records(store, manifest) == records
    verify(store, [member], "cp")
    assert all(pack.size <= max(50, *map(len, records.values())) for pack in manifest.packs)


def test_the_same_records_make_the_same_packs() -> None:
    assert pack_records("d", RECORDS) == pack_records("d", dict(reversed(RECORDS.items())))


def test_a_manifest_appears_only_after_every_pack(store: DirectoryStore) -> None:
    order: list[str] = []

    class Watching(DirectoryStore):
        def create(self, key: str, data: bytes) -> None:
            order.append(key)
            super().create(key, data)

    write(Watching(Path(store.uri)), RECORDS)
    assert order[-1] == "resources/counter/manifest.json"
    assert len(order) == 2


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def cut(data: bytes) -> bytes:
    return data[:-1]


def grown(data: bytes) -> bytes:
    return data + b"x"


def drop(data: bytes) -> None:
    return None


def pack_of(store: DirectoryStore) -> Path:
    return next(Path(store.uri).rglob("pack*"))


def damage(path: Path, how: Callable[[bytes], bytes | None]) -> None:
    changed = how(path.read_bytes())
    path.unlink()
    if changed is not None:
        path.write_bytes(changed)


@pytest.mark.parametrize("how", [flip, cut, grown, drop])
def test_a_damaged_pack_is_named_by_verification_and_by_restore(
    store: DirectoryStore, how: Callable[[bytes], bytes | None]
) -> None:
    member = write(store, RECORDS)
    pack = pack_of(store)
    damage(pack, how)
    for use in (
        lambda: verify(store, [member], "cp"),
        lambda: read_back(lambda _: store, AUTHOR, "", member.manifest_digest),
    ):
        with pytest.raises(ProtocolError, match=pack.name) as refused:
            use()
        assert refused.value.code == "invalid_checkpoint_state"


@pytest.mark.parametrize("how", [flip, cut, grown, drop])
def test_a_damaged_manifest_is_never_taken_for_the_published_one(
    store: DirectoryStore, how: Callable[[bytes], bytes | None]
) -> None:
    member = write(store, RECORDS)
    damage(Path(store.uri) / AUTHOR.directory / "manifest.json", how)
    for use in (
        lambda: verify(store, [member], "cp"),
        lambda: read_back(lambda _: store, AUTHOR, "", member.manifest_digest),
    ):
        with pytest.raises(ProtocolError, match="resources/counter") as refused:
            use()
        assert refused.value.code == "invalid_checkpoint_state"


@pytest.mark.parametrize("document", [b"", b"{}", b"[]", b"\xff", b'{"format":2}', b'{"format":1,"extra":0}'])
def test_a_manifest_of_another_form_is_refused_also_without_a_digest(store: DirectoryStore, document: bytes) -> None:
    store.create(f"{AUTHOR.directory}/manifest.json", document)
    with pytest.raises(ProtocolError, match="not of a format") as refused:
        load_manifest(store, AUTHOR.directory, None)
    assert refused.value.code == "invalid_checkpoint_state"


@pytest.mark.parametrize("field", ["offset", "length", "sha256", "pack"])
def test_an_index_that_points_elsewhere_is_refused_by_the_records_name(store: DirectoryStore, field: str) -> None:
    write(store, RECORDS)
    manifest, _ = load_manifest(store, AUTHOR.directory, None)
    entry = manifest.records[0]
    wrong = entry.model_copy(update={field: "other" if field in ("sha256", "pack") else getattr(entry, field) + 1})
    with pytest.raises(ProtocolError, match="record a does not match") as refused:
        load_records(store, manifest.model_copy(update={"records": [wrong, *manifest.records[1:]]}))
    assert refused.value.code == "invalid_checkpoint_state"


def test_records_of_another_process_or_checkpoint_are_named(store: DirectoryStore) -> None:
    member = write(store, RECORDS)
    with pytest.raises(ProtocolError, match="resources/counter was written by another process"):
        verify(store, [member.model_copy(update={"session": "session-2"})], "cp")
    with pytest.raises(ProtocolError, match="resources/counter was written by another process"):
        verify(store, [member], "another-checkpoint")


@pytest.mark.parametrize("change", [{"server": "other"}, {"record_format": 2}])
def test_records_of_other_code_are_refused_with_both_names(store: DirectoryStore, change: dict[str, object]) -> None:
    write(store, RECORDS, Author("resources", "counter", "s", CODE.model_copy(update=change)))
    with pytest.raises(ProtocolError, match="was written by server") as refused:
        read_back(lambda _: store, AUTHOR, "", None)
    assert refused.value.code == "invalid_checkpoint_state"


def test_another_image_or_configuration_is_restored(store: DirectoryStore) -> None:
    """A fix is rolled out over running rollouts: that is what checkpoints are for."""
    write(store, RECORDS, Author("resources", "counter", "s", CODE.model_copy(update={"image": "newer"})))
    _, records = read_back(lambda _: store, AUTHOR, "", None)
    assert records == RECORDS


def test_documents_have_one_spelling(store: DirectoryStore) -> None:
    write(store, RECORDS)
    data = store.get(f"{AUTHOR.directory}/manifest.json")
    assert data == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()
    assert load_manifest(store, AUTHOR.directory, sha256(data))[0].to_bytes() == data


# ---- a cell with much to read -----------------------------------------------------------------------------


class Meeting(DirectoryStore):
    """A store whose answers to reads of `keys` all come once so many are asked for at once."""

    def __init__(self, root: Path, keys: str) -> None:
        super().__init__(root)
        self.keys, self.met = keys, threading.Barrier(PARALLEL)
        self.whole: list[str] = []
        self.asked = 0

    def _meet(self, key: str) -> None:
        self.asked += 1
        if self.keys in key:
            self.met.wait(10)  # real time: one after another they never meet

    def get(self, key: str) -> bytes:
        self.whole.append(key)
        self._meet(key)
        return super().get(key)

    def fingerprint(self, key: str) -> tuple[int, str]:
        self._meet(key)
        return super().fingerprint(key)


def large(store: DirectoryStore, monkeypatch: pytest.MonkeyPatch) -> list[Member]:
    """Two participants with half as many packs each as are read at once."""
    monkeypatch.setattr(packs, "PACK_BYTES", 1)
    authors = [Author("resources", name, "session-1", CODE) for name in ("one", "two")]
    return [
        write(store, {f"{author.instance}{n}": b"xy" for n in range(PARALLEL // 2)}, author) for author in authors
    ]


def test_packs_of_all_participants_are_verified_side_by_side_and_none_is_held_whole(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = large(store, monkeypatch)
    slow = Meeting(Path(store.uri), "/pack")
    verify(slow, members, "cp")
    assert [key for key in slow.whole if "/pack" in key] == []


def test_publications_are_read_side_by_side(store: DirectoryStore) -> None:
    for number in range(PARALLEL):
        publication = Publication(
            state="published",
            checkpoint_id=f"cp{number}",
            name=f"cp{number}",
            stack_uid="uid",
            cell=0,
            cell_attempt=0,
            sequence=number,
            created=1.0,
        )
        store.create(f"{directory_name(0, number, f'cp{number}')}/{CHECKPOINT}", publication.to_bytes())
    found = published(Meeting(Path(store.uri), CHECKPOINT))
    assert [publication.sequence for _, publication, _ in found] == list(reversed(range(PARALLEL)))


def test_nothing_more_is_read_once_a_pack_does_not_verify(
    store: DirectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packs, "PACK_BYTES", 1)
    member = write(store, {f"{number:03d}": b"xy" for number in range(200)})
    damage(min(Path(store.uri).rglob("pack*")), flip)
    asked: list[str] = []

    class Slow(DirectoryStore):
        def fingerprint(self, key: str) -> tuple[int, str]:
            asked.append(key)
            if "pack0000" not in key:
                threading.Event().wait(0.3)
            return super().fingerprint(key)

    with pytest.raises(ProtocolError, match="pack0000"):
        verify(Slow(Path(store.uri)), [member], "cp")
    assert len(asked) <= 2 * PARALLEL
