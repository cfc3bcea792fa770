"""Last checkpoints that the operator takes of its own accord go when their cell has had a newer one for a while,
whoever dies meanwhile; one that somebody needs stays."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects import leftovers as sweeping
from gym_operator.effects.fleet import Fleet
from gym_operator.effects.kube import CHECKPOINTS, PODS, STACKS
from gym_operator.rules import unasked
from gym_operator.rules.cell_record import to_document
from gym_rig import operated as rigs
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_rig.writes import at_any_write
from gym_servers.coordination.record import CellRecord, Choice, Stage
from gym_servers.engine.rows import counter_rows
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.removal import HOLDER
from gym_servers.storage.store import StorageError

SWEEP = 20.0
SUPERSEDED = 90.0
LONG = SUPERSEDED + 5 * SWEEP
SLOWLY = 0.5
WRITES = 13
"""Of a removal: the claim, and each object that goes."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is over after an hour is over after a minute and a half here."""
    monkeypatch.setattr(sweeping, "SWEEP_SECONDS", SWEEP)
    monkeypatch.setattr(unasked, "SUPERSEDED_SECONDS", SUPERSEDED)


def rows() -> Any:
    return counter_rows(6, 1)


def files(uri: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(uri).rglob("*") if path.is_file()}


async def rolled_out(rig: OperatedRig, image: str = "rig:2") -> dict[str, Any]:
    """What its cell was stopped by, to get another image."""
    await rig.until(rig.all_in_service, "in service")
    attempt = rig.part()["attempt"]
    rig.change(image=image)
    await rig.until(lambda: rig.in_service(attempt + 1) and rig.images(0) == {image}, "rolled out")
    last: dict[str, Any] = rig.part()["lastCheckpoint"]
    assert last["name"] == "roll-out"
    return last


async def taken(rig: OperatedRig, name: str, **spec: Any) -> dict[str, Any]:
    rig.checkpoint(name, **spec)
    await rig.until(lambda: rig.final(name), f"{name} is final")
    status = rig.status(CHECKPOINTS, name)
    assert status["phase"] == "Succeeded", status
    return status


async def goes(rig: OperatedRig, uri: str) -> None:
    await rig.until(lambda: not files(uri), "gone")


async def test_it_goes_once_its_cell_has_had_a_newer_one_for_a_while(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        last = await rolled_out(rig)
        before = files(last["uri"])
        assert len(before) + 2 == WRITES, "the claim is made, and goes last"
        await asyncio.sleep(LONG)
        assert files(last["uri"]) == before, "the cell would continue from it"
        newer = (await taken(rig, "newer"))["uri"]
        kept = files(newer)
        await asyncio.sleep(SUPERSEDED - SWEEP)
        assert files(last["uri"]) == before, "it is not old enough"
        await goes(rig, last["uri"])
        assert files(newer) == kept
        (said,) = rig.events("DataRemoved")
        assert f"{len(before) + 1} objects of a last checkpoint at {last['uri']} were removed" in said
        attempt = rig.part()["attempt"]
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.in_service(attempt + 1), "in service again")
        assert rig.part()["lastCheckpoint"]["name"] == "newer"


