"""The sandbox: state in a directory and a process of its own, which a checkpoint carries and a death never blanks.

Real processes: what they do takes real time, for which the virtual clock waits."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gym_rig.cell import Rig, cell
from gym_rig.verbs import checkpoint, prepare, restore_built, resume, start
from gym_rig.virtual import now
from gym_servers.engine.rows import sandbox_rows
from gym_servers.journal.client import NoJournal
from gym_servers.participants.gate import Gate
from gym_servers.participants.tool_sessions import ToolSession
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode
from gym_servers.resources.app import participant_of
from gym_servers.resources.file_tree import TreeTooLarge, build, check, of_texts, snapshot
from gym_servers.resources.sandbox import SandboxServer
from gym_servers.resources.server import ToolCall

R0, R1 = Episode("r", 0), Episode("r", 1)
ROW = {"files": {"a/b.txt": "hello", "top": "1"}, "expected_files": {"a/b.txt": "hello", "new": "2\n"}}


class Server:
    """A sandbox server with its participant, as a process has them."""

    def __init__(self, folder: Path, *, started: bool = True, **config: Any) -> None:
        self.folder = folder
        self.server = SandboxServer({"directory": str(folder), **config})
        self.participant = participant_of(Gate(clock=now), self.server)
        if started:
            start(self.participant)

    async def seed(self, session: str = "s", episode: Episode = R0, row: Any = ROW) -> ToolSession:
        async def begin(name: str) -> None:
            await self.server.seed(name, row)

        return await self.participant.seed(session, episode, begin, digest="row", fresh_id="f")

    async def run(self, command: Any, *, session: str = "s", episode: Episode = R0, call: str | None = None) -> Any:
        tool = self.server.tools()["run_command"]

        async def work(found: ToolSession) -> Any:
            return await tool(ToolCall(found, "run_command", call, NoJournal(), "sandbox"), {"command": command})

        return await self.participant.call(session, episode, "run_command", work, call_id=call)

    async def verify(self, episode: Episode = R0, session: str = "s", row: Any = ROW) -> Any:
        async def work(found: ToolSession) -> Any:
            return await self.server.verify(found.id, row)

        return await self.participant.call(session, episode, "verify", work)

    def pid(self, session: str = "s") -> int:
        pid = self.server._boxes[session].pid
        assert pid is not None
        return pid

    def directories(self) -> list[Path]:
        root = self.folder / "gym-sandboxes"
        return sorted(root.iterdir()) if root.exists() else []

    async def end(self) -> None:
        for session in list(self.server._boxes):
            await self.server.retire_session_state(session)


@asynccontextmanager
async def sandbox(folder: Path, **options: Any) -> AsyncIterator[Server]:
    server = Server(folder, **options)
    try:
        yield server
    finally:
        await server.end()


async def code(call: Awaitable[Any]) -> str:
    with pytest.raises(ProtocolError) as refused:
        await call
    return refused.value.code


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def until(condition: Callable[[], object]) -> None:
    """Wait for what another process does: in real time, in a thread, so that the virtual clock stands still."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.to_thread(time.sleep, 0.01)
    raise AssertionError("not in twenty seconds")


# ---- commands ---------------------------------------------------------------------------------------------


