"""GymRestores under a whole operator: the stack continues from what was chosen."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects.kube import CHECKPOINTS, PODS, RESTORES, STACKS, Body, Resource
from gym_operator.effects.restores import Restores
from gym_rig.beside import beside
from gym_rig.cell import IDENTITY
from gym_rig.collecting import ROWS, SLOWLY, rows
from gym_rig.operated import operated
from gym_rig.restoring import final, restore, sources, sources_of, taken, to_the_end
from gym_rig.writes import at_any_write
from gym_servers.coordination.controller import CellController
from gym_servers.participants.base import Survey
from gym_servers.protocol.digests import sha256
from gym_servers.protocol.messages import Blocker
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.removal import HOLDER


def of_another(uri: str, to: Path) -> tuple[str, str]:
    """A checkpoint as another stack would have taken it, in another place of the bucket: its place and digest."""
    shutil.copytree(uri, to)
    for name in (HOLDER, "proposal.json"):
        (to / name).unlink()
    publication = read_publication((to / CHECKPOINT).read_bytes())
    document = publication.model_copy(update={"stack_uid": "of-another", "cell_attempt": 6}).to_bytes()
    (to / CHECKPOINT).write_bytes(document)
    return str(to), sha256(document)


def damage(uri: str) -> None:
    next(Path(uri).rglob("pack*")).write_bytes(b"x")


# ---- what is chosen ----------------------------------------------------------------------------------------


async def test_k12_a_stack_is_brought_to_an_older_checkpoint_and_says_to_which(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        await taken(rig, "second")
        restore(rig, checkpointRef={"name": "first"})
        status = await final(rig, "back", "Succeeded")
        assert status["checkpoint"] == {"name": "first", "id": first["checkpointID"], "stackUID": IDENTITY.uid}
        assert status["cells"] == [{"index": 0, "uri": first["uri"], "digest": first["digest"], "attempt": 1}]
        assert status["continuedCount"] == first["episodes"] == len(status["continued"])
        assert {(each["attempt"], each["cell"]) for each in status["continued"]} == {(1, 0)}
        condition = next(each for each in status["conditions"] if each["type"] == "Succeeded")
        assert (condition["status"], condition["observedGeneration"]) == ("True", 1)
        assert rig.in_service(1)
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.in_service(2), "recovered")
        assert sources(rig) == [first["checkpointID"]] * 2, "a death leads back to what was chosen, not past it"
        await to_the_end(rig)


@at_any_write(10)
async def test_an_operator_killed_at_any_write_of_a_restore_is_followed_by_one_that_ends_it(
    tmp_path: Path, write: int, after: bool
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        await taken(rig, "second")
        await rig.replace_operator(
            write, lambda: restore(rig, checkpointRef={"name": "first"}), after=after, ended=rig.complete
        )
        await final(rig, "back", "Succeeded")
        assert set(sources(rig)) == {first["checkpointID"]}
        attempts = [each["attempt"] for each in rig.status()["cells"][0]["recoveries"]]
        assert attempts == sorted(set(attempts))
        assert len(attempts) == 1, "nobody died but the operator"
        await to_the_end(rig)


async def test_by_a_label_such_as_the_trainers_step(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await taken(rig, "older", labels={"step": "7"})
        wanted = await taken(rig, "wanted", labels={"step": "7", "run": "a"})
        await taken(rig, "newer", labels={"step": "8"})
        restore(rig, labels={"step": "7"})
        status = await final(rig, "back", "Succeeded")
        assert status["checkpoint"]["id"] == wanted["checkpointID"]
        await to_the_end(rig)


async def test_k12_of_those_with_a_label_the_next_older_one_is_taken_where_the_newest_is_damaged(
    tmp_path: Path,
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await taken(rig, "another")
        older = await taken(rig, "older", labels={"step": "7"})
        newest = await taken(rig, "newest", labels={"step": "7"})
        damage(newest["uri"])
        restore(rig, labels={"step": "7"})
        status = await final(rig, "back", "Succeeded")
        assert status["checkpoint"]["id"] == older["checkpointID"]
        assert [each["uri"] for each in status["passedOver"]] == [newest["uri"]]
        assert f"{newest['uri']} was passed over: pack " in status["message"]
        assert len(rig.events("CheckpointUnusable")) == 1
        assert sources(rig) == [older["checkpointID"]]
        pods = rig.pods()
        damage(older["uri"])
        restore(rig, "again", labels={"step": "7"})
        status = await final(rig, "again", "Failed")
        assert status["reason"] == "SourceInvalid"
        assert newest["uri"] in status["message"] and older["uri"] in status["message"]
        assert rig.pods() == pods, "no server was disturbed, and nothing without the label was taken"


async def test_records_of_another_stack_restore_into_this_one_by_place_and_digest(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        uri, digest = of_another(first["uri"], tmp_path / "elsewhere" / "theirs")
        restore(rig, uri=uri, digest=digest)
        status = await final(rig, "back", "Succeeded")
        assert status["checkpoint"]["stackUID"] == "of-another"
        assert status["cells"][0]["attempt"] == 7, "above all attempts that the other stack has used"
        assert {each["attempt"] for each in status["continued"]} == {7}
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.in_service(8), "recovered")
        await to_the_end(rig)


async def test_k8_a_stack_made_again_under_its_name_leaves_the_old_data_alone_and_continues_from_it(
    tmp_path: Path,
) -> None:
    """What the one before had under the same names is there for a while: it is waited for, and nobody has to help."""
    async with operated(tmp_path, rows(), rate=SLOWLY, suspend=True) as rig, beside(rig, "again") as other:
        spec = {**rig.spec, "suspend": False, "collection": {**rig.spec["collection"], "output": f"{tmp_path}/rows"}}

        def ready() -> Body:
            conditions = rig.status(STACKS, "again").get("conditions", ())
            return next((each for each in conditions if each["type"] == "Ready"), {})

        async def checkpoint(name: str) -> Body:
            effects = rig.cell.effects()
            await rig.until(lambda: ready().get("status") == "True", "in service")
            await rig.until(lambda: rig.cell.effects() >= effects + 2, "it goes on")
            rig.checkpoint(name, stackRef={"name": "again"})
            await rig.until(lambda: rig.final(name), f"{name} is final")
            status = rig.status(CHECKPOINTS, name)
            assert (status["phase"], status["stackUID"]) == ("Succeeded", other.uids[-1]), status
            assert status["uri"].startswith(f"{tmp_path}/checkpoints/{other.uids[-1]}/cell-0/")
            return status

        rig.kube.put(STACKS, IDENTITY.namespace, {"metadata": {"name": "again"}, "spec": spec})
        old = await checkpoint("old")
        (first,) = other.uids
        other.objects_last, other.pods_last = 20.0, 40.0
        rig.kube.remove(STACKS, IDENTITY.namespace, "again")
        rig.kube.put(STACKS, IDENTITY.namespace, {"metadata": {"name": "again"}, "spec": spec})
        before = files(tmp_path / "checkpoints" / first)
        await rig.until(lambda: ready().get("reason") == "NameConflict", "what is left is in its way")
        await checkpoint("new")
        restore(rig, stackRef={"name": "again"}, checkpointRef={"name": "old"})
        status = await final(rig, "back", "Succeeded")
        assert status["checkpoint"] == {"name": "old", "id": old["checkpointID"], "stackUID": first}
        assert status["continuedCount"] == old["episodes"] > 0
        assert status["cells"][0]["attempt"] == 1, "above what either has used"
        await rig.until(lambda: rig.status(STACKS, "again").get("phase") == "Completed", "complete")
        done = [json.loads(line) for line in (tmp_path / "rows" / "rollouts.jsonl").read_text().splitlines()]
        assert sorted(row["_ng_rollout_id"] for row in done) == [f"{number}-0" for number in range(ROWS)]
        assert files(tmp_path / "checkpoints" / first) == before


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_k18_what_a_stack_that_is_gone_has_left_is_adopted_and_restored_by_its_name(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        uri, digest = of_another(first["uri"], tmp_path / "elsewhere" / "theirs")
        rig.checkpoint("kept", source={"uri": uri, "digest": digest})
        await rig.until(lambda: rig.final("kept"), "adopted")
        rig.kube.remove(CHECKPOINTS, IDENTITY.namespace, "first")
        restore(rig, checkpointRef={"name": "kept"})
        status = await final(rig, "back", "Succeeded")
        assert status["checkpoint"]["stackUID"] == "of-another"
        await to_the_end(rig)


async def test_k11_an_empty_checkpoint_restores_to_an_empty_stack(tmp_path: Path) -> None:
    """Whose rollouts all begin anew: nothing of what ran before goes on."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        rig.change(collection={**rig.spec["collection"], "concurrency": 64})
        await rig.until(rig.in_service, "in service")
        await rig.until(lambda: rig.cell.effects() >= 2, "tools were called")
        full = await taken(rig, "full")
        place = tmp_path / "elsewhere" / "empty"
        uri, _ = of_another(full["uri"], place)
        publication = read_publication((place / CHECKPOINT).read_bytes())
        document = publication.model_copy(update={"episodes": [], "scope": [], "cell_attempt": 0}).to_bytes()
        (place / CHECKPOINT).write_bytes(document)
        restore(rig, uri=uri, digest=sha256(document))
        status = await final(rig, "back", "Succeeded")
        assert (status["continuedCount"], status.get("continued", [])) == (0, [])
        await to_the_end(rig)


