"""The control API over HTTP: who may call, what each verb does, and how it refuses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gym_rig.stub import GRACE, Control, Refused, Stub, answer
from gym_rig.virtual import settle
from gym_servers.participants.base import Survey
from gym_servers.protocol.identity import Episode
from gym_servers.protocol.messages import MAX_BLOCKERS, Status
from gym_servers.protocol.phases import Phase
from gym_servers.storage.directory import DirectoryStore

VERBS = {
    "prepare": {},
    "renew": {},
    "commit": {"checkpoint_dir": "x"},
    "restore": {"checkpoint_dir": "x", "episode_ids": []},
    "resume": {},
    "retire": {"episode_ids": ["r"]},
    "forget": {"rollout_ids": ["r"]},
}


@pytest.fixture
def idle(tmp_path: Path) -> Callable[[], Control]:
    return lambda: Control(tmp_path, coordinated=False)


@pytest.fixture
def fresh(tmp_path: Path) -> Callable[[], Control]:
    return lambda: Control(tmp_path)


async def written(control: Control, **fields: Any) -> dict[str, Any]:
    """A checkpoint on disk, and the process back in service."""
    await control.call("prepare")
    reply = await control.commit(**fields)
    await control.call("resume")
    return reply


async def refused(call: Any, code: str) -> Refused:
    with pytest.raises(Refused) as error:
        await call
    assert error.value.code == code, error.value
    return error.value


# ---- who may call, and in what form -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "bearer the-token", "the-token", "Bearer the-token2"]
)
async def test_without_the_token_nothing_is_told_or_done(idle: Callable[[], Control], header: str | None) -> None:
    control = idle()
    headers = {} if header is None else {"authorization": header}
    del control.http.headers["authorization"]
    for verb, fields in VERBS.items():
        response = await control.http.post(f"/{verb}", json=control.body("cp", **fields), headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "unauthorized")
    assert (await control.http.get("/status", headers=headers)).status_code == 401
    assert control.gate.phase is Phase.IDLE


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1},
        {"checkpoint_id": "../x"},
        {"checkpoint_id": ""},
        {"checkpoint_id": None},
        {"deadline_ts": "soon"},
        {"deadline_ts": -1},
        {"deadline_ts": None},
    ],
)
async def test_a_body_of_another_form_is_refused_by_field(
    idle: Callable[[], Control], verb: str, change: dict[str, Any]
) -> None:
    control = idle()
    response = await control.http.post(f"/{verb}", json={**control.body("cp", **VERBS[verb]), **change})
    assert response.status_code == 422
    assert response.json()["error"]["code"] == "invalid_request"
    assert next(iter(change)) in response.json()["error"]["detail"]
    assert control.gate.phase is Phase.IDLE


async def test_a_refusal_never_repeats_what_was_sent(idle: Callable[[], Control]) -> None:
    response = await idle().http.post("/prepare", json={"checkpoint_id": "a b SECRET", "deadline_ts": "SECRET"})
    assert "SECRET" not in response.text


@pytest.mark.parametrize("deadline", ["Infinity", "NaN"])
async def test_a_deadline_is_a_time(idle: Callable[[], Control], deadline: str) -> None:
    body = f'{{"checkpoint_id": "cp", "deadline_ts": {deadline}}}'
    response = await idle().http.post("/prepare", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422


@pytest.mark.parametrize("verb", ["retire", "forget"])
async def test_an_empty_list_is_refused(idle: Callable[[], Control], verb: str) -> None:
    empty = {name: [] for name in VERBS[verb]}
    await refused(idle().call(verb, **empty), "invalid_request")


# ---- prepare ----------------------------------------------------------------------------------------------


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


# ---- commit -----------------------------------------------------------------------------------------------


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


async def written_in_background(control: Control) -> dict[str, Any]:
    while (write := (await control.status())["write"])["state"] == "writing":  # noqa: ASYNC110 - asked over the API, as a coordinator does
        await asyncio.sleep(0.1)
    return write


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


def slow(control: Control, monkeypatch: pytest.MonkeyPatch, gate: asyncio.Event) -> None:
    """Make the next write wait on the event loop for `gate`, as a slow store would."""
    from gym_servers.control.writes import RecordWrite

    original = RecordWrite._run

    async def run(self: RecordWrite, write: Callable[[], str], seconds: float) -> None:
        await gate.wait()
        await original(self, write, seconds)

    monkeypatch.setattr(RecordWrite, "_run", run)


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


# ---- the lease --------------------------------------------------------------------------------------------


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


# ---- restore and resume -----------------------------------------------------------------------------------


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


async def test_resume_from_starting_raises_the_floor(fresh: Callable[[], Control]) -> None:
    control = fresh()
    await control.call("resume", cell_attempt=3)
    assert (await control.status())["cell_attempt"] == 3
    assert control.gate.fence.floor == 3


# ---- retire and forget ------------------------------------------------------------------------------------


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


# ---- status -----------------------------------------------------------------------------------------------


async def test_status_is_answered_at_once_whatever_waits(idle: Callable[[], Control]) -> None:
    control = idle()
    control.stub.block("r")
    waiting = asyncio.create_task(control.call("prepare"))
    await settle()
    began = control.time()
    status = answer(await control.http.get("/status"))
    await control.call("renew")
    assert control.time() == began
    assert (status["kind"], status["instance"], status["session"]) == ("environment", "env", "session-1")
    assert (status["phase"], status["checkpoint_id"]) == ("preparing", "cp")
    assert status["report"]["blockers"][0]["id"] == "r"
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_the_bytes_of_a_secret_are_in_no_reply(idle: Callable[[], Control]) -> None:
    control = idle()
    assert "the-token" not in (await control.http.get("/status")).text


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


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[]", b'{"checkpoint_id": 3}', b"x" * 100_000])
async def test_whatever_comes_without_the_token_is_unauthorized_before_it_is_read(
    idle: Callable[[], Control], body: bytes
) -> None:
    control = idle()
    del control.http.headers["authorization"]
    for path in (*VERBS, "status", "no-such-verb"):
        response = await control.http.post(f"/{path}", content=body, headers={"content-type": "application/json"})
        assert (response.status_code, response.json()["error"]["code"]) == (401, "unauthorized"), path


async def test_with_the_token_a_body_that_is_no_json_is_refused_as_such(idle: Callable[[], Control]) -> None:
    response = await idle().http.post("/prepare", content=b"{", headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (422, "invalid_request")


async def test_restarts_and_episodes_are_never_capped(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    control = idle()
    many = frozenset(f"e{n}" for n in range(5000))
    monkeypatch.setattr(Stub, "survey", lambda self: Survey((), {}, restarts=many, episodes=many))
    report = (await control.call("prepare"))["report"]
    assert (len(report["restarts"]), len(report["episodes"])) == (5000, 5000)


async def test_an_answer_may_say_more_than_its_reader_knows(idle: Callable[[], Control]) -> None:
    """A coordinator and its participants are not upgraded at the same moment."""
    status = await idle().status()
    status["report"]["news"] = status["news"] = 1
    assert Status.model_validate(status).phase == "idle"


async def test_c16_a_manifest_of_another_instance_is_never_restored(tmp_path: Path) -> None:
    """Two workers with state of their own are two participants: neither gets what the other kept."""
    control = Control(tmp_path, coordinated=False)
    await written(control)
    other = Control(tmp_path)
    other.plane.author = replace(other.plane.author, instance="other")
    error = await refused(other.restore(), "invalid_checkpoint_state")
    assert "environment/other" in error.detail


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
