"""The control API over HTTP: prepare, commit and the lease, and how each refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_rig.stub import GRACE, Control, Stub, refused, written
from gym_rig.virtual import settle
from gym_servers.protocol.messages import MAX_BLOCKERS
from gym_servers.protocol.phases import Phase
from gym_servers.storage.directory import DirectoryStore


async def written_in_background(control: Control) -> dict[str, Any]:
    while (write := (await control.status())["write"])["state"] == "writing":  # noqa: ASYNC110 - asked over the API, as a coordinator does
        await asyncio.sleep(0.1)
    return write


def slow(control: Control, monkeypatch: pytest.MonkeyPatch, gate: asyncio.Event) -> None:
    """Make the next write wait on the event loop for `gate`, as a slow store would."""
    from gym_servers.control.writes import RecordWrite

    original = RecordWrite._run

    async def run(self: RecordWrite, write: Callable[[], str], seconds: float) -> None:
        await gate.wait()
        await original(self, write, seconds)

    monkeypatch.setattr(RecordWrite, "_run", run)


# ---- prepare -----------------------------------------------------------------------------------------------


async def test_prepare_waits_for_readiness_and_takes_no_longer(idle: Callable[[], Control]) -> None:
    control = idle()
    control.stub.block("r")
    began = control.time()
    waiting = asyncio.create_task(control.call("prepare"))
    await asyncio.sleep(7)
    assert not waiting.done()
    control.stub.block()
    reply = await waiting
    assert reply["phase"] == "prepared"
    assert reply["report"]["ready"]
    assert reply["report"]["episodes"] == ["r", "s"]
    assert control.time() - began == pytest.approx(7, abs=0.1)


async def test_not_ready_is_a_reply_with_the_oldest_blockers_first(idle: Callable[[], Control]) -> None:
    control = idle()
    control.stub.block(*(f"b{n}" for n in range(MAX_BLOCKERS + 5)))
    reply = await control.call("prepare", seconds=3)
    assert reply["phase"] == "preparing"
    report = reply["report"]
    assert (report["ready"], report["blocker_count"], len(report["blockers"])) == (False, 105, MAX_BLOCKERS)
    assert report["blockers"][0] == {"id": "b104", "where": "b104", "age_seconds": 104.0}
    assert control.gate.checkpoint_open


async def test_a_repeated_prepare_waits_on_and_late_readiness_is_accepted(idle: Callable[[], Control]) -> None:
    control = idle()
    control.stub.block("r")
    assert (await control.call("prepare", seconds=1))["phase"] == "preparing"
    await refused(control.commit(), "invalid_phase")
    waiting = asyncio.create_task(control.call("prepare", seconds=20, restarts=["x"]))
    await asyncio.sleep(5)
    control.stub.block()
    assert (await waiting)["phase"] == "prepared"
    assert control.stub.told_restarts == frozenset({"x"})
    assert (await control.call("prepare"))["phase"] == "prepared"
    assert control.gate.control.generation == 1


async def test_another_prepare_is_a_conflict_and_changes_nothing(idle: Callable[[], Control]) -> None:
    control = idle()
    await control.call("prepare")
    await refused(control.call("prepare", "other"), "checkpoint_conflict")
    await refused(control.commit("other"), "checkpoint_conflict")
    await refused(control.call("resume", "other"), "stale_checkpoint")
    assert control.gate.control.checkpoint_id == "cp"


async def test_resume_aborts_a_waiting_prepare(idle: Callable[[], Control]) -> None:
    control = idle()
    control.stub.block("r")
    waiting = asyncio.create_task(control.call("prepare"))
    await settle()
    assert (await control.call("resume"))["phase"] == "idle"
    await refused(waiting, "stale_checkpoint")
    assert control.gate.is_open
    assert control.stub.resumes == 1


async def test_a_resume_and_a_new_prepare_at_once_abort_the_old_one(idle: Callable[[], Control]) -> None:
    """The wake-up of the old one finds a checkpoint open again, though another: it must not take it for its own."""
    control = idle()
    control.stub.block("r")
    waiting = asyncio.create_task(control.call("prepare"))
    await settle()
    await asyncio.gather(control.call("resume"), control.call("prepare", "second", seconds=1))
    await refused(waiting, "stale_checkpoint")
    assert control.gate.control.checkpoint_id == "second"


async def test_late_verbs_after_resume_are_stale(idle: Callable[[], Control]) -> None:
    control = idle()
    await written(control)
    for call in (control.call("prepare"), control.commit(), control.call("renew")):
        await refused(call, "stale_checkpoint")
    assert (await control.call("resume"))["phase"] == "idle"


async def test_a_resume_that_came_before_its_prepare_makes_it_stale(idle: Callable[[], Control]) -> None:
    """The coordinator gave up; its prepare was only slow."""
    control = idle()
    await control.call("resume")
    await refused(control.call("prepare"), "stale_checkpoint")


# ---- commit ------------------------------------------------------------------------------------------------


async def test_commit_writes_what_is_in_scope_and_says_so(idle: Callable[[], Control]) -> None:
    control = idle()
    await control.call("prepare")
    reply = await control.commit(episode_ids=["r"])
    assert (reply["phase"], reply["episodes"], reply["records"]) == ("committed", ["r"], 1)
    manifest = json.loads((control.folder / "cp/environment/env/manifest.json").read_text())
    assert manifest["session"] == "session-1"
    assert [entry["id"] for entry in manifest["records"]] == ["r"]
    assert reply == await control.commit(episode_ids=["r"])


@pytest.mark.parametrize("change", [{"episode_ids": ["s"]}, {"episode_ids": None}, {"checkpoint_dir": "/elsewhere"}])
async def test_a_repeated_commit_with_other_content_is_a_conflict(
    idle: Callable[[], Control], change: dict[str, Any]
) -> None:
    control = idle()
    await control.call("prepare")
    await control.commit(episode_ids=["r"])
    await refused(control.commit(**{"episode_ids": ["r"], **change}), "checkpoint_conflict")


async def test_what_is_frozen_does_not_change(idle: Callable[[], Control]) -> None:
    control = idle()
    await control.call("prepare")
    reply = await control.commit(background=True)
    assert reply["manifest_digest"] is None
    control.stub.records.clear()
    await control.call("resume")
    await written_in_background(control)
    other = Control(control.folder, session="session-2")
    assert (await other.restore(episode_ids=["r", "s"]))["restored"] == ["r-a1", "s-a1"]
    assert other.stub.installed == {"r-a1": b"record of r", "s-a1": b"record of s"}


async def test_a_background_write_outlives_the_pause_and_keeps_the_next_prepare_out(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    control = idle()
    await control.call("prepare")
    slow(control, monkeypatch, gate := asyncio.Event())
    await control.commit(background=True)
    await control.call("resume")
    error = await refused(control.call("prepare", "next"), "checkpoint_conflict")
    assert "still being written" in error.detail
    gate.set()
    assert (await written_in_background(control))["state"] == "done"
    assert (await control.call("prepare", "next"))["phase"] == "prepared"


async def test_a_background_write_that_hangs_ends_at_its_deadline_and_the_next_checkpoint_is_let_in(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the store comes back later: what it then writes is of no checkpoint any more."""
    control = idle()
    store, hung = DirectoryStore.create, asyncio.Event()

    async def hang(work: Callable[[], str]) -> str:
        await hung.wait()
        return work()

    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "to_thread", hang)
        await control.call("prepare")
        await control.commit(background=True, seconds=20)
        await control.call("resume")
        await asyncio.sleep(19)
        assert (await control.status())["write"]["state"] == "writing"
        await asyncio.sleep(2)
        write = (await control.status())["write"]
        assert (write["state"], write["detail"]) == ("failed", "the records were not written by the deadline")
    assert (await control.call("prepare", "next"))["phase"] == "prepared"
    keys: list[str] = []
    monkeypatch.setattr(DirectoryStore, "create", lambda self, key, data: (keys.append(key), store(self, key, data)))
    hung.set()
    await settle()
    assert keys == []
    assert (await control.commit("next", checkpoint_dir=str(control.folder / "next")))["phase"] == "committed"


