"""Commits over HTTP: when one counts, what a repeat proves, what it keeps of retired attempts, and how it stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gym_rig.stub import GRACE, Control, refused
from gym_rig.virtual import settle
from gym_servers import serve
from gym_servers.protocol.identity import Episode
from gym_servers.protocol.phases import Phase
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import StorageError


def manifest_of(control: Control) -> Path:
    return control.folder / "cp/environment/env/manifest.json"


async def write_ended(control: Control) -> None:
    while (await control.status())["write"]["state"] == "writing":  # noqa: ASYNC110 - asked over the API, as a coordinator does
        await asyncio.sleep(0.1)


# ---- when it counts ---------------------------------------------------------------------------------------


async def test_a_commit_whose_write_fails_stays_prepared_and_can_be_tried_again(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    control = idle()
    await control.call("prepare")
    with monkeypatch.context() as patched:

        def away(*_: Any) -> None:
            raise StorageError("the bucket does not answer")

        patched.setattr(DirectoryStore, "create", away)
        error = await refused(control.commit(), "checkpoint_error")
    assert "does not answer" in error.detail
    assert control.gate.phase is Phase.PREPARED
    assert (await control.commit())["phase"] == "committed"
    assert (await control.status())["write"]["state"] == "done"


async def test_a_commit_is_not_committed_before_it_is_durable(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    control = idle()
    await control.call("prepare")
    hung = asyncio.Event()

    async def hang(work: Callable[..., Any], *arguments: Any) -> Any:
        await hung.wait()
        return work(*arguments)

    monkeypatch.setattr(asyncio, "to_thread", hang)
    waiting = asyncio.create_task(control.commit())
    await settle()
    assert control.gate.phase is Phase.PREPARED
    await refused(control.commit(seconds=3), "deadline_exceeded")  # asked again: the same commit
    hung.set()
    assert (await waiting)["phase"] == "committed"
    assert (await control.commit())["manifest_digest"] == (await waiting)["manifest_digest"]


async def test_a_background_write_that_failed_is_told_to_whoever_commits_again(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    control = idle()
    await control.call("prepare")

    def away(*_: Any) -> None:
        raise StorageError("the bucket does not answer")

    monkeypatch.setattr(DirectoryStore, "create", away)
    await control.commit(background=True)
    await write_ended(control)
    await refused(control.commit(background=True), "checkpoint_error")


# ---- a repeat ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [True, False])
async def test_a_repeated_commit_gives_the_manifest_that_is_there(
    idle: Callable[[], Control], background: bool
) -> None:
    control = idle()
    await control.call("prepare")
    await control.commit(background=background)
    await write_ended(control)
    control.stub.records["late"] = b"not in it"
    reply = await control.commit(background=background)
    assert reply["manifest_digest"] == (await control.status())["write"]["manifest_digest"]
    assert [entry["id"] for entry in json.loads(manifest_of(control).read_text())["records"]] == ["r", "s"]


@pytest.mark.parametrize("what", ["manifest.json", "pack*"])
@pytest.mark.parametrize("how", [b"{}", None])
async def test_a_repeated_commit_looks_at_what_is_stored(
    idle: Callable[[], Control], what: str, how: bytes | None
) -> None:
    control = idle()
    await control.call("prepare")
    await control.commit()
    (path,) = manifest_of(control).parent.glob(what)
    path.unlink()
    if how is not None:
        path.write_bytes(how)
    error = await refused(control.commit(), "invalid_checkpoint_state")
    assert "environment/env" in error.detail
    assert control.gate.phase is Phase.COMMITTED


@pytest.mark.parametrize("change", [{"stop": True}, {"background": True}, {"live": ["x"]}])
async def test_a_repeated_commit_of_another_kind_is_a_conflict(
    idle: Callable[[], Control], change: dict[str, Any]
) -> None:
    control = idle()
    await control.call("prepare")
    await control.commit()
    await refused(control.commit(**change), "checkpoint_conflict")


@pytest.mark.parametrize("change", [{"episode_ids": ["s"]}, {"checkpoint_dir": "/elsewhere"}, {"attempts": {"r": 3}}])
async def test_a_repeated_restore_of_something_else_is_a_conflict(tmp_path: Path, change: dict[str, Any]) -> None:
    control = await stored(tmp_path)
    fresh = Control(control.folder)
    reply = await fresh.restore()
    assert await fresh.restore() == reply
    await refused(fresh.restore(**change), "checkpoint_conflict")


# ---- watermarks -------------------------------------------------------------------------------------------


async def stored(folder: Path, **marks: int) -> Control:
    """A checkpoint of a process that has retired up to these attempts."""
    control = Control(folder, coordinated=False)
    for rollout, attempt in marks.items():
        await control.call("retire", "v", episode_ids=[Episode(rollout, attempt).key])
    await control.call("prepare")
    await control.commit()
    return control


async def test_what_was_retired_stays_refused_after_a_recovery(tmp_path: Path) -> None:
    control = await stored(tmp_path, gone=7, other=0)
    control.gate.fence.mark("gone", 8)  # after the freeze: no part of it
    fresh = Control(control.folder)
    await fresh.restore(cell_attempt=2)
    await fresh.call("resume", "restore")
    assert fresh.gate.fence.is_stale(Episode("gone", 7))
    assert not fresh.gate.fence.is_stale(Episode("gone", 8))
    # They go on into the next checkpoint, until the driver forgets them.
    await fresh.call("forget", "v", rollout_ids=["other"])
    await fresh.call("prepare", "cp2")
    await fresh.commit("cp2", checkpoint_dir=str(tmp_path / "cp2"))
    manifest = json.loads((tmp_path / "cp2/environment/env/manifest.json").read_text())
    assert manifest["marks"] == {"gone": 7, "r": 1}  # r goes on as attempt 2: the restore has fenced those before


async def test_an_episode_that_was_retired_is_never_restored(tmp_path: Path) -> None:
    control = await stored(tmp_path, r=7)
    fresh = Control(control.folder)
    await refused(fresh.restore(), "stale_attempt")
    assert (fresh.stub.installed, fresh.gate.fence.marks) == (None, {})
    assert (await fresh.restore("higher", attempts={"r": 8}))["restored"] == ["r-a8"]


async def test_a_manifest_of_before_watermarks_is_read(tmp_path: Path) -> None:
    control = await stored(tmp_path)
    document = json.loads(manifest_of(control).read_text())
    assert document.pop("marks") == {}
    manifest_of(control).unlink()
    manifest_of(control).write_text(json.dumps(document))
    assert (await Control(control.folder).restore())["restored"] == ["r-a1"]


# ---- stop -------------------------------------------------------------------------------------------------


async def test_what_stops_cannot_be_written_in_the_background(idle: Callable[[], Control]) -> None:
    control = idle()
    await control.call("prepare")
    error = await refused(control.commit(stop=True, background=True), "invalid_request")
    assert "exclude each other" in error.detail
    assert control.gate.phase is Phase.PREPARED


async def test_a_commit_that_stops_stays_closed_until_it_is_resumed(idle: Callable[[], Control]) -> None:
    control = idle()
    await control.call("prepare")
    reply = await control.commit(stop=True)
    assert reply["manifest_digest"]
    for _ in range(5):
        await asyncio.sleep(GRACE * 0.9)
        await control.call("renew")
    assert control.gate.phase is Phase.COMMITTED
    await refused(control.call("prepare", "next"), "checkpoint_conflict")
    assert (await control.call("resume"))["phase"] == "idle"
    assert control.stub.resumes == 1
    await refused(control.commit(stop=True), "stale_checkpoint")


async def test_a_lease_that_expires_aborts_also_a_commit_that_stops(idle: Callable[[], Control]) -> None:
    control = idle()
    await control.call("prepare")
    await control.commit(stop=True)
    await asyncio.sleep(GRACE + 1)
    assert control.gate.is_open
    assert control.stub.resumes == 1


@pytest.mark.parametrize("parks", [True, False])
async def test_a_process_that_is_told_to_end_ends_at_once_or_when_it_has_parked(
    monkeypatch: pytest.MonkeyPatch, parks: bool
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(serve.os, "_exit", ended.append)
    parked = asyncio.Event()

    async def park() -> None:
        await parked.wait()

    serve._end(SimpleNamespace(ending=lambda: park() if parks else None))  # type: ignore[arg-type]
    if parks:
        await asyncio.sleep(5)
        assert ended == []
        parked.set()
        await settle()
    assert ended[:1] == [0]


# ---- what happens to others -------------------------------------------------------------------------------


async def test_c5_an_error_after_prepare_leaves_nobody_closed_once_it_is_resumed_or_its_lease_ends(
    idle: Callable[[], Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: Any) -> None:
        raise StorageError("the bucket does not answer")

    monkeypatch.setattr(DirectoryStore, "create", away)
    for stop in (True, False):
        for by in ("resume", "lease"):
            control = idle()
            await control.call("prepare")
            await refused(control.commit(stop=stop), "checkpoint_error")
            if by == "resume":
                await control.call("resume")
            else:
                await asyncio.sleep(GRACE + 1)
            assert control.gate.is_open, (stop, by)
            assert control.stub.resumes == 1


async def test_c6_a_late_verb_of_an_older_checkpoint_moves_nothing_back(idle: Callable[[], Control]) -> None:
    control = idle()
    await control.call("prepare", "old")
    await control.call("resume", "old")
    await control.call("prepare", "new")
    await control.commit("new")
    for verb, code in (
        ("prepare", "stale_checkpoint"),
        ("renew", "stale_checkpoint"),
        ("resume", "stale_checkpoint"),
    ):
        await refused(control.call(verb, "old"), code)
        assert control.gate.phase is Phase.COMMITTED
    await refused(control.commit("old"), "stale_checkpoint")
    await refused(control.call("prepare", "new"), "invalid_phase")
    assert control.gate.phase is Phase.COMMITTED


async def test_c7_a_verb_whose_answer_was_lost_is_asked_again_and_done_once(idle: Callable[[], Control]) -> None:
    control = idle()
    exports = 0
    export = control.stub.export

    async def counted(scope: Any) -> Any:
        nonlocal exports
        exports += 1
        return await export(scope)

    control.stub.export = counted  # type: ignore[method-assign]
    assert await control.call("prepare") == await control.call("prepare")
    assert await control.commit() == await control.commit()
    assert await control.call("resume") == await control.call("resume")
    assert (exports, control.stub.resumes, control.gate.control.generation) == (1, 1, 1)
