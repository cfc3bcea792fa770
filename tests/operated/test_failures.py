"""What is taken away, replaced or applied again in the middle of everything: each ends, is said, and the next thing
works. A namespace always ends."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_operator.api.names import DATA_FINALIZER
from gym_operator.effects.kube import CHECKPOINTS, CHILDREN, EVENTS, PODS, RESTORES, SCHEDULES, SECRETS, STACKS, Body
from gym_operator.rules.cell_record import from_document
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_rig.virtual import now
from gym_servers.engine.rows import counter_rows
from gym_servers.local.demo import account_of
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.store import ObjectMissing, StorageError

ROWS = 6
SLOWLY = 5.0
PHASES = ["Preparing", "Committing", "Publishing"]
OURS = (STACKS, CHECKPOINTS, RESTORES, SCHEDULES)
NS = IDENTITY.namespace


def rows() -> Any:
    return counter_rows(ROWS, 1)


async def under_way(rig: OperatedRig) -> None:
    await rig.until(rig.all_in_service, "in service")
    await rig.until(lambda: rig.cell.effects() >= 2, "tools were called")


async def taken(rig: OperatedRig, name: str, **spec: Any) -> dict[str, Any]:
    rig.checkpoint(name, **spec)
    await rig.until(lambda: rig.final(name), f"{name} is final")
    status = rig.status(CHECKPOINTS, name)
    assert status["phase"] == "Succeeded", status
    return status


def published(status: dict[str, Any]) -> bool:
    try:
        return "uri" in status and read_publication(open_store(status["uri"]).get(CHECKPOINT)).state == "published"
    except ObjectMissing:
        return False


async def to_the_end(rig: OperatedRig) -> None:
    await rig.until(rig.complete, "complete")
    record = from_document(rig.record())
    assert record is not None
    counted = account_of(rig.cell.folder, record, ROWS)
    assert counted.ok, counted.problems


def ours(rig: OperatedRig) -> list[str]:
    """Our objects that are there."""
    return sorted(name for kind, _, name in rig.kube.objects if kind in OURS)


# ---- deleted in the middle ----------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
async def test_a_stack_deleted_mid_checkpoint_ends_it_as_storage_says(tmp_path: Path, phase: str) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await under_way(rig)
        rig.checkpoint("lost")
        await rig.reaches("lost", phase)
        rig.kube.remove(STACKS, NS, IDENTITY.name)
        await rig.until(lambda: rig.final("lost"), "final")
        status = rig.status(CHECKPOINTS, "lost")
        assert (status["phase"] == "Succeeded") == published(status), status
        assert phase == "Publishing" or status["phase"] == "Failed"
        await asyncio.sleep(200)  # whatever was under way would have landed
        assert (status["phase"] == "Succeeded") == published(status)
        assert ours(rig) == ["lost"]


@pytest.mark.parametrize(("phase", "policy"), [*((phase, "Retain") for phase in PHASES), ("Publishing", "Delete")])
async def test_a_checkpoint_deleted_mid_publish_or_before_leaves_nobody_parked_and_the_next_one_works(
    tmp_path: Path, phase: str, policy: str
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await under_way(rig)
        rig.checkpoint("unwanted", deletionPolicy=policy)
        await rig.reaches("unwanted", phase)
        status = rig.status(CHECKPOINTS, "unwanted")
        rig.kube.let_go(CHECKPOINTS, NS, "unwanted")
        await rig.until(lambda: ours(rig) == [IDENTITY.name] and "open" not in rig.record(), "gone and settled")
        assert rig.phases() == {"idle"}
        assert policy == "Retain" or not published(status)
        kept = await taken(rig, "next")
        rig.kube.remove(PODS, NS, "rig-agent-0")
        await rig.until(lambda: rig.in_service(1), "recovered")
        assert rig.part()["recoveries"][-1]["checkpoint"] == kept["checkpointID"]


# ---- the operator is replaced, or its stack is changed --------------------------------------------------------


@pytest.mark.parametrize("phase", PHASES)
async def test_helm_upgrade_of_the_operator_mid_checkpoint(tmp_path: Path, phase: str) -> None:
    """Its pod is told to end, and another one comes: the checkpoint ends, nothing dies, the next one works."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await under_way(rig)
        rig.checkpoint("torn")
        await rig.reaches("torn", phase)
        await rig.stop_operator()
        assert rig.phases() == {"idle"}, "nobody waits for the new one"
        await asyncio.sleep(10)
        rig.start_operator()
        await rig.until(lambda: rig.final("torn"), "final")
        status = rig.status(CHECKPOINTS, "torn")
        assert (status["phase"] == "Succeeded") == published(status), status
        await taken(rig, "next")
        assert rig.record().get("attempt", 0) == 0
        await to_the_end(rig)


