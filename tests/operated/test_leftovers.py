"""Under a whole operator: what nobody can use any more goes from the bucket after a while, whoever dies meanwhile and
whatever object is gone; what can be restored stays; and looking costs nothing that grows."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects import leftovers as sweeping
from gym_operator.effects.kube import CHECKPOINTS, STACKS
from gym_operator.rules import disposal
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_servers.engine.rows import counter_rows
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.leftovers import CUTS
from gym_servers.storage.manifest import CHECKPOINT
from gym_servers.storage.ownership import OWNER, Owner, claim
from gym_servers.storage.removal import HOLDER
from gym_servers.storage.store import StorageError

SAFE = 60.0
SLOWLY = 0.5


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is safe after hours is safe after a minute here."""
    monkeypatch.setattr(sweeping, "SWEEP_SECONDS", 20.0)
    monkeypatch.setattr(sweeping, "SAFE_SECONDS", SAFE)
    monkeypatch.setattr(sweeping, "LONGEST_WRITE_SECONDS", SAFE)
    monkeypatch.setattr(disposal, "SAFE_SECONDS", SAFE)


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """While it has an entry one participant of the last cell cannot write what makes its records whole."""
    create, fails = DirectoryStore.create, list[bool]()

    def creating(self: DirectoryStore, key: str, data: bytes) -> None:
        if fails and key == "environment/env/manifest.json":
            raise StorageError("the bucket is full")
        create(self, key, data)

    monkeypatch.setattr(DirectoryStore, "create", creating)
    return fails


def rows() -> Any:
    return counter_rows(6, 1)


async def taken(rig: OperatedRig, name: str, phase: str) -> dict[str, Any]:
    await rig.until(rig.all_in_service, "in service")
    rig.checkpoint(name)
    await rig.until(lambda: rig.final(name), f"{name} is final")
    status = rig.status(CHECKPOINTS, name)
    assert status["phase"] == phase, status
    return status


def data(status: dict[str, Any]) -> set[str]:
    return {path.name for path in Path(status["uri"]).rglob("*") if path.is_file()}


def stage(rig: OperatedRig, checkpoint_id: str) -> Path:
    """Tokens, as an engine's side stages them."""
    DirectoryStore(Path(rig.cell.root)).create(f"{CUTS}/{checkpoint_id}/digest", b"tokens")
    return Path(rig.cell.root, CUTS, checkpoint_id, "digest")


async def lost(rig: OperatedRig, broken: list[bool], name: str = "lost") -> dict[str, Any]:
    broken.append(True)
    status = await taken(rig, name, "Failed")
    broken.clear()
    assert any(each.startswith("pack") for each in data(status)), "there is something to be left"
    assert CHECKPOINT in data(status)
    return status


