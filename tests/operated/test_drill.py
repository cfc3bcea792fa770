"""`kubectl gym drill`: it says what a restore would do, the run does not notice, and nothing is left of it."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest

from gym_operator.effects.kube import CHECKPOINTS, EVENTS, PODS, RESTORES, STACKS, Body, KubeError, Resource
from gym_operator.plugin.cluster import Cluster, UserKube
from gym_operator.plugin.exits import NotDone, OutOfReach, PluginError, TookTooLong, Unusable
from gym_operator.plugin.scratch import empty
from gym_operator.plugin.screen import Screen
from gym_operator.plugin.verbs.drill import drill
from gym_operator.rules.cell_record import from_document
from gym_rig.beside import StackBeside, beside
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_rig.virtual import now
from gym_servers.control.plane import ControlPlane
from gym_servers.engine.rows import counter_rows
from gym_servers.local.demo import account_of
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.ownership import OWNER, Owner, claim
from gym_servers.storage.store import StorageError

ROWS = 6
SLOWLY = 5.0
NAME = "rig-drill"
NAMESPACE = IDENTITY.namespace


def rows() -> Any:
    return counter_rows(ROWS, 1)


class Page(Screen):
    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        super().__init__(self.out, self.err)


async def drilled(rig: OperatedRig, page: Page | None = None, **options: Any) -> Page:
    page = page or Page()
    asked: dict[str, Any] = {"wanted": None, "name": None, "own_classes": False, "seconds": 120.0, **options}
    await drill(Cluster(cast("UserKube", rig.kube), NAMESPACE, now), page, IDENTITY.name, **asked)
    return page


async def with_a_checkpoint(rig: OperatedRig, name: str = "one") -> Body:
    await rig.until(rig.all_in_service, "in service")
    effects = rig.cell.effects()
    await rig.until(lambda: rig.cell.effects() >= effects + 2, "tools were called")
    rig.checkpoint(name)
    await rig.until(lambda: rig.final(name), f"{name} is final")
    status = rig.status(CHECKPOINTS, name)
    assert status["phase"] == "Succeeded", status
    await rig.until(lambda: (rig.status().get("lastCheckpoint") or {}).get("name") == name, "it is told")
    return status


def objects(rig: OperatedRig) -> set[tuple[Resource, str | None, str]]:
    return {key for key in rig.kube.objects if key[0] != EVENTS}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def others_files(rig: OperatedRig) -> list[str]:
    """What lies beside the run's own folder."""
    return [key for key in files(rig.folder / "checkpoints") if not key.startswith(f"{IDENTITY.uid}/")]


async def nothing_is_left(rig: OperatedRig, before: set[tuple[Resource, str | None, str]]) -> None:
    assert objects(rig) == before
    assert others_files(rig) == []


async def to_the_end(rig: OperatedRig) -> None:
    await rig.until(rig.complete, "complete")
    record = from_document(rig.record())
    assert record is not None
    counted = account_of(rig.cell.folder, record, ROWS)
    assert counted.ok, counted.problems
    assert (counted.continued, counted.restarted, record.attempt) == (0, 0, 0), "it never knew"