@pytest.mark.parametrize(
    ("phase", "changed"), [("Preparing", False), ("Committing", True), ("Publishing", True), ("Publishing", False)]
)
async def test_helm_upgrade_of_the_stack_mid_checkpoint_disturbs_it_not(
    tmp_path: Path, phase: str, changed: bool
) -> None:
    """With its values as they were, or others that no server reads."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await under_way(rig)
        pods = rig.pods()
        rig.checkpoint("one")
        await rig.reaches("one", phase)
        if changed:
            rig.change(checkpoints={**rig.spec["checkpoints"], "prepareTimeout": "90s", "commitTimeout": "3m"})
        else:
            apply_again(rig)
        await rig.until(lambda: rig.final("one"), "final")
        assert rig.status(CHECKPOINTS, "one")["phase"] == "Succeeded"
        assert rig.pods() == pods
        await rig.until(lambda: rig.status()["observedGeneration"] == 1 + changed, "seen")
        await taken(rig, "next")
        await to_the_end(rig)


def apply_again(rig: OperatedRig) -> None:
    """As `kubectl apply` or a GitOps tool does with what is there already: it writes its own annotation at most."""
    for (kind, namespace, name), body in list(rig.kube.objects.items()):
        if kind in OURS:
            noted = {**(body["metadata"].get("annotations") or {}), "example.com/applied": str(now())}
            metadata = {**body["metadata"], "annotations": noted}
            rig.kube.set(kind, str(namespace), name, spec=copy.deepcopy(body["spec"]), metadata=metadata)


async def test_applying_the_manifests_again_and_again_causes_no_drift_and_no_new_checkpoint(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=0.5) as rig:
        await under_way(rig)
        await taken(rig, "one", deletionPolicy="Delete")
        spec = {"stackRef": {"name": IDENTITY.name}, "checkpointRef": {"name": "one"}}
        rig.kube.put(RESTORES, NS, {"metadata": {"name": "back"}, "spec": spec})
        await rig.until(lambda: rig.status(RESTORES, "back").get("phase") == "Succeeded", "restored")
        await asyncio.sleep(30)

        def standing() -> dict[str, Body]:
            """All that could drift: specs, finalizers, and what came of things."""
            found = {}
            for (kind, _, name), body in rig.kube.objects.items():
                if kind == EVENTS:
                    continue
                said = {k: v for k, v in (body.get("status") or {}).items() if kind in (CHECKPOINTS, RESTORES)}
                held = body["metadata"].get("finalizers")
                found[f"{kind.plural}/{name}"] = {"spec": body.get("spec"), "status": said, "finalizers": held}
            return copy.deepcopy(found)

        before, records = standing(), rig.record()
        checkpoints = {path.parent for path in Path(rig.cell.root).rglob(CHECKPOINT)}  # noqa: ASYNC240 - a test's disk
        for _ in range(20):
            apply_again(rig)
            await asyncio.sleep(7)
        assert standing() == before
        assert rig.record() == records
        assert {path.parent for path in Path(rig.cell.root).rglob(CHECKPOINT)} == checkpoints  # noqa: ASYNC240
        children = set(CHILDREN.values()) - {SECRETS}
        rig.kube.writes.clear()
        apply_again(rig)
        await asyncio.sleep(130)  # it looks at its children meanwhile
        assert not [write for write in rig.kube.writes if write[1] in children]


# ---- many, and too early --------------------------------------------------------------------------------------


async def test_20_checkpoints_created_at_once_are_taken_one_after_the_other(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=1.0) as rig:
        await under_way(rig)
        names = [f"c{number:02}" for number in range(20)]
        for name in reversed(names):
            rig.checkpoint(name)
        most = 0
        watch = rig.kube.watch

        def watching(resource: Any, deleted: bool, body: Any) -> None:
            nonlocal most
            watch(resource, deleted, body)
            most = max(most, sum(rig.status(CHECKPOINTS, name).get("phase") in PHASES for name in names))

        rig.kube.watch = watching
        await rig.until(lambda: all(rig.final(name) for name in names), "all final")
        assert most == 1
        statuses = [rig.status(CHECKPOINTS, name) for name in names]
        assert {status["phase"] for status in statuses} == {"Succeeded"}
        places = [status["uri"].rsplit("/", 1)[1][7:13] for status in statuses]
        assert places == [f"{number + 1:06}" for number in range(20)]
        await rig.until(lambda: rig.status()["lastCheckpoint"]["name"] == "c19", "told")
        assert rig.record().get("attempt", 0) == 0


async def test_a_checkpoint_of_a_recovering_stack_waits_for_it(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await under_way(rig)
        await taken(rig, "before")
        rig.held_back.add(0)
        rig.kube.remove(PODS, NS, "rig-agent-0")
        await rig.until(lambda: rig.status()["phase"] == "Recovering", "recovering")
        rig.checkpoint("early")
        await rig.until(lambda: rig.status(CHECKPOINTS, "early").get("message"), "told")
        assert rig.status(CHECKPOINTS, "early")["phase"] == "Pending"
        await asyncio.sleep(20)
        assert rig.status(CHECKPOINTS, "early")["phase"] == "Pending"
        rig.held_back.clear()
        await rig.until(lambda: rig.final("early"), "final")
        status = rig.status(CHECKPOINTS, "early")
        assert (status["phase"], status["cells"][0]["attempt"]) == ("Succeeded", 1)
        await to_the_end(rig)


# ---- a namespace ----------------------------------------------------------------------------------------------


def fill(rig: OperatedRig) -> None:
    """One of each, in every state: finished, under way, waiting, of no stack."""
    rig.checkpoint("under-way", deletionPolicy="Delete")
    rig.checkpoint("waits", deletionPolicy="Delete")
    rig.checkpoint("of-nobody", deletionPolicy="Delete", stackRef={"name": "nobody"})
    rig.checkpoint("kept")
    template = {"spec": {"stackRef": {"name": IDENTITY.name}, "deletionPolicy": "Delete"}}
    rig.kube.put(SCHEDULES, NS, {"metadata": {"name": "often"}, "spec": {"every": "10s", "template": template}})
    spec = {"stackRef": {"name": IDENTITY.name}, "checkpointRef": {"name": "never-made"}}
    rig.kube.put(RESTORES, NS, {"metadata": {"name": "back"}, "spec": spec})


def end_namespace(rig: OperatedRig, order: Callable[[str], Any]) -> None:
    """As the API server does: everything is deleted, in an order of its own, and nothing can be created."""
    rig.kube.permitted = lambda verb, resource, name: verb != "create"
    for kind, namespace, name in sorted(rig.kube.objects, key=lambda key: order(f"{key[0].plural}/{key[2]}")):
        if namespace == NS and (kind, namespace, name) in rig.kube.objects:
            rig.kube.let_go(kind, NS, name)


@pytest.mark.parametrize("order", [lambda text: text, lambda text: text[::-1], lambda text: [-ord(c) for c in text]])
@pytest.mark.parametrize("storage", ["good", "away"])
async def test_deletion_of_a_namespace_always_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: str, order: Callable[[str], Any]
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await under_way(rig)
        done = await taken(rig, "done", deletionPolicy="Delete")
        fill(rig)
        await rig.until(lambda: rig.record().get("open"), "one is open")
        if storage == "away":

            def fails(*_: Any) -> Any:
                raise StorageError("the bucket does not answer")

            for verb in ("create", "get", "list", "delete"):
                monkeypatch.setattr(DirectoryStore, verb, fails)
        end_namespace(rig, order)
        began = now()
        while ours(rig) and now() - began < 1500:  # noqa: ASYNC110 - longer than `until` waits
            await asyncio.sleep(1)
        assert ours(rig) == []
        assert now() - began < (300 if storage == "good" else 1000)
        assert storage == "away" or not published(done), "its data went with it"


@pytest.mark.parametrize("way_out", ["operator", "patch"])
async def test_operator_uninstalled_first_holds_only_what_was_to_take_its_data_along(
    tmp_path: Path, way_out: str
) -> None:
    """And both ways that docs/operations.md names let that go: another operator, or giving the data up."""
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await under_way(rig)
        tied = await taken(rig, "tied", deletionPolicy="Delete")
        loose = await taken(rig, "loose")
        await rig.stop_operator()
        rig.kube.put(RESTORES, NS, {"metadata": {"name": "back"}, "spec": {"stackRef": {"name": IDENTITY.name}}})
        end_namespace(rig, lambda text: text)
        assert ours(rig) == ["tied"]
        if way_out == "operator":
            rig.start_operator()
            await rig.until(lambda: ours(rig) == [], "gone")
            assert not published(tied)
        else:
            found = rig.kube.objects[CHECKPOINTS, NS, "tied"]
            assert found["metadata"]["finalizers"] == [DATA_FINALIZER]
            rig.kube.remove(CHECKPOINTS, NS, "tied")  # what an API server does once its finalizers are gone
            assert published(tied)
        assert published(loose)