async def test_what_a_failed_checkpoint_has_written_goes_and_the_good_ones_stay(
    tmp_path: Path, broken: list[bool]
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        kept = await taken(rig, "kept", "Succeeded")
        before = data(kept)
        gone = await lost(rig, broken)
        await asyncio.sleep(SAFE / 2)
        assert len(data(gone)) > 1, "its servers might still be writing"
        await rig.until(lambda: data(gone) == {CHECKPOINT}, "cleared")
        assert rig.status(CHECKPOINTS, "lost") == gone, "what came of it stays said"
        assert data(kept) == before
        await taken(rig, "next", "Succeeded")


@pytest.mark.parametrize("deleted", [False, True])
async def test_what_an_operator_before_has_left_is_found_also_without_its_object(
    tmp_path: Path, broken: list[bool], deleted: bool
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        gone = await lost(rig, broken)
        rig.kill_operator()
        if deleted:
            rig.kube.remove(CHECKPOINTS, IDENTITY.namespace, "lost")
        rig.start_operator()
        await rig.until(lambda: data(gone) == {CHECKPOINT}, "cleared")


@pytest.mark.parametrize("part", [0, 1])
async def test_of_a_checkpoint_that_failed_in_one_cell_the_other_s_part_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    create = DirectoryStore.create

    def creating(self: DirectoryStore, key: str, data: bytes) -> None:
        if key == "environment/env/manifest.json" and f"/cell-{part}/" in self.uri:
            raise StorageError("the bucket is full")
        create(self, key, data)

    monkeypatch.setattr(DirectoryStore, "create", creating)
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=2) as rig:
        cells = (await taken(rig, "torn", "Failed"))["cells"]
        before = data(cells[1 - part])
        await rig.until(lambda: data(cells[part]) == {CHECKPOINT}, "cleared")
        await asyncio.sleep(SAFE)
        assert data(cells[1 - part]) == before


@pytest.mark.parametrize("policy", ["Retain", "Delete"])
async def test_where_the_stack_is_gone_it_goes_all_the_same(tmp_path: Path, broken: list[bool], policy: str) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        gone = await lost(rig, broken)
        kept = await taken(rig, "kept", "Succeeded")
        cuts = stage(rig, gone["checkpointID"])
        before = data(kept)
        rig.kube.remove(STACKS, IDENTITY.namespace, IDENTITY.name)
        if policy == "Delete":
            found = rig.kube.objects[CHECKPOINTS, IDENTITY.namespace, "lost"]
            rig.kube.set(CHECKPOINTS, IDENTITY.namespace, "lost", spec={**found["spec"], "deletionPolicy": policy})
        await rig.until(lambda: data(gone) == {CHECKPOINT} and not cuts.exists(), "cleared")
        assert data(kept) == before


async def test_staged_tokens_go_when_their_checkpoint_is_over(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        status = await taken(rig, "one", "Succeeded")
        cuts, before = stage(rig, status["checkpointID"]), data(status)
        crashed = stage(rig, "of-a-checkpoint-that-nobody-remembers")
        await asyncio.sleep(SAFE / 2)
        assert cuts.exists()
        await rig.until(lambda: not cuts.exists() and not crashed.exists(), "gone")
        assert data(status) == before


async def test_staged_tokens_of_a_checkpoint_that_is_open_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await rig.until(rig.all_in_service, "in service")
        monkeypatch.setattr(type(rig.cell.participant("agent")), "survey", blocked)
        rig.checkpoint("long", timeouts={"prepare": "5m"})
        await rig.until(lambda: rig.record().get("open"), "open")
        cuts = stage(rig, rig.record()["open"]["checkpointId"])
        await asyncio.sleep(3 * SAFE)
        assert rig.record().get("open") and cuts.exists()


def blocked(participant: Any) -> Any:
    from gym_servers.participants.base import Survey
    from gym_servers.protocol.messages import Blocker

    return Survey([Blocker(id="0-0", where="a tool", age_seconds=1.0)])


@pytest.mark.parametrize("marker", ["another's", "none"])
async def test_s6_what_is_not_marked_as_its_own_stays(tmp_path: Path, broken: list[bool], marker: str) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        gone = await lost(rig, broken)
        rig.kill_operator()
        root = Path(rig.cell.root).parent
        (root / OWNER).unlink()
        if marker == "another's":
            owner = Owner(cluster="another", stack_uid=IDENTITY.uid, namespace="local", name="rig")
            claim(DirectoryStore(root), owner)
        rig.kube.remove(STACKS, IDENTITY.namespace, IDENTITY.name)  # else a good storage would be claimed again
        before = data(gone)
        rig.start_operator(cluster="ours")
        await asyncio.sleep(10 * SAFE)
        assert data(gone) == before


async def test_looking_costs_nothing_that_grows_with_what_was_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, listing, counting = Counter[str](), DirectoryStore.list, False

    def counted(self: DirectoryStore, prefix: str) -> dict[str, int]:
        if counting and "/checkpoints/" in self.uri:
            listed[f"{Path(self.uri).name}/{prefix}"] += 1
        return listing(self, prefix)

    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        for name in ("one", "two", "three"):
            assert HOLDER in data(await taken(rig, name, "Succeeded"))
        await asyncio.sleep(60)
        monkeypatch.setattr(DirectoryStore, "list", counted)
        counting = True
        await asyncio.sleep(300)
        assert set(listed) == {f"cell-0/{CUTS}"}
        assert listed[f"cell-0/{CUTS}"] <= 300 / sweeping.SWEEP_SECONDS + 1