async def test_resume_stops_an_unfinished_write_that_is_not_background(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    control = idle()
    await control.call("prepare")
    slow(control, monkeypatch, gate := asyncio.Event())
    waiting = asyncio.create_task(control.commit())
    await settle()
    await control.call("resume")
    gate.set()
    await refused(waiting, "checkpoint_error")
    assert (await control.status())["write"]["state"] == "stopped"
    assert not (control.folder / "cp/environment/env/manifest.json").exists()


async def test_commit_looks_at_readiness_again(idle: Callable[[], Control]) -> None:
    control = idle()
    await control.call("prepare")
    control.stub.block("late")
    error = await refused(control.commit(), "checkpoint_error")
    assert "late" in error.detail
    control.stub.block()
    assert (await control.commit())["phase"] == "committed"


async def test_a_failed_commit_stays_prepared_and_may_be_tried_elsewhere(idle: Callable[[], Control]) -> None:
    control = idle()
    await control.call("prepare")
    control.stub.exporting.clear()
    await refused(control.commit(seconds=2), "deadline_exceeded")
    await settle()
    assert control.gate.phase is Phase.PREPARED
    control.stub.exporting.set()
    assert (await control.commit(checkpoint_dir=str(control.folder / "second")))["phase"] == "committed"


async def test_a_write_that_cannot_be_done_says_why(idle: Callable[[], Control]) -> None:
    control = idle()
    (control.folder / "file").write_text("in the way")
    await control.call("prepare")
    error = await refused(control.commit(checkpoint_dir=str(control.folder / "file")), "checkpoint_error")
    assert "cannot use" in error.detail
    assert (await control.status())["write"]["state"] == "failed"


async def test_a_fault_in_a_servers_export_is_told_at_once(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    control = idle()

    async def broken(self: Stub, scope: Any) -> Any:
        raise RuntimeError("a fault with a SECRET in it")

    await control.call("prepare")
    began = control.time()
    with monkeypatch.context() as patched:
        patched.setattr(Stub, "export", broken)
        error = await refused(control.commit(), "checkpoint_error")
    assert "RuntimeError" in error.detail
    assert "SECRET" not in error.detail
    assert control.time() - began < 1
    assert (await control.commit())["phase"] == "committed"


async def test_a_fault_in_a_servers_reading_is_told_at_once_and_installs_nothing(
    fresh: Callable[[], Control], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await written(Control(tmp_path, coordinated=False))
    control = fresh()

    def broken(self: Stub, records: Any, plan: Any) -> Any:
        raise KeyError("a field")

    began = control.time()
    with monkeypatch.context() as patched:
        patched.setattr(Stub, "read", broken)
        error = await refused(control.restore(), "invalid_checkpoint_state")
    assert "KeyError" in error.detail
    assert control.time() - began < 1
    assert (control.gate.phase, control.stub.installed) == (Phase.STARTING, None)
    assert (await control.restore())["restored"] == ["r-a1"]


async def test_resume_ends_a_commit_that_still_freezes(idle: Callable[[], Control]) -> None:
    control = idle()
    await control.call("prepare")
    control.stub.exporting.clear()
    waiting = asyncio.create_task(control.commit())
    await settle()
    await control.call("resume")
    await refused(waiting, "stale_checkpoint")
    control.stub.exporting.set()
    await settle()
    assert (await control.status())["write"] is None


# ---- the lease ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reach", ["preparing", "prepared", "committed"])
async def test_an_expired_lease_opens_the_process_and_its_checkpoint_is_over(
    idle: Callable[[], Control], reach: str
) -> None:
    control = idle()
    if reach == "preparing":
        control.stub.block("r")
    began = control.time()
    await control.call("prepare", seconds=1)
    if reach == "committed":
        await control.commit()
    assert (await control.status())["phase"] == reach
    assert (await control.status())["lease_expires_at"] == pytest.approx(began + GRACE)
    await asyncio.sleep(began + GRACE - control.time() - 0.01)
    assert not control.gate.is_open
    await asyncio.sleep(0.02)
    assert control.gate.is_open
    assert control.stub.resumes == 1
    assert (await control.status())["lease_expires_at"] is None
    for call in (control.commit(), control.call("prepare"), control.call("renew")):
        await refused(call, "stale_checkpoint")


@pytest.mark.parametrize("background", [True, False])
async def test_what_an_expired_commit_left_running_is_never_finished(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    control = idle()
    await control.call("prepare")
    slow(control, monkeypatch, gate := asyncio.Event())
    waiting = asyncio.create_task(control.commit(background=background, seconds=200))
    await asyncio.sleep(GRACE + 1)
    gate.set()
    if not background:
        await refused(waiting, "checkpoint_error")
    else:
        await waiting
    assert (await written_in_background(control))["state"] == "stopped"
    assert not (control.folder / "cp/environment/env/manifest.json").exists()


async def test_renewal_keeps_a_process_closed(idle: Callable[[], Control]) -> None:
    control = idle()
    await control.call("prepare")
    for _ in range(20):
        await asyncio.sleep(GRACE * 0.9)
        reply = await control.call("renew")
        assert reply["lease_expires_at"] == pytest.approx(control.time() + GRACE)
    assert control.gate.phase is Phase.PREPARED
    await refused(control.call("renew", "other"), "stale_checkpoint")


async def test_an_expired_prepare_ends_its_waiting_call(idle: Callable[[], Control]) -> None:
    control = idle()
    control.stub.block("r")
    await refused(control.call("prepare", seconds=GRACE * 3), "stale_checkpoint")
    assert control.gate.is_open


async def test_an_expired_restore_uninstalls_and_its_id_is_stale(
    fresh: Callable[[], Control], tmp_path: Path
) -> None:
    await written(Control(tmp_path, coordinated=False))
    control = fresh()
    await control.restore()
    assert (await control.status())["restored_from"] == "restore"
    await asyncio.sleep(GRACE + 1)
    assert control.gate.phase is Phase.STARTING
    assert control.stub.installed is None
    assert (await control.status())["restored_from"] is None
    await refused(control.restore(), "stale_checkpoint")
    assert (await control.restore("again", cell_attempt=2))["restored"] == ["r-a2"]


async def test_starting_has_no_lease(fresh: Callable[[], Control]) -> None:
    control = fresh()
    await asyncio.sleep(GRACE * 100)
    assert control.gate.phase is Phase.STARTING
    await refused(control.call("prepare"), "invalid_phase")
