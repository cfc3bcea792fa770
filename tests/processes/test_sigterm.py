"""SIGTERM ends a server at once, or once its last checkpoint is taken where whoever ends it leaves it time. Whoever
waits for it sees its connection break off: an error would be an answer."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_servers.engine.rows import counter_rows
from gym_servers.http.sessions import sign
from gym_servers.local.demo import manifest
from gym_servers.local.stack import LocalStack, local_stack
from gym_servers.protocol.messages import PREFIX
from gym_servers.stack.settings import AWAIT_FINAL

PATIENCE_SECONDS = 60.0
LONGEST_END_SECONDS = 10.0  # on a busy machine


@dataclass
class Served:
    """One server process whose peers take calls and never answer them."""

    process: asyncio.subprocess.Process
    data: httpx.AsyncClient
    control: httpx.AsyncClient
    peers: dict[str, str]
    reached: asyncio.Event  # a peer was called
    secret: str

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        reply = await self.data.post(path, json=body, **options)
        assert reply.is_success, reply.text
        return reply

    async def prepared(self) -> None:
        body = {"checkpoint_id": "cp", "deadline_ts": time.time() + 10}
        assert (await self.control.post(f"{PREFIX}/prepare", json=body)).json()["phase"] == "prepared"


@asynccontextmanager
async def served(folder: Path, stack: LocalStack, name: str) -> AsyncIterator[Served]:
    """The process of one server, in service."""
    reached = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        reached.set()
        await reader.read()  # until the caller is gone
        writer.close()

    peer = await asyncio.start_server(silent, "127.0.0.1", 0)
    nobody = f"http://127.0.0.1:{peer.sockets[0].getsockname()[1]}"
    settings = stack.settings[name]
    settings["peers"] = {each: {**one, "url": nobody} for each, one in settings["peers"].items()}
    if name == "policy":
        settings["config"] = {**settings["config"], "base_url": nobody}
    path = folder / f"{name}.json"
    path.write_text(json.dumps(settings))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gym_servers", "serve", "--settings", str(path)),
        env={**os.environ, **stack.environment},
    )
    data, control = (f"http://127.0.0.1:{settings[port]}" for port in ("data_port", "control_port"))
    token = {"authorization": f"Bearer {stack.environment['GYM_CONTROL_TOKEN']}"}
    try:
        async with (
            httpx.AsyncClient(base_url=data, timeout=None, trust_env=False) as data_client,
            httpx.AsyncClient(base_url=control, timeout=None, trust_env=False, headers=token) as control_client,
        ):
            urls = {each: one["url"] for each, one in settings["peers"].items()}
            secret = stack.environment["GYM_COOKIE_SECRET"]
            here = Served(process, data_client, control_client, urls, reached, secret)
            await in_service(here)
            yield here
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        peer.close()
        await peer.wait_closed()


async def in_service(here: Served) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        body = {"checkpoint_id": "start", "deadline_ts": time.time() + 10, "cell_attempt": 0}
        try:
            assert (await here.control.post(f"{PREFIX}/resume", json=body)).json()["phase"] == "idle"
            await here.data.get("/livez")
            return
        except httpx.TransportError:
            assert here.process.returncode is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not answer"
            await asyncio.sleep(0.05)


# ---- what each kind can be busy with ------------------------------------------------------------------------


async def environment(here: Served) -> asyncio.Future[httpx.Response]:
    row = counter_rows(1, 1)[0]
    body = {"episode_id": {"rollout_id": "x", "attempt": 0}, "task": {"task_input": row}}
    return asyncio.ensure_future(here.data.post("/run", json=body))


async def agent(here: Served) -> asyncio.Future[httpx.Response]:
    access = {"kind": "direct_http", "base_url": here.peers["counter"], "cookies": sign({}, here.secret)}
    body = {"agent_session_id": "s", "tool_accesses": [access]}
    seeded = await here.post("/ng-rollout/x/v1/agent_sessions", body)
    here.data.cookies = seeded.cookies
    return asyncio.ensure_future(here.data.post("/ng-rollout/x/v1/responses", json={"input": "add 1"}))


async def model(here: Served) -> asyncio.Future[httpx.Response]:
    return asyncio.ensure_future(here.data.post("/ng-rollout/x/v1/responses", json={"input": "add 1"}))


async def resources(here: Served) -> asyncio.Future[httpx.Response]:
    """A seed that waits for the end of a checkpoint."""
    await here.prepared()
    here.reached.set()
    return asyncio.ensure_future(here.data.post("/ng-rollout/x/seed_session", json={"initial_count": 1}))


async def collection(here: Served) -> None:
    """It calls by itself: nobody waits for it."""


BUSY: dict[str, Callable[[Served], Awaitable[asyncio.Future[httpx.Response] | None]]] = {
    "env": environment,
    "agent": agent,
    "policy": model,
    "counter": resources,
    "collection": collection,
}


async def test_a_server_that_is_told_to_end_breaks_its_calls_off_and_is_gone_at_once(tmp_path: Path) -> None:
    """Every kind, with work under way that would never end."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(counter_rows(1, 1)[0]) + "\n")
    stack = local_stack(manifest(tmp_path, "http://127.0.0.1:1", tasks, 1), tmp_path)

    async def ended(name: str) -> tuple[str, int | None]:
        """What its caller got, and its exit code."""
        async with served(tmp_path, stack, name) as here:
            calling = await BUSY[name](here)
            await asyncio.wait_for(here.reached.wait(), PATIENCE_SECONDS)
            here.process.send_signal(signal.SIGTERM)
            answer = "nothing"
            with suppress(TimeoutError, httpx.TransportError):
                async with asyncio.timeout(LONGEST_END_SECONDS):
                    await here.process.wait()
                    if calling is not None:
                        answer = str(await calling)
            return answer, here.process.returncode

    ends = await asyncio.gather(*(ended(name) for name in BUSY))
    assert dict(zip(BUSY, ends, strict=True)) == dict.fromkeys(BUSY, ("nothing", 0))


