"""The control API over HTTP: a restore and the resume after it, and how each refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gym_rig.stub import GRACE, Control, Refused, refused, written
from gym_servers.protocol.identity import Episode
from gym_servers.protocol.phases import Phase


async def test_restore_is_only_for_a_fresh_process(idle: Callable[[], Control]) -> None:
    control = idle()
    await written(control)
    await refused(control.restore(), "invalid_phase")


async def test_restore_installs_names_its_source_and_repeats_its_reply(
    fresh: Callable[[], Control], tmp_path: Path
) -> None:
    await written(Control(tmp_path, coordinated=False))
    control = fresh()
    reply = await control.restore(episode_ids=["r", "s"], attempts={"s": 7})
    assert reply == {"phase": "restored", "source_checkpoint_id": "cp", "restored": ["r-a1", "s-a7"]}
    control.stub.installed = None
    assert await control.restore(episode_ids=["r", "s"], attempts={"s": 7}) == reply
    assert control.stub.installed is None
    await refused(control.restore("other"), "checkpoint_conflict")
    assert not control.gate.is_open
    assert (await control.call("resume", "restore"))["phase"] == "idle"


async def test_two_restores_at_once_are_one(fresh: Callable[[], Control], tmp_path: Path) -> None:
    await written(Control(tmp_path, coordinated=False))
    control = fresh()
    first, second = await asyncio.gather(control.restore(), control.restore())
    assert first == second
    assert control.gate.control.generation == 1


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"episode_ids": ["r", "unknown"]}, "invalid_checkpoint_state"),
        ({"manifest_digest": "0" * 64}, "invalid_checkpoint_state"),
        ({"episode_ids": ["x-a0"]}, "invalid_request"),
        ({"attempts": {"r": 0}}, "stale_attempt"),
        ({"cell_attempt": 3, "attempts": {"r": 2}}, "stale_attempt"),
        ({"checkpoint_dir": "/nowhere/at/all"}, "invalid_checkpoint_state"),
        ({"checkpoint_dir": "gs://x/y"}, "checkpoint_error"),
    ],
)
async def test_a_restore_that_is_refused_installs_nothing_and_may_be_tried_again(
    fresh: Callable[[], Control], tmp_path: Path, fields: dict[str, Any], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gym_servers.storage.locate import open_store

    monkeypatch.setattr(Control, "open_store", lambda self, uri: open_store(uri))
    await written(Control(tmp_path, coordinated=False))
    control = fresh()
    await refused(control.restore(**fields), code)
    assert (control.gate.phase, control.stub.installed) == (Phase.STARTING, None)
    assert (await control.restore())["restored"] == ["r-a1"]


async def test_a_restore_below_the_floor_is_refused(fresh: Callable[[], Control], tmp_path: Path) -> None:
    await written(Control(tmp_path, coordinated=False))
    control = fresh()
    await control.restore(cell_attempt=5)
    await asyncio.sleep(GRACE + 1)
    error = await refused(control.restore("second", cell_attempt=4), "stale_attempt")
    assert "later recovery" in error.detail
    await refused(control.call("resume", "third", cell_attempt=4), "stale_attempt")
    assert (await control.call("resume", "third", cell_attempt=5))["phase"] == "idle"
    assert (await control.status())["cell_attempt"] == 5


@pytest.mark.parametrize("attempt_floor", [True, False])
async def test_a_restore_fences_all_that_was_recorded_also_what_starts_over(
    tmp_path: Path, attempt_floor: bool
) -> None:
    """Also at a participant that has no record of it, and for a driver that cannot know the floor."""
    await written(Control(tmp_path, coordinated=False))
    control = Control(tmp_path, attempt_floor=attempt_floor)
    await control.restore(episode_ids=["r"], restarts=["s", "x-a1", "x-a2"])
    assert control.gate.fence.marks == {"r": 0, "s": 0, "x": 2}
    await control.call("resume", "restore")
    for stale in (Episode("r", 0), Episode("s", 0), Episode("x", 2)):
        assert control.gate.fence.is_stale(stale)
    for able in (Episode("r", 1), Episode("s", 1), Episode("x", 3)):
        control.gate.fence.check(able)


async def test_an_episode_that_was_recorded_under_a_lower_attempt_too_continues_above_both(
    fresh: Callable[[], Control], tmp_path: Path
) -> None:
    await written(Control(tmp_path, coordinated=False))
    control = fresh()
    await refused(control.restore(restarts=["r-a4"], attempts={"r": 4}), "stale_attempt")
    await refused(control.restore(restarts=["x-a0"]), "invalid_request")
    assert (await control.restore(restarts=["r-a4"]))["restored"] == ["r-a5"]


async def test_a_restore_that_a_resume_overtook_is_refused(
    fresh: Callable[[], Control], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(Control(tmp_path, coordinated=False))
    control = fresh()
    waiting = asyncio.create_task(control.restore())
    await asyncio.sleep(0)
    await control.call("resume", "from-input", cell_attempt=1)
    with pytest.raises(Refused) as error:
        await waiting
    assert error.value.code in ("invalid_phase", "stale_checkpoint")
    assert control.stub.installed is None
    assert control.gate.is_open


@pytest.mark.parametrize("before", ["nothing", "an expired restore"])
async def test_a_resume_that_was_meant_for_the_process_before_never_opens_a_fresh_one(
    fresh: Callable[[], Control], tmp_path: Path, before: str
) -> None:
    await written(Control(tmp_path, coordinated=False))
    control = fresh()
    if before == "an expired restore":
        await control.restore()
        await asyncio.sleep(GRACE + 1)
    await refused(control.call("resume", "checkpoint-of-another-process"), "invalid_phase")
    assert control.gate.phase is Phase.STARTING
    assert (await control.call("resume", "start", cell_attempt=1))["phase"] == "idle"


async def test_the_resume_of_a_restore_that_has_expired_does_not_open_an_empty_process(
    fresh: Callable[[], Control], tmp_path: Path
) -> None:
    await written(Control(tmp_path, coordinated=False))
    control = fresh()
    await control.restore()
    await asyncio.sleep(GRACE + 1)
    await refused(control.call("resume", "restore", cell_attempt=1), "stale_checkpoint")
    assert (control.gate.phase, control.stub.installed) == (Phase.STARTING, None)


@pytest.mark.parametrize("verb", ["restore", "resume"])
async def test_a_verb_that_was_meant_for_another_process_neither_restores_nor_opens_this_one(
    fresh: Callable[[], Control], tmp_path: Path, verb: str
) -> None:
    """A container that starts again keeps its address."""
    await written(Control(tmp_path, coordinated=False))
    control = fresh()

    async def ask(session: str) -> dict[str, Any]:
        if verb == "restore":
            return await control.restore(session=session)
        return await control.call("resume", "start", cell_attempt=1, session=session)

    error = await refused(ask("other"), "invalid_phase")
    assert "other" in error.detail
    assert (control.gate.phase, control.stub.installed, control.gate.fence.floor) == (Phase.STARTING, None, 0)
    assert control.gate.fence.marks == {}
    assert (await ask("session-1"))["phase"] == ("restored" if verb == "restore" else "idle")


async def test_a_process_says_once_that_it_is_in_service_and_under_which_attempt(
    fresh: Callable[[], Control], caplog: pytest.LogCaptureFixture
) -> None:
    """It is what its log has where nothing goes wrong; a checkpoint closes it for a moment only."""
    caplog.set_level(logging.INFO, "gym_servers")
    begun, restored = fresh(), fresh()
    await begun.call("resume", "start", cell_attempt=3)
    await written(begun)
    await restored.restore(cell_attempt=4)
    await restored.call("resume", "restore")
    assert [one.getMessage() for one in caplog.records] == ["in service, attempt 3", "in service, attempt 4"]


async def test_resume_from_starting_raises_the_floor(fresh: Callable[[], Control]) -> None:
    control = fresh()
    await control.call("resume", cell_attempt=3)
    assert (await control.status())["cell_attempt"] == 3
    assert control.gate.fence.floor == 3


async def test_c16_a_manifest_of_another_instance_is_never_restored(tmp_path: Path) -> None:
    """Two workers with state of their own are two participants: neither gets what the other kept."""
    control = Control(tmp_path, coordinated=False)
    await written(control)
    other = Control(tmp_path)
    other.plane.author = replace(other.plane.author, instance="other")
    error = await refused(other.restore(), "invalid_checkpoint_state")
    assert "environment/other" in error.detail