# ---- stacks that stand still -------------------------------------------------------------------------------


async def test_k10_a_stack_that_was_stopped_by_a_checkpoint_goes_on_with_a_restore(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        await taken(rig, "last", stopAfter=True)
        await rig.until(lambda: rig.status()["phase"] == "Stopped", "stopped")
        restore(rig, checkpointRef={"name": "first"})
        await final(rig, "back", "Succeeded")
        assert sources(rig) == [first["checkpointID"]]
        assert "stopped" not in rig.record()
        await to_the_end(rig)


async def test_k10_a_stack_that_has_given_up_is_helped_by_a_restore(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, recovery={"backoffLimit": 0}) as rig:
        first = await taken(rig, "first")
        rig.cell.kill("agent")
        await rig.until(lambda: rig.status()["phase"] == "Failed", "given up")
        restore(rig, checkpointRef={"name": "first"})
        await final(rig, "back", "Succeeded")
        assert sources(rig) == [first["checkpointID"]]
        assert rig.conditions()["Stalled"]["status"] == "False" or await rig.until(
            lambda: rig.conditions()["Stalled"]["status"] == "False"
        )
        await to_the_end(rig)


# ---- several cells -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", [None, 2, 4, 6])
async def test_k12_all_cells_of_a_stack_are_restored_and_each_once(tmp_path: Path, write: int | None) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=2) as rig:
        await rig.until(rig.all_in_service, "in service")
        first = await taken(rig, "first")
        await taken(rig, "second")
        restore(rig, checkpointRef={"name": "first"})
        if write is not None:
            await rig.replace_operator(write, ended=rig.complete)
        status = await final(rig, "back", "Succeeded")
        assert [cell["uri"] for cell in status["cells"]] == [cell["uri"] for cell in first["cells"]]
        assert {each["cell"] for each in status["continued"]} <= {0, 1}
        assert status["continuedCount"] == first["episodes"]
        for cell in (0, 1):
            # A number may be used up by an operator that dies before it has written the record.
            attempt = status["cells"][cell]["attempt"]
            assert rig.in_service(attempt, cell) and attempt in (1, 2)
            assert sources_of(rig, cell) == [first["checkpointID"]], "and no cell more than once"
        await rig.until(rig.complete, "complete")