@pytest.mark.parametrize("stop", [True, False])
async def test_only_a_commit_that_stops_keeps_a_sandbox_beyond_the_end_of_its_server(
    tmp_path: Path, stop: bool
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(counter_rows(1, 1)[0]) + "\n")
    described = manifest(tmp_path, "http://127.0.0.1:1", tasks, 1)
    described["spec"]["servers"][-1].update(server="sandbox", config={"directory": str(tmp_path / "boxes")})
    async with served(tmp_path, local_stack(described, tmp_path), "counter") as here:
        await here.post("/ng-rollout/x/seed_session", {"files": {"note": "kept"}, "expected_files": {"note": ""}})
        (box,) = (tmp_path / "boxes/gym-sandboxes").iterdir()
        assert working_for(box)
        await here.prepared()
        body = {"checkpoint_id": "cp", "deadline_ts": time.time() + 20, "checkpoint_dir": str(tmp_path / "cp")}
        reply = await here.control.post(f"{PREFIX}/commit", json={**body, "stop": stop})
        assert reply.json()["phase"] == "committed", reply.text
        here.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(here.process.wait(), LONGEST_END_SECONDS) == 0
    # Whoever removes it is its worker, which ends by itself.
    deadline = time.monotonic() + PATIENCE_SECONDS
    while working_for(box):
        assert time.monotonic() < deadline, "the sandbox's worker goes on"
        await asyncio.sleep(0.05)
    assert [path.read_text() for path in box.glob("note")] == (["kept"] if stop else [])


async def test_a_server_whose_end_leaves_it_time_works_until_its_last_checkpoint_is_taken(tmp_path: Path) -> None:
    """As in a pod that somebody deletes: the kubelet tells the process at once, and waits."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(counter_rows(1, 1)[0]) + "\n")
    stack = local_stack(manifest(tmp_path, "http://127.0.0.1:1", tasks, 1), tmp_path)
    stack.environment[AWAIT_FINAL] = "true"
    async with served(tmp_path, stack, "counter") as here:
        here.process.send_signal(signal.SIGTERM)
        await here.post("/ng-rollout/x/seed_session", {"initial_count": 1})
        await here.prepared()
        body = {"checkpoint_id": "cp", "deadline_ts": time.time() + 20, "checkpoint_dir": str(tmp_path / "cp")}
        reply = await here.control.post(f"{PREFIX}/commit", json={**body, "stop": True})
        assert reply.json()["phase"] == "committed", reply.text
        status = (await here.control.get(f"{PREFIX}/status")).json()
        assert status["phase"] == "committed" and here.process.returncode is None
        ending = {"checkpoint_id": "end", "deadline_ts": time.time() + 10, "session": status["session"]}
        assert (await here.control.post(f"{PREFIX}/end", json=ending)).is_success
        assert await asyncio.wait_for(here.process.wait(), LONGEST_END_SECONDS) == 0


def working_for(box: Path) -> list[str]:
    """Processes that were given this directory."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(box).encode() in command.read_bytes():
                found.append(command.parent.name)
    return found
