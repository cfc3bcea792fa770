"""What a checkpoint waits for while it is being prepared: its status names it, and is not written all the time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gym_operator.api.objects import parse_time
from gym_operator.effects.checkpoints import BLOCKERS_SECONDS
from gym_operator.effects.kube import CHECKPOINTS
from gym_operator.plugin.screen import Output
from gym_operator.plugin.verbs.status import status
from gym_rig.collecting import SLOWLY, rows
from gym_rig.operated import OperatedRig, operated
from gym_rig.user import STACK, Page, at_work, cluster_of
from gym_rig.virtual import now
from gym_servers.participants.base import Survey
from gym_servers.protocol.messages import Blocker


def holds_up(rig: OperatedRig, blocker: Callable[[], Blocker]) -> Callable[[], None]:
    """The agent lets nobody pass, for this; what ends that."""
    agent = rig.cell.processes_by_name["agent"].server.participant
    agent.survey = lambda: Survey([blocker()])  # type: ignore[method-assign]

    def free() -> None:
        del agent.survey
        agent.gate.touch()

    return free


def named(rig: OperatedRig) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rig.status(CHECKPOINTS, "one").get("blockers") or []
    return found


def writes(rig: OperatedRig) -> int:
    return rig.kube.writes.count(("status", CHECKPOINTS, "one"))


async def test_what_a_checkpoint_waits_for_is_in_its_status_while_it_waits(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        began = now() - 3
        free = holds_up(rig, lambda: Blocker(id="7-0", where="verify", age_seconds=now() - began))
        rig.checkpoint("one", timeouts={"prepare": "5m"})
        await rig.until(lambda: named(rig), "it says what it waits for")
        assert rig.status(CHECKPOINTS, "one")["phase"] == "Preparing"
        blocker = dict(named(rig)[0])
        assert abs(parse_time(blocker.pop("since")) - began) <= 1
        assert blocker == {"cell": 0, "participant": "agent", "id": "7-0", "where": "verify", "ageSeconds": 0}
        before = writes(rig)
        await asyncio.sleep(40)
        assert writes(rig) == before, "that it gets older is no news"
        page = Page()
        await status(cluster_of(rig), page, STACK, Output.TABLE, watch=False)
        (line,) = [line for line in page.lines if line[:1] == ["7-0"]]
        assert line[:4] == ["7-0", "0", "agent", "verify"]
        assert 40 <= int(line[4].rstrip("s")) <= 70
        free()
        await rig.until(lambda: rig.final("one"), "final")
        assert rig.status(CHECKPOINTS, "one")["phase"] == "Succeeded"
        assert named(rig) == []


async def test_however_often_it_waits_for_something_else_it_is_written_now_and_then(tmp_path: Path) -> None:
    async with operated(tmp_path, rows(), rate=SLOWLY) as rig:
        await at_work(rig)
        holds_up(rig, lambda: Blocker(id=f"{int(now())}-0", where="verify", age_seconds=0))
        rig.checkpoint("one", timeouts={"prepare": "80s"})
        await rig.until(lambda: named(rig), "it says what it waits for")
        (first,), before = named(rig), writes(rig)
        await asyncio.sleep(4 * BLOCKERS_SECONDS)
        assert 2 <= writes(rig) - before <= 5
        (last,) = named(rig)
        assert last["id"] > first["id"]
        await rig.until(lambda: rig.final("one"), "final")
        assert rig.status(CHECKPOINTS, "one")["reason"] == "PrepareTimeout"
        (blocker,) = named(rig)
        assert "since" not in blocker