async def test_commands_run_in_the_sessions_own_directory(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as one:
        await one.seed()
        await one.seed("o", Episode("o", 0))
        assert await one.run("cat a/b.txt; echo 2 > new; pwd") == {
            "exit_code": 0,
            "output": f"hello{one.server._boxes['s'].directory}\n",
        }
        assert (await one.run("ls; exit 3", session="o", episode=Episode("o", 0))) == {
            "exit_code": 3,
            "output": "a\ntop\n",
        }
        assert (await one.verify())["reward"] == 1.0
        assert await one.verify(Episode("o", 0), "o") == {"reward": 0.0, "wrong_files": ["new"]}


async def test_a_repeated_command_is_answered_and_not_run_again(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as one:
        await one.seed()
        replies = [await one.run("echo x >> log; wc -l < log", call="c1") for _ in range(2)]
        assert replies[0] == replies[1] == {"exit_code": 0, "output": "1\n"}


async def test_a_command_sees_none_of_the_servers_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_CONTROL_TOKEN", "SECRET")
    async with sandbox(tmp_path) as one:
        await one.seed()
        assert "SECRET" not in (await one.run("env; cat /proc/$PPID/environ"))["output"]


async def test_what_a_command_leaves_running_is_ended_with_it(tmp_path: Path) -> None:
    """It would change the files behind a checkpoint's back."""
    async with sandbox(tmp_path) as one:
        await one.seed()
        pid = int((await one.run("sleep 300 > /dev/null 2>&1 & echo $!"))["output"])
        await until(lambda: not alive(pid))


async def test_a_command_that_takes_too_long_is_ended_and_the_sandbox_goes_on(tmp_path: Path) -> None:
    async with sandbox(tmp_path, command_timeout_seconds=0.2) as one:
        await one.seed()
        assert await one.run("echo begun; sleep 300") == {"exit_code": None, "output": "begun\n"}
        assert (await one.run("echo on"))["output"] == "on\n"


async def test_output_is_bounded_and_a_command_must_be_text(tmp_path: Path) -> None:
    async with sandbox(tmp_path, max_bytes=200_000) as one:
        await one.seed()
        assert len((await one.run("yes | head -c 150000"))["output"]) == 64 * 1024
        with pytest.raises(ValueError, match="must be a text"):
            await one.run(["ls"])


@pytest.mark.parametrize(
    "command", ["head -c 1500 /dev/zero > a1; head -c 1500 /dev/zero > a2", "for n in $(seq 60); do : > f$n; done"]
)
async def test_a_sandbox_that_grows_past_its_bounds_is_lost_at_once_and_not_at_a_checkpoint(
    tmp_path: Path, command: str
) -> None:
    async with sandbox(tmp_path, max_bytes=2000, max_files=50) as one:
        await one.seed()
        assert await code(one.run(command)) == "session_lost"
        assert await code(one.run("ls")) == "session_lost"


@pytest.mark.parametrize(
    "wrong",
    [
        {"files": []},
        {"files": {"../x": "1"}},
        {"files": {"/x": "1"}},
        {"files": {"x": 1}},
        {"expected_files": {}},  # else any work at all would be paid for
        {"expected_files": None},
        {"expected_files": {"x": 1}},
    ],
)
async def test_a_row_that_cannot_be_used_begins_nothing(tmp_path: Path, wrong: Any) -> None:
    async with sandbox(tmp_path) as one:
        with pytest.raises(ValueError):
            await one.seed(row={**ROW, **wrong})
        assert one.directories() == []


@pytest.mark.parametrize("config", [{"unknown": 1}, {"max_bytes": "many"}])
def test_a_configuration_that_cannot_work_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        SandboxServer(config)


# ---- its end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["close", "retire", "uninstall"])
async def test_the_end_of_a_session_stops_its_process_and_removes_its_files(tmp_path: Path, ending: str) -> None:
    async with sandbox(tmp_path) as one:
        await one.seed()
        pid = one.pid()
        assert alive(pid)
        if ending == "close":
            await one.participant.close("s", R0)
        elif ending == "retire":
            await one.participant.retire([R0])
            await one.participant.retire([R0])
        else:
            one.participant.uninstall()
            await until(lambda: not one.server._boxes)
        assert not alive(pid)
        assert one.directories() == []


async def test_a_server_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    """Nobody can clean up after SIGKILL but the sandboxes themselves: they see their input end."""
    async with sandbox(tmp_path) as one:
        await one.seed()
        worker = one.server._boxes["s"]._worker
        assert worker is not None
        assert worker.stdin is not None
        worker.stdin.close()
        await until(lambda: not one.directories() and not alive(worker.pid))


# ---- C22: a sandbox that died -----------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["between commands", "during a command"])
async def test_c22_a_sandbox_whose_process_died_is_lost_and_never_blank_or_scored(
    tmp_path: Path, moment: str
) -> None:
    async with sandbox(tmp_path) as one:
        await one.seed()
        if moment == "during a command":
            command = asyncio.ensure_future(one.run("sleep 300 & echo $! > child; wait"))
            child = one.server._boxes["s"].directory / "child"
            await until(lambda: child.exists() and child.read_text())
            started = int(child.read_text())
            os.kill(one.pid(), signal.SIGKILL)
            assert await code(command) == "session_lost"
            await until(lambda: not alive(started))
        else:
            os.kill(one.pid(), signal.SIGKILL)
        for call in (one.run("ls"), one.verify(), one.run("ls")):
            assert await code(call) == "session_lost"
        await one.participant.close("s", R0)
        assert one.directories() == []


async def test_c22_a_lost_sandbox_fails_no_checkpoint_and_is_still_lost_after_the_restore(tmp_path: Path) -> None:
    async with sandbox(tmp_path / "one") as one, sandbox(tmp_path / "two", started=False) as two:
        await one.seed()
        await one.seed("o", Episode("o", 0))
        os.kill(one.pid(), signal.SIGKILL)
        await until(lambda: not alive(one.pid()))
        records = await checkpoint(one.participant)
        assert json.loads(records["s"])["state"] == {"lost": "its process died"}
        await restore_built(two.participant, records, "r", "o")
        resume(two.participant, "restore")
        assert await code(two.run("ls", episode=R1)) == "session_lost"
        assert await code(two.verify(R1)) == "session_lost"
        assert (await two.run("ls", session="o", episode=Episode("o", 1)))["output"] == "a\ntop\n"


# ---- checkpoints ------------------------------------------------------------------------------------------


async def test_a_restored_sandbox_has_the_files_of_the_cut_and_a_process_of_its_own(tmp_path: Path) -> None:
    async with sandbox(tmp_path / "one") as one, sandbox(tmp_path / "two", started=False) as two:
        await one.seed()
        await one.run(
            "echo 2 > new; chmod 640 new; mkdir -p d/e; ln -s ../a d/link; printf '\\377\\0' > d/raw; rm top"
        )
        records = await checkpoint(one.participant)
        await one.run("echo later > new; rm -r d")  # after the cut: no part of it
        await restore_built(two.participant, records, "r")
        resume(two.participant, "restore")
        assert two.pid() != one.pid()
        assert (
            await two.run("find . | sort; od -An -tx1 d/raw; stat -c %a new; cat new d/link/b.txt", episode=R1)
        ) == {
            "exit_code": 0,
            "output": ".\n./a\n./a/b.txt\n./d\n./d/e\n./d/link\n./d/raw\n./new\n ff 00\n640\n2\nhello",
        }
        assert (await two.verify(R1))["reward"] == 1.0


async def test_the_same_files_make_the_same_record(tmp_path: Path) -> None:
    async with sandbox(tmp_path / "one") as one, sandbox(tmp_path / "two") as two:
        for server, commands in (
            (one, "echo 1 > x; echo 2 > y"),
            (two, "echo 2 > y; touch -d 2001-01-01 y; echo 1 > x"),
        ):
            await server.seed()
            await server.run(commands)
        assert await checkpoint(one.participant) == await checkpoint(two.participant)


async def test_a_state_that_is_refused_starts_no_process(tmp_path: Path) -> None:
    async with sandbox(tmp_path / "one") as one, sandbox(tmp_path / "two", started=False) as two:
        await one.seed("s")
        await one.seed("t", Episode("t", 0))
        records = await checkpoint(one.participant)
        broken = json.loads(records["t"])
        broken["state"]["files"][0]["path"] = "../outside"
        records["t"] = json.dumps(broken).encode()
        with pytest.raises(ProtocolError, match="session states") as refused:
            await restore_built(two.participant, records, "r", "t")
        assert refused.value.code == "invalid_checkpoint_state"
        assert (two.directories(), two.server._boxes) == ([], {})


async def test_a_restore_that_cannot_build_one_sandbox_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with sandbox(tmp_path / "one") as one, sandbox(tmp_path / "two", started=False) as two:
        for name in "stu":
            await one.seed(name, Episode(name, 0))
        records = await checkpoint(one.participant)
        place = SandboxServer._place

        def full(self: SandboxServer, session_id: str) -> Path:
            return Path("/proc/no-such-place") if session_id == "u" else place(self, session_id)

        with monkeypatch.context() as patched:
            patched.setattr(SandboxServer, "_place", full)
            with pytest.raises(OSError):
                await restore_built(two.participant, records, "s", "t", "u")
        await until(lambda: not two.server._boxes)
        assert two.directories() == []
        assert len(await restore_built(two.participant, records, "s", "t", "u")) == 3


async def test_parked_sandboxes_keep_their_files_and_come_back(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as one:
        await one.seed()
        await one.run("echo 2 > new")
        pid = one.pid()
        assert prepare(one.participant)
        await one.participant.park()
        assert not alive(pid)
        assert len(one.directories()) == 1
        one.participant.unpark()
        resume(one.participant)
        assert (await one.run("cat new"))["output"] == "2\n"
        assert (await one.verify())["reward"] == 1.0


# ---- files as values --------------------------------------------------------------------------------------


def entry(path: str, kind: str = "file", **more: Any) -> dict[str, Any]:
    data = {"data": ""} if kind == "file" else {"target": "/etc"} if kind == "link" else {}
    return {"path": path, "kind": kind, "mode": 0o644, **data, **more}


@pytest.mark.parametrize(
    "tree",
    [
        [entry("../x")],
        [entry("/x")],
        [entry("a/../../x"), entry("a", "dir"), entry("a/..", "dir")],
        [entry("%2e%2e/x"), entry("..", "dir")],
        [entry("a/x")],
        [entry("a", "link"), entry("a/passwd")],  # through a link, out of the directory
        [entry("x"), entry("x")],
        [entry("")],
        [entry("x", "device")],
        [entry("x", mode=-1)],
        [entry("x", data="no base64")],
        [entry("x", data="A" * 400)],
        [{}],
        "text",
        [3],
    ],
)
def test_a_tree_that_no_snapshot_could_have_made_is_refused(tree: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        check(tree, 200)


def test_a_tree_comes_back_as_it_was(tmp_path: Path) -> None:
    source = tmp_path / "source"
    build(source, of_texts({"a/b/c": "x", "d": "y"}))
    (source / "a/link").symlink_to("/nowhere/at all")
    (source / os.fsdecode(b"name\xff \n%")).write_bytes(bytes(range(256)))
    (source / "closed").mkdir()
    (source / "closed/f").write_text("z")
    (source / "closed").chmod(0o555)
    os.mkfifo(source / "pipe")
    with unlocked(source / "closed"):
        tree = snapshot(source, 10_000, 100)
        assert json.loads(json.dumps(tree)) == tree
        build(tmp_path / "copy", check(tree, 10_000))
        with unlocked(tmp_path / "copy/closed"):
            assert snapshot(tmp_path / "copy", 10_000, 100) == tree
    with pytest.raises(TreeTooLarge, match="200 bytes"):
        snapshot(source, 200, 100)
    with pytest.raises(TreeTooLarge, match="3 files"):
        snapshot(source, 10_000, 3)


@contextmanager
def unlocked(path: Path) -> Iterator[None]:
    """So that the temporary folder can be removed afterwards."""
    try:
        yield
    finally:
        path.chmod(0o755)


# ---- a whole cell -----------------------------------------------------------------------------------------


@asynccontextmanager
async def collecting(folder: Path) -> AsyncIterator[Rig]:
    servers = [
        {"name": "env", "kind": "environment", "server": "single-agent-turn"},
        {"name": "policy", "kind": "model", "server": "scripted", "config": {"base_url": "http://engine"}},
        {"name": "agent", "kind": "agent", "server": "simple-agent"},
        {
            "name": "box",
            "kind": "resources",
            "server": "sandbox",
            "config": {"directory": str(folder / "boxes"), "journal": str(folder / "journal.jsonl")},
        },
    ]
    made: list[SandboxServer] = []
    original = SandboxServer.__init__

    def noted(self: SandboxServer, config: Any) -> None:
        original(self, config)
        made.append(self)

    with mock.patch.object(SandboxServer, "__init__", noted):
        try:
            async with cell(folder, sandbox_rows(3, 1), servers=servers) as rig:
                yield rig
        finally:
            for server in made:  # those of killed processes, too
                await asyncio.gather(*map(server.retire_session_state, list(server._boxes)))


def rows(rig: Rig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (rig.folder / "output/rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("victim", ["box", "env"])
async def test_c15_rollouts_continue_in_their_sandboxes_and_no_command_is_lost_or_run_twice(
    tmp_path: Path, victim: str
) -> None:
    async with collecting(tmp_path) as rig:
        await rig.until(lambda: rig.effects() >= 4)
        await rig.checkpoint("one")
        seeds = sum(entry["kind"] == "seed" for entry in rig.journal())
        await rig.until(lambda: rig.effects() >= 6)
        rig.kill(victim)
        await rig.until(rig.complete)
        assert [row["reward"] for row in rows(rig)] == [1.0] * 3
        assert {row["_ng_attempt_index"] for row in rows(rig)} == {1}
        assert sum(entry["kind"] == "seed" for entry in rig.journal()) == seeds


async def test_c22_a_rollout_whose_sandbox_died_fails_as_lost_and_starts_over(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        await rig.until(lambda: rig.effects() >= 3)
        server = rig.participant("box").hooks.retire.__self__
        (first, *_) = server._boxes.values()
        os.kill(first.pid, signal.SIGKILL)
        await rig.until(rig.complete)
        failures = [
            json.loads(line) for line in (rig.folder / "output/rollouts_failures.jsonl").read_text().splitlines()
        ]
        assert [failure["failure_kind"] for failure in failures] == ["session_lost"]
        assert [row["reward"] for row in rows(rig)] == [1.0] * 3