async def test_each_of_them_goes_but_the_newest(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await rolled_out(rig)
        second = await rolled_out(rig, "rig:3")
        before = files(second["uri"])
        await goes(rig, first["uri"])
        await asyncio.sleep(LONG)
        assert files(second["uri"]) == before


async def test_what_a_cell_that_was_taken_away_would_continue_from_stays_until_it_has(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=2, scaleDown={"drainTimeout": "0s"}) as rig:
        await rig.until(rig.all_in_service, "in service")
        rig.change(cells=1)
        await rig.until(lambda: rig.part(1).get("phase") == "Stopped" and not rig.pods(1), "stopped")
        last = rig.part(1)["lastCheckpoint"]
        before = files(last["uri"])
        assert last["name"] == "scale-down"
        await taken(rig, "of-the-other")
        await asyncio.sleep(LONG)
        assert files(last["uri"]) == before
        rig.change(cells=2)
        await rig.until(lambda: rig.in_service(1, cell=1), "back")
        await taken(rig, "newer")
        await goes(rig, last["uri"])


async def test_what_operators_before_have_left_is_found(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        last = await rolled_out(rig)
        await taken(rig, "newer")
        rig.kill_operator()
        rig.start_operator()
        await goes(rig, last["uri"])


@pytest.mark.parametrize("name", ["roll-out", "scale-down", "roll-out-0"])
async def test_a_gymcheckpoint_may_be_called_as_one(tmp_path: Path, name: str) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await rig.until(rig.all_in_service, "in service")
        asked = (await taken(rig, name))["uri"]
        before = files(asked)
        await taken(rig, "newer")
        rig.kube.remove(CHECKPOINTS, IDENTITY.namespace, name)
        await asyncio.sleep(LONG)
        assert files(asked) == before, "deletionPolicy: Retain"


@pytest.mark.parametrize("policy", ["Retain", "Delete"])
async def test_what_was_adopted_stays_as_long_as_its_object(tmp_path: Path, policy: str) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        last = await rolled_out(rig)
        source = {"uri": last["uri"], "digest": last["digest"]}
        await taken(rig, "adopted", source=source, deletionPolicy=policy)
        before = files(last["uri"])
        await taken(rig, "newer")
        await asyncio.sleep(LONG)
        assert files(last["uri"]) == before
        rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, "adopted")
        await goes(rig, last["uri"])


async def test_who_begins_to_need_it_once_it_is_claimed_is_heard(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        last = await rolled_out(rig)
        before = files(last["uri"])
        await taken(rig, "newer")
        await rig.until(lambda: Path(last["uri"], HOLDER).exists(), "claimed")
        await taken(rig, "adopted", source={"uri": last["uri"], "digest": last["digest"]})
        await asyncio.sleep(LONG)
        assert before.items() <= files(last["uri"]).items()
        rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, "adopted")
        await goes(rig, last["uri"])


async def test_what_another_stack_continues_from_stays(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        last = await rolled_out(rig)
        choice = Choice(uri=last["uri"], digest=last["digest"], checkpoint_id=last["id"], name=last["name"])
        record = to_document(CellRecord(stage=Stage.RUNNING, restore=choice))
        status = {"observedGeneration": 1, "cells": [{"index": 0, "phase": "Suspended", "record": record}]}
        other = {"metadata": {"name": "other"}, "spec": {**rig.spec, "suspend": True}, "status": status}
        rig.kube.put(STACKS, "elsewhere", other)
        before = files(last["uri"])
        await taken(rig, "newer")
        await asyncio.sleep(LONG)
        assert files(last["uri"]) == before
        rig.kube.remove(STACKS, "elsewhere", "other")
        await goes(rig, last["uri"])


async def test_where_the_newer_one_is_broken_it_stays(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        last = await rolled_out(rig)
        newer = (await taken(rig, "newer"))["uri"]
        pack = next(Path(path) for path in files(newer) if "pack" in Path(path).name)
        whole = pack.read_bytes()
        pack.write_bytes(whole[:-1])
        before = files(last["uri"])
        await asyncio.sleep(LONG)
        assert files(last["uri"]) == before
        pack.write_bytes(whole)
        await goes(rig, last["uri"])


async def test_who_does_not_see_all_namespaces_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody elsewhere may be about to restore it."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        last = await rolled_out(rig)
        rig.kill_operator()
        with monkeypatch.context() as patched:
            patched.setattr(rigs, "Fleet", partial(Fleet, namespaces=(IDENTITY.namespace,)))
            rig.start_operator()
        before = files(last["uri"])
        await taken(rig, "newer")
        await asyncio.sleep(LONG)
        assert files(last["uri"]) == before
        rig.kill_operator()
        rig.start_operator()
        await goes(rig, last["uri"])


@at_any_write(WRITES)
async def test_an_operator_killed_at_any_write_of_a_removal_is_followed_by_one_that_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: int, after: bool
) -> None:
    """These writes are in the bucket: a claim, and one object after the other."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        last = await rolled_out(rig)
        newer = (await taken(rig, "newer"))["uri"]
        kept, loop, made, dead = files(newer), asyncio.get_running_loop(), list[str](), list[bool]()
        create, delete = DirectoryStore.create, DirectoryStore.delete

        def cut(store: DirectoryStore, key: str, land: Any) -> None:
            uri = f"{store.uri}/{key}"
            if not uri.startswith(last["uri"]):
                land()
                return
            made.append(uri)
            if len(made) == write:
                dead.append(True)
                loop.call_soon_threadsafe(rig.kill_operator)
                if after:
                    land()
            if dead:
                raise StorageError("whoever is dead reaches no storage")
            land()

        monkeypatch.setattr(DirectoryStore, "create", lambda self, k, d: cut(self, k, lambda: create(self, k, d)))
        monkeypatch.setattr(DirectoryStore, "delete", lambda self, k: cut(self, k, lambda: delete(self, k)))
        await rig.until(lambda: rig.operator is None, "killed")
        assert len(made) >= write
        assert files(newer) == kept
        dead.clear()
        rig.start_operator()
        await goes(rig, last["uri"])
        assert files(newer) == kept
        assert not any(path.endswith(HOLDER) for path in files(last["uri"]))