async def test_a_drill_says_what_would_continue_and_the_run_does_not_notice(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig, beside(rig, NAME) as other:
        taken = await with_a_checkpoint(rig)
        before, pods, checkpoint = objects(rig), rig.pods(), rig.kube.objects[CHECKPOINTS, NAMESPACE, "one"]
        saved = files(Path(taken["uri"]))
        page = await drilled(rig)
        told = f"checkpoint one can be restored: rollouts that would continue: {taken['episodes']}"
        assert page.out.getvalue() == f"{told}\n"
        assert len(other.uids) == 1, "it was really made"
        await nothing_is_left(rig, before)
        assert (rig.pods(), rig.kube.objects[CHECKPOINTS, NAMESPACE, "one"]) == (pods, checkpoint)
        assert files(Path(taken["uri"])) == saved
        await to_the_end(rig)


async def test_nothing_that_was_restored_runs_or_is_claimed_however_long_it_stands(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig, beside(rig, NAME) as other:
        await with_a_checkpoint(rig)
        stood: list[dict[str, Any]] = []
        removed = rig.kube.delete

        async def late(resource: Resource, *arguments: Any, **options: Any) -> None:
            if resource == STACKS and other.cells and not stood:
                await asyncio.sleep(300)
                assert not [key for key in files(rig.folder / "output") if other.uids[-1] in key], (
                    "nothing is claimed"
                )
                participants = other.cells[0].processes_by_name
                stood.append(dict(participants["env"].server.participant.survey().counts))
            await removed(resource, *arguments, **options)

        rig.kube.delete = late  # type: ignore[method-assign]
        await drilled(rig, wanted="one")
        episodes = rig.status(CHECKPOINTS, "one")["episodes"]
        assert stood == [{"live": 0, "unclaimed": episodes}], "what is restored stands, and nothing runs"
        await to_the_end(rig)


async def test_every_cell_of_a_checkpoint_has_its_own_whatever_the_stack_has_now(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=2) as rig, beside(rig, NAME) as other:
        taken = await with_a_checkpoint(rig)
        rig.change(cells=1, scaleDown={"drainTimeout": "0s"})
        before = {key for key in objects(rig) if not key[2].endswith("-1")}
        page = await drilled(rig)
        assert sorted(other.cells) == [0, 1]
        assert page.out.getvalue().endswith(f"continue: {taken['episodes']}\n")
        assert {key for key in objects(rig) if not key[2].endswith("-1")} == before
        assert others_files(rig) == []


@pytest.mark.parametrize("state", ["suspended", "given up"])
async def test_a_stack_that_does_not_run_can_be_drilled(tmp_path: Path, state: str) -> None:
    recovery = {"recovery": {"backoffLimit": 0}} if state == "given up" else {}
    async with operated(tmp_path, rows(), rate=SLOWLY, **recovery) as rig, beside(rig, NAME):
        await with_a_checkpoint(rig)
        if state == "suspended":
            rig.change(suspend=True)
            await rig.until(lambda: rig.status()["phase"] == "Suspended" and not rig.pods(), "suspended")
        else:
            rig.cell.kill("agent")
            await rig.until(lambda: rig.status()["phase"] == "Failed", "given up")
        before = objects(rig)
        assert "can be restored" in (await drilled(rig)).out.getvalue()
        await nothing_is_left(rig, before)


async def test_what_cannot_be_restored_is_found_out_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ControlPlane.restore

    async def fails(self: ControlPlane, request: Any) -> Any:
        if self.author.instance == "agent":
            raise ProtocolError("invalid_checkpoint_state", "not of a form that this version reads")
        return await original(self, request)

    async with operated(tmp_path, rows(), rate=SLOWLY) as rig, beside(rig, NAME):
        await with_a_checkpoint(rig)
        before = objects(rig)
        monkeypatch.setattr(ControlPlane, "restore", fails)
        with pytest.raises(NotDone, match="checkpoint one could not be restored: RecordsRefused"):
            await drilled(rig)
        monkeypatch.setattr(ControlPlane, "restore", original)
        await nothing_is_left(rig, before)
        await to_the_end(rig)


async def test_pods_that_do_not_come_up_end_it_in_time_and_nothing_is_left(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig, beside(rig, NAME) as other:
        await with_a_checkpoint(rig)
        before = objects(rig)
        other.pods_may_start = False
        with pytest.raises(TookTooLong, match="is not done after 30 s: it is given up"):
            await drilled(rig, seconds=30.0)
        await nothing_is_left(rig, before)


async def test_pods_are_waited_for_before_it_is_over(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig, beside(rig, NAME) as other:
        await with_a_checkpoint(rig)
        before, other.pods_last = objects(rig), 100.0
        page = await drilled(rig)
        assert "its pods end" in page.err.getvalue()
        await nothing_is_left(rig, before)


def made(rig: OperatedRig, resource: Resource) -> bool:
    return (resource, NAMESPACE, NAME) in rig.kube.objects


STAGES: dict[str, Callable[[OperatedRig, StackBeside], object]] = {
    "the stack is made": lambda rig, other: made(rig, STACKS),
    "the restore is made": lambda rig, other: made(rig, RESTORES),
    "its pods are there": lambda rig, other: other.pods(),
    "it is deleted": lambda rig, other: other.uids and not made(rig, STACKS),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_whoever_interrupts_it_again_and_again_leaves_nothing(tmp_path: Path, stage: str) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig, beside(rig, NAME) as other:
        await with_a_checkpoint(rig)
        before, other.pods_last, page = objects(rig), 30.0, Page()
        running = asyncio.create_task(drilled(rig, page))
        await rig.until(lambda: STAGES[stage](rig, other), stage)
        for _ in range(2):
            running.cancel()
            await asyncio.sleep(2)
        with pytest.raises(asyncio.CancelledError):
            await running
        assert f"interrupted: GymStack {NAME} is deleted first" in page.err.getvalue()
        await nothing_is_left(rig, before)


def lost_answer(rig: OperatedRig, of: Resource, after: float) -> Callable[..., Awaitable[Body]]:
    """A request whose answer does not come; it lands so much later."""
    create = rig.kube.create

    async def lands(resource: Resource, namespace: str, body: Body) -> Body:
        if resource != of:
            return await create(resource, namespace, body)
        asyncio.get_running_loop().call_later(after, lambda: rig.kube.put(resource, namespace, body))
        await asyncio.sleep(min(after, 1.0))
        raise KubeError(0, "the API server does not answer: TimeoutError")

    return lands


@pytest.mark.parametrize("resource", [STACKS, RESTORES])
@pytest.mark.parametrize("after", [0.0, 10.0])
async def test_what_was_made_by_a_request_without_an_answer_is_deleted_too(
    tmp_path: Path, resource: Resource, after: float
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig, beside(rig, NAME):
        await with_a_checkpoint(rig)
        before, create = objects(rig), rig.kube.create
        rig.kube.create = lost_answer(rig, resource, after)  # type: ignore[method-assign]
        with pytest.raises(OutOfReach, match="does not answer"):
            await drilled(rig)
        rig.kube.create = create  # type: ignore[method-assign]
        await asyncio.sleep(60)
        await nothing_is_left(rig, before)


async def test_an_api_server_that_is_away_is_waited_for_to_delete_it(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig, beside(rig, NAME):
        await with_a_checkpoint(rig)
        before, page = objects(rig), Page()
        running = asyncio.create_task(drilled(rig, page))
        await rig.until(lambda: made(rig, RESTORES), "it is under way")
        rig.kube.dead = True
        running.cancel()
        await rig.until(lambda: "it is asked again" in page.err.getvalue(), "it cannot be deleted")
        rig.kube.dead = False
        with pytest.raises(asyncio.CancelledError):
            await running
        await nothing_is_left(rig, before)


@pytest.mark.parametrize("resource", [STACKS, RESTORES])
async def test_who_may_not_delete_makes_nothing(tmp_path: Path, resource: Resource) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig, beside(rig, NAME) as other:
        await with_a_checkpoint(rig)
        rig.kill_operator()
        rig.kube.permitted = lambda verb, kind, name: (verb, kind) != ("delete", resource)
        with pytest.raises(OutOfReach, match=f"you may not delete {resource.plural}.gymops.dev"):
            await drilled(rig)
        assert not other.uids


@pytest.mark.parametrize(
    ("labels", "says"), [({}, "no drill has made it"), ({"gymops.dev/drill-of": "x"}, "was killed")]
)
async def test_a_stack_that_has_the_name_is_left_alone(tmp_path: Path, labels: dict[str, str], says: str) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await with_a_checkpoint(rig)
        rig.kube.put(STACKS, NAMESPACE, {"metadata": {"name": NAME, "labels": labels}, "spec": {}})
        with pytest.raises(Unusable, match=says):
            await drilled(rig)
        assert made(rig, STACKS)


async def test_a_stack_that_takes_the_name_meanwhile_is_left_alone(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await with_a_checkpoint(rig)
        create = rig.kube.create

        async def late(resource: Resource, namespace: str, body: Body) -> Body:
            if resource == STACKS:
                rig.kube.put(STACKS, NAMESPACE, {"metadata": {"name": NAME}, "spec": {}})
            return await create(resource, namespace, body)

        rig.kube.create = late  # type: ignore[method-assign]
        with pytest.raises(Unusable, match=f"GymStack {NAME} exists already"):
            await drilled(rig)
        assert made(rig, STACKS)


async def test_without_a_good_checkpoint_nothing_is_made(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig, beside(rig, NAME) as other:
        rig.checkpoint("failed", timeouts={"prepare": "never"})
        await rig.until(lambda: rig.final("failed"), "failed")
        for wanted, says in ((None, "has no checkpoint that succeeded"), ("failed", "GymCheckpoint failed")):
            with pytest.raises(PluginError, match=says):
                await drilled(rig, wanted=wanted)
        assert not other.uids


async def test_where_the_pods_may_not_be_listed_its_folder_stays_and_that_is_said(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig, beside(rig, NAME) as other:
        await with_a_checkpoint(rig)
        before, page = objects(rig), Page()
        running = asyncio.create_task(drilled(rig, page))
        await rig.until(lambda: other.uids and not made(rig, STACKS), "it is deleted")
        rig.kube.permitted = lambda verb, resource, name: (verb, resource) != ("list", PODS)
        await running
        assert "you may not list pods in namespace local" in page.err.getvalue()
        (left,) = {key.partition("/")[0] for key in others_files(rig)}
        assert f"files stay in {rig.folder / 'checkpoints' / left}" in page.err.getvalue()
        assert objects(rig) == before


def test_only_the_folder_of_that_very_stack_is_emptied(tmp_path: Path) -> None:
    ours, theirs = DirectoryStore(tmp_path / "ours"), DirectoryStore(tmp_path / "theirs")
    claim(ours, Owner(cluster="c", stack_uid="ours", namespace="n", name="x"))
    claim(theirs, Owner(cluster="c", stack_uid="another", namespace="n", name="x"))
    for store, uid in ((ours, ""), (ours, "theirs"), (theirs, "theirs"), (DirectoryStore(tmp_path), "ours")):
        with pytest.raises(StorageError, match="nothing of it is removed"):
            empty(store, uid)
    assert ours.get(OWNER) and theirs.get(OWNER)
    ours.create("cell-0/attempts/1", b"1")
    assert empty(ours, "ours") == 2
    assert ours.list("") == {}