async def test_k12_a_cell_that_begins_while_the_status_is_written_is_counted_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fulfil = Restores.fulfil

    async def later(self: Restores, index: int, controller: CellController) -> None:
        await asyncio.sleep(5.0 * index)
        await fulfil(self, index, controller)

    monkeypatch.setattr(Restores, "fulfil", later)
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=2) as rig:
        await rig.until(rig.all_in_service, "in service")
        first = await taken(rig, "first")
        write, slow = rig.kube.replace_status, []

        async def slowly(resource: Resource, namespace: str, body: Body) -> Body:
            attempts = [cell.get("attempt") for cell in body["status"].get("cells", ())]
            if resource == RESTORES and attempts == [1, None]:
                slow.append(body)
                await rig.until(lambda: rig.in_service(1, 1), "the other cell is restored meanwhile")
            return await write(resource, namespace, body)

        rig.kube.replace_status = slowly  # type: ignore[method-assign]
        restore(rig, checkpointRef={"name": "first"})
        status = await final(rig, "back", "Succeeded")
        assert slow, "the moment that is meant"
        assert status["continuedCount"] == first["episodes"]
        assert {each["cell"] for each in status["continued"]} == {0, 1}
        await rig.until(rig.complete, "complete")


# ---- beside checkpoints ------------------------------------------------------------------------------------


