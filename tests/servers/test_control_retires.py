"""The control API over HTTP: retire and forget, and a retire that takes longer than its verb."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_rig.stub import VERBS, Control, Stub, refused, written
from gym_rig.virtual import settle
from gym_servers.participants.base import Survey
from gym_servers.protocol.identity import Episode
from gym_servers.protocol.phases import Phase

# ---- retire and forget -------------------------------------------------------------------------------------


async def test_retire_marks_stops_and_is_repeatable(idle: Callable[[], Control]) -> None:
    control = idle()
    control.stub.retiring.clear()
    await refused(control.call("retire", seconds=1, episode_ids=["r-a2"]), "deadline_exceeded")
    assert control.gate.fence.marks == {"r": 2}
    control.stub.retiring.set()
    assert (await control.call("retire", episode_ids=["r-a2"]))["retired"] == ["r-a2"]
    assert (await control.status())["retired"] == 1
    await control.call("forget", rollout_ids=["r"])
    assert control.gate.fence.marks == {}
    assert control.stub.forgotten == ["r"]
    await refused(control.call("retire", episode_ids=["x-a0"]), "invalid_request")


@pytest.mark.parametrize(("verb", "names"), [("retire", "episode_ids"), ("forget", "rollout_ids")])
async def test_a_name_that_comes_twice_in_a_list_is_meant_once(
    idle: Callable[[], Control], verb: str, names: str
) -> None:
    control = idle()
    await control.call(verb, "v", **{names: ["r", "r", "s", "r"]})
    assert [episode.key for episode in control.stub.retired] == (["r", "s"] if verb == "retire" else [])
    assert (await control.status())["report"]["ready"]
    assert (await control.call("prepare", restarts=["x", "x"]))["phase"] == "prepared"
    assert (await control.commit(episode_ids=["r", "r"], live=["s", "s"]))["episodes"] == ["r"]
    other = Control(control.folder, session="session-2")
    assert (await other.restore(episode_ids=["r", "r"]))["restored"] == ["r-a1"]


@pytest.mark.parametrize("verb", ["retire", "forget"])
async def test_retire_and_forget_never_touch_an_open_checkpoint(idle: Callable[[], Control], verb: str) -> None:
    control = idle()
    await control.call("prepare")
    await refused(control.call(verb, "v", **VERBS[verb]), "invalid_phase")
    assert control.gate.fence.marks == {}
    await control.commit()
    await refused(control.call(verb, "v", **VERBS[verb]), "invalid_phase")
    await control.call("resume")
    await control.call(verb, "v", **VERBS[verb])


async def test_a_retire_of_what_is_unclaimed_leaves_the_rest_and_can_be_repeated(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    control = idle()
    monkeypatch.setattr(Stub, "survey", lambda self: Survey(unclaimed=frozenset({"r", "s"} - set(gone))))
    gone: list[str] = []
    for _ in range(2):
        reply = await control.call("retire", "v", episode_ids=["claimed", "r"], unclaimed=True)
        assert reply["retired"] == ["r"]
        gone.append("r")
    assert {episode.key for episode in control.stub.retired} == {"r"}
    assert control.gate.fence.marks == {"r": 0}
    assert (await control.call("retire", "v", episode_ids=["claimed"], unclaimed=True))["retired"] == []


async def test_retire_and_forget_are_for_a_process_in_service_or_restored(
    fresh: Callable[[], Control], tmp_path: Path
) -> None:
    await written(Control(tmp_path, coordinated=False))
    control = fresh()
    for verb in ("retire", "forget"):
        await refused(control.call(verb, "v", **VERBS[verb]), "invalid_phase")
    await control.restore(episode_ids=["r", "s"])
    assert (await control.call("retire", "v", episode_ids=["s-a1"]))["retired"] == ["s-a1"]
    assert (await control.call("forget", "v", rollout_ids=["s"]))["forgotten"] == ["s"]
    assert control.gate.phase is Phase.RESTORED


# ---- a retire that takes longer than its verb --------------------------------------------------------------


async def test_a_retire_that_is_cut_short_is_a_blocker_until_it_is_done(idle: Callable[[], Control]) -> None:
    control = idle()
    control.stub.retiring.clear()
    await refused(control.call("retire", "v", seconds=2, episode_ids=["r", "s-a1"]), "deadline_exceeded")
    await asyncio.sleep(3)
    report = (await control.status())["report"]
    assert (report["ready"], report["blocker_count"]) == (False, 2)
    assert sorted((b["id"], b["where"], round(b["age_seconds"])) for b in report["blockers"]) == [
        ("r", "retire", 5),
        ("s-a1", "retire", 5),
    ]
    reply = await control.call("prepare", seconds=1)
    assert (reply["phase"], reply["report"]["blockers"][0]["where"]) == ("preparing", "retire")
    waiting = asyncio.create_task(control.call("prepare"))
    await settle()
    control.stub.retiring.set()
    assert (await waiting)["phase"] == "prepared"
    assert control.stub.retired == [Episode("r", 0), Episode("s", 1)]
    await control.call("resume")
    assert (await control.status())["retired"] == 2


async def test_a_repeated_retire_joins_what_is_under_way(idle: Callable[[], Control]) -> None:
    control = idle()
    control.stub.retiring.clear()
    await refused(control.call("retire", "v", seconds=1, episode_ids=["r"]), "deadline_exceeded")
    again = asyncio.create_task(control.call("retire", "v2", episode_ids=["r", "s"]))
    await settle()
    control.stub.retiring.set()
    assert (await again)["retired"] == ["r", "s"]
    assert sorted(control.stub.retired) == [Episode("r", 0), Episode("s", 0)]
    assert (await control.status())["report"]["ready"]


async def test_a_retire_that_fails_is_told_blocks_and_can_be_repeated(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    control = idle()

    async def broken(self: Stub, episodes: Any) -> None:
        raise RuntimeError("a fault with a SECRET in it")

    with monkeypatch.context() as patched:
        patched.setattr(Stub, "retire", broken)
        control.plane._retires._retire = control.stub.retire
        error = await refused(control.call("retire", "v", episode_ids=["r"]), "checkpoint_error")
    assert "RuntimeError" in error.detail
    assert "SECRET" not in error.detail
    assert (await control.call("prepare", seconds=1))["phase"] == "preparing"
    await control.call("resume")
    control.plane._retires._retire = control.stub.retire
    await control.call("retire", "v", episode_ids=["r"])
    assert (await control.call("prepare", "next"))["phase"] == "prepared"


async def test_a_retire_that_keeps_failing_holds_nothing_up_once_its_rollout_is_forgotten(
    idle: Callable[[], Control],
) -> None:
    control = idle()

    async def broken(_: Any) -> None:
        raise OSError("the sandbox does not answer")

    control.plane._retires._retire = broken
    await refused(control.call("retire", "v", episode_ids=["r", "s"]), "checkpoint_error")
    control.plane._retires._retire = lambda _: asyncio.sleep(100)
    await refused(control.call("retire", "v", seconds=1, episode_ids=["x"]), "deadline_exceeded")
    await control.call("forget", "v", rollout_ids=["r", "x"])
    assert {one["id"] for one in (await control.status())["report"]["blockers"]} == {"s", "x"}  # x is under way
    await control.call("forget", "v", rollout_ids=["s"])
    await asyncio.sleep(100)
    assert (await control.call("prepare"))["phase"] == "prepared"
