"""What `kubectl gym` asks of a stack with an operator at work: its status, a checkpoint, a restore."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gym_operator.effects.kube import CHECKPOINTS, RESTORES, STACKS, KubeError, Resource
from gym_operator.plugin.exits import NotDone, OutOfReach, PluginError, TookTooLong, Unusable
from gym_operator.plugin.screen import Output
from gym_operator.plugin.verbs.checkpoint import checkpoint
from gym_operator.plugin.verbs.checkpoints import checkpoints
from gym_operator.plugin.verbs.restore import restore
from gym_operator.plugin.verbs.status import status
from gym_rig.cell import IDENTITY
from gym_rig.collecting import SLOWLY, rows
from gym_rig.operated import OperatedRig, operated
from gym_rig.user import STACK, Page, at_work, cluster_of, taken
from gym_servers.participants.base import Survey
from gym_servers.protocol.messages import Blocker

# ---- status ------------------------------------------------------------------------------------------------


async def test_status_shows_cells_participants_attempts_and_the_last_checkpoint(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY, cells=2) as rig:
        await at_work(rig)
        await taken(rig, "one")
        await rig.until(lambda: "lastCheckpoint" in rig.status(), "it is told")
        page = Page()
        await status(cluster_of(rig), page, STACK, Output.WIDE, watch=False)
        assert page.lines[1][:4] == ["rig", "Running", "0", "2/2"]
        assert "one" in page.lines[1]
        assert ["0", "Running", "0", "5", "idle"] in [line[:5] for line in page.lines]
        assert ["1", "env-1", "environment"] not in page.lines
        assert ["1", "agent", "agent", "idle", "rig-agent-1"] in [line[:5] for line in page.lines]
        document = Page()
        await status(cluster_of(rig), document, STACK, Output.JSON, watch=False)
        told = json.loads(document.out.getvalue())
        assert (told["name"], told["lastCheckpoint"]["name"], len(told["cells"])) == ("rig", "one", 2)


async def test_a_watch_shows_what_changes_and_ends_with_the_stack(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        page = Page()
        watch = asyncio.create_task(status(cluster_of(rig), page, STACK, Output.TABLE, watch=True))
        rig.checkpoint("held", timeouts={"prepare": "never"})
        await rig.until(lambda: "held" in page.out.getvalue(), "the checkpoint is shown")
        rig.kube.remove(CHECKPOINTS, IDENTITY.namespace, "held")
        shown = len(page.out.getvalue())
        await rig.until(lambda: len(page.out.getvalue()) > shown, "and what comes of it")
        assert "held" not in page.out.getvalue()[shown:]
        rig.kube.remove(STACKS, IDENTITY.namespace, STACK)
        with pytest.raises(Unusable, match="no GymStack rig"):
            await watch


# ---- checkpoint, checkpoints -------------------------------------------------------------------------------


async def take(rig: OperatedRig, page: Page, **wanted: Any) -> None:
    asked: dict[str, Any] = {"name": "one", "labels": [], "stop_after": False, "wait": 300.0, **wanted}
    await checkpoint(cluster_of(rig), page, STACK, **asked)


async def test_a_checkpoint_is_taken_and_waited_for(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        page = Page()
        await take(rig, page, labels=["step=7"])
        assert rig.status(CHECKPOINTS, "one")["phase"] == "Succeeded"
        created, done = page.out.getvalue().splitlines()
        assert created == "gymcheckpoint.gymops.dev/one created"
        assert done.startswith(f"checkpoint one succeeded: {rig.status(CHECKPOINTS, 'one')['episodes']} rollouts")
        assert page.told, "and how far it was, beside"
        shown = Page()
        await checkpoints(cluster_of(rig), shown, STACK, Output.TABLE)
        assert [line[:2] for line in shown.lines[1:]] == [["one", "Succeeded"]]
        assert shown.lines[1][-2:] == ["step=7", "-"]


async def test_a_name_is_made_where_none_is_given_and_one_that_is_taken_is_told(tmp_path: Path) -> None:
    async with operated(tmp_path, rows()) as rig:
        page = Page()
        await take(rig, page, name=None, wait=None)
        made = page.out.getvalue().split()[0].rpartition("/")[2]
        assert (CHECKPOINTS, IDENTITY.namespace, made) in rig.kube.objects
        assert made.startswith("rig-1970")
        with pytest.raises(Unusable, match=f"GymCheckpoint {made} exists already: give another name with --name"):
            await take(rig, page, name=made, wait=None)


async def test_a_checkpoint_that_fails_is_told_with_what_held_it_up(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        agent = rig.cell.processes_by_name["agent"].server.participant
        agent.survey = lambda: Survey([Blocker(id="7-0", where="verify", age_seconds=3)])  # type: ignore[method-assign]
        page = Page()
        with pytest.raises(NotDone, match="checkpoint one failed: PrepareTimeout: agent was not ready"):
            await take(rig, page)
        assert "7-0" in page.told.splitlines()[-1]


async def test_waiting_ends_in_time_and_the_checkpoint_goes_on(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        rig.pods_may_start = False
        with pytest.raises(TookTooLong, match="goes on"):
            await take(rig, Page(), wait=5.0)
        rig.pods_may_start = True
        await rig.until(lambda: rig.final("one"), "taken all the same")


async def test_an_api_server_that_is_away_is_waited_for(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        page = Page()
        waiting = asyncio.create_task(take(rig, page))
        await rig.until(lambda: "one" in page.told, "it waits")
        rig.kube.dead = True
        await rig.until(lambda: "does not answer" in page.told, "it is away")
        rig.kube.dead = False
        await waiting
        assert page.lines[-1][:3] == ["checkpoint", "one", "succeeded:"]


async def test_one_that_is_deleted_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        rig.pods_may_start = False
        page = Page()
        waiting = asyncio.create_task(take(rig, page))
        await rig.until(lambda: "one" in page.told, "it waits")
        rig.kube.remove(CHECKPOINTS, IDENTITY.namespace, "one")
        rig.checkpoint("one")  # somebody else's, of the same name
        with pytest.raises(Unusable, match="was deleted before it was done"):
            await waiting


async def test_who_breaks_off_the_waiting_is_told_that_it_goes_on(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        rig.pods_may_start = False
        page = Page()
        waiting = asyncio.create_task(take(rig, page))
        await rig.until(lambda: "one" in page.told, "it waits")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert page.told.splitlines()[-1] == "one: not waited for any longer: it goes on"


async def test_a_stack_without_checkpoints_says_how_to_take_one_and_one_that_is_not_there_is_told(
    tmp_path: Path,
) -> None:
    async with operated(tmp_path, rows()) as rig:
        page = Page()
        await checkpoints(cluster_of(rig), page, STACK, Output.JSON)
        assert json.loads(page.out.getvalue())["checkpoints"] == []
        assert "kubectl gym checkpoint rig" in page.told
        with pytest.raises(Unusable, match="there are rig"):
            await checkpoints(cluster_of(rig), Page(), "rigg", Output.TABLE)


# ---- restore -----------------------------------------------------------------------------------------------


async def bring_back(rig: OperatedRig, page: Page, wanted: str, **options: Any) -> None:
    asked: dict[str, Any] = {"digest": None, "name": "back", "wait": 300.0, **options}
    await restore(cluster_of(rig), page, STACK, wanted, **asked)


async def test_a_stack_is_brought_back_by_name_by_label_and_by_place(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        first = await taken(rig, "first", labels={"step": "7"})
        await taken(rig, "second")
        ways: list[tuple[str, dict[str, Any]]] = [
            ("first", {}),
            ("step=7", {}),
            (first["uri"], {"digest": first["digest"]}),
        ]
        for attempt, (wanted, options) in enumerate(ways, 1):
            page = Page()
            await bring_back(rig, page, wanted, name=f"back-{attempt}", **options)
            created, done = page.out.getvalue().splitlines()
            assert created == f"gymrestore.gymops.dev/back-{attempt} created"
            count = rig.status(RESTORES, f"back-{attempt}")["continuedCount"]
            assert done == (
                f"restore back-{attempt} succeeded: rollouts that continue from first: {count}; "
                f"cell 0 under attempt {attempt}"
            )
            assert page.told.startswith(f"back-{attempt}: "), "and how far it was, beside"
            await rig.until(rig.in_service, "in service")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("nobody", "no GymCheckpoint nobody in namespace local: there are failed"),
        ("failed", "GymCheckpoint failed failed: "),
        ("step=8", "no GymCheckpoint of stack rig that succeeded has step: 8"),
    ],
)
async def test_what_cannot_be_restored_is_refused_at_once_and_nothing_is_made(
    tmp_path: Path, wanted: str, says: str
) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        rig.checkpoint("failed", timeouts={"prepare": "never"})
        await rig.until(lambda: rig.final("failed"), "failed")
        with pytest.raises(Unusable, match=says):
            await bring_back(rig, Page(), wanted)
        assert not [key for key in rig.kube.objects if key[0] == RESTORES]


async def test_a_restore_that_fails_is_told_with_its_reason(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        first = await taken(rig, "first")
        with pytest.raises(NotDone, match=r"restore back failed: SourceInvalid: .*not the one with this digest"):
            await bring_back(rig, Page(), first["uri"], digest="0" * 64)


# ---- what goes wrong ---------------------------------------------------------------------------------------


async def test_a_name_that_is_not_there_brings_those_that_are(tmp_path: Path) -> None:
    async with operated(tmp_path, rows()) as rig:
        with pytest.raises(Unusable, match=r"no GymStack rigg in namespace local: there are rig$"):
            await cluster_of(rig).stack("rigg")
        with pytest.raises(
            Unusable, match=r"no GymStack rig in namespace elsewhere: that namespace has none; .* with -n"
        ):
            await cluster_of(rig, "elsewhere").stack("rig")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (403, "you may not get gymstacks.gymops.dev in namespace local: ask for that right"),
        (401, "log in again"),
        (0, "the API server does not answer: .*--context"),
    ],
)
async def test_what_is_missing_is_said_in_one_line(tmp_path: Path, answer: int, says: str) -> None:
    async with operated(tmp_path, rows()) as rig:
        rig.kill_operator()

        def refused(verb: str, resource: Resource, name: str) -> bool:
            text = "the API server does not answer: TimeoutError" if answer == 0 else f"refused ({answer})"
            raise KubeError(answer, text)

        rig.kube.permitted = refused
        with pytest.raises(OutOfReach, match=says) as failed:
            await cluster_of(rig).stack(STACK)
        assert isinstance(failed.value, PluginError) and "\n" not in str(failed.value)