async def test_a_checkpoint_that_is_being_taken_is_waited_for_and_others_wait_for_the_restore(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        first = await taken(rig, "first")
        for name in ("c1", "c2", "c3"):
            rig.checkpoint(name)
        await rig.reaches("c1", "Preparing")
        restore(rig, checkpointRef={"name": "first"})
        await final(rig, "back", "Succeeded")
        assert rig.status(CHECKPOINTS, "c1")["phase"] == "Succeeded", "it was not broken off"
        await rig.until(lambda: rig.final("c3"), "all taken")
        attempts = [rig.status(CHECKPOINTS, name)["cells"][0]["attempt"] for name in ("c1", "c2", "c3")]
        assert attempts[0] == 0 and attempts[2] == 1, "a queue of checkpoints does not keep a restore waiting"
        assert sources(rig) == [first["checkpointID"]]
        await to_the_end(rig)


async def test_k4_what_a_restore_works_from_is_neither_let_go_nor_removed(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await taken(rig, "first", ttl="1s")
        second = await taken(rig, "second", deletionPolicy="Delete")
        found = rig.kube.objects[CHECKPOINTS, IDENTITY.namespace, "second"]
        theirs = {**found["spec"], "stackRef": {"name": "another"}}  # whose own record knows nothing of the restore
        rig.kube.set(CHECKPOINTS, IDENTITY.namespace, "second", spec=theirs)
        rig.pods_may_start = False
        restore(rig, checkpointRef={"name": "second"})
        await rig.until(lambda: rig.status(RESTORES, "back").get("phase") == "Restoring", "begun")
        rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, "second")
        await asyncio.sleep(60)
        assert DirectoryStore(Path(second["uri"])).get(CHECKPOINT)
        left = (CHECKPOINTS, IDENTITY.namespace, "first") in rig.kube.objects
        assert left, "the newest good one, now that the second goes"
        rig.pods_may_start = True
        await final(rig, "back", "Succeeded")
        await rig.until(lambda: (CHECKPOINTS, IDENTITY.namespace, "second") not in rig.kube.objects, "gone")


@pytest.mark.parametrize("source", [{"checkpointRef": {"name": "chosen"}}, {"labels": {"step": "7"}}])
@pytest.mark.parametrize("by", ["the same operator", "the next one"])
async def test_k4_what_a_queued_restore_has_chosen_is_held_too(
    tmp_path: Path, source: dict[str, Any], by: str
) -> None:
    """It was read already: else the servers would be replaced for data that is gone."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        chosen = await taken(rig, "chosen", deletionPolicy="Delete", labels={"step": "7"})
        await taken(rig, "newest")
        agent = rig.cell.processes_by_name["agent"].server.participant
        agent.survey = lambda: Survey([Blocker(id="0-0", where="a tool", age_seconds=1)])  # type: ignore[method-assign]
        rig.checkpoint("c1", timeouts={"prepare": "2m"})
        await rig.reaches("c1", "Preparing")
        restore(rig, **source)
        await rig.until(lambda: rig.status(RESTORES, "back").get("reason") == "Queued", "it waits for c1")
        pods = rig.pods()
        rig.kube.let_go(CHECKPOINTS, IDENTITY.namespace, "chosen")
        await asyncio.sleep(20)
        assert (rig.status(RESTORES, "back")["phase"], rig.pods()) == ("Pending", pods)
        assert DirectoryStore(Path(chosen["uri"])).get(CHECKPOINT)
        if by == "the next one":
            rig.kill_operator()
            rig.start_operator()
        await final(rig, "back", "Succeeded")
        assert sources(rig) == [chosen["checkpointID"]]
        await rig.until(lambda: (CHECKPOINTS, IDENTITY.namespace, "chosen") not in rig.kube.objects, "gone")
        assert rig.events("DataRemoved")


# ---- a death that people decide about ----------------------------------------------------------------------


@pytest.mark.parametrize("by", ["policy", "restore", "suspension"])
async def test_a_death_under_a_manual_policy_waits_for_whoever_decides(tmp_path: Path, by: str) -> None:
    """Another operator may have come meanwhile."""
    async with operated(tmp_path, rows(), rate=SLOWLY, recovery={"policy": "Manual"}) as rig:
        await taken(rig, "one")
        rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
        await rig.until(lambda: rig.conditions()["Ready"]["reason"] == "RecoveryHeld", "held")
        conditions = rig.conditions()
        assert (conditions["Stalled"]["status"], conditions["Recovering"]["status"]) == ("True", "False")
        assert "it would continue from checkpoint one" in conditions["Ready"]["message"]
        assert "GymRestore" in conditions["Ready"]["message"]
        assert len(rig.events("RecoveryHeld")) == 1
        rig.kill_operator()
        rig.start_operator()
        effects = rig.cell.effects()
        await asyncio.sleep(200)
        assert (rig.cell.effects(), rig.record()["attempt"]) == (effects, 1)
        assert rig.conditions()["Ready"]["reason"] == "RecoveryHeld"
        if by == "policy":
            rig.change(recovery={"policy": "Restore"})
        elif by == "restore":
            restore(rig, checkpointRef={"name": "one"})
            await final(rig, "back", "Succeeded")
        else:
            rig.change(suspend=True)
            await rig.until(lambda: rig.status()["phase"] == "Suspended", "suspended")
            rig.change(suspend=False)
        await rig.until(rig.in_service, "in service")
        assert rig.conditions()["Stalled"]["status"] == "False"
        assert set(sources(rig)) == {rig.status(CHECKPOINTS, "one")["checkpointID"]}
        await to_the_end(rig)
