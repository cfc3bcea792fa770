"""`gym-servers demo`: the whole loop on this machine. A process is killed, its rollouts continue."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from gym_servers.collection.tasks import load_tasks
from gym_servers.coordination.cell_host import View
from gym_servers.coordination.record import CellRecord, Stage
from gym_servers.engine.rows import counter_rows
from gym_servers.local.children import start
from gym_servers.local.processes import Announce
from gym_servers.local.runner import Runner, running
from gym_servers.local.stack import free_ports, local_stack
from gym_servers.participants.collection import TasksError
from gym_servers.proof.account import Account, account
from gym_servers.proof.history import Cut, read_cut, sort_journal
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.store import StorageError

TIMEOUT_SECONDS = 180.0
ALL = "all"  # kills every server


@dataclass(frozen=True)
class DemoOptions:
    """`kill`: a server's name, or `all`. `tasks`: rows of one's own, None for generated ones."""

    rollouts: int = 16
    kill: str = "agent"
    kills: int = 1
    tokens_per_second: float = 150.0
    tasks: Path | None = None
    seed: int = 1


class DemoFailed(Exception):
    """The run did not get to its end; the message says where it stood."""


def manifest(folder: Path, engine: str, tasks: Path, rollouts: int) -> dict[str, Any]:
    """The demonstration's stack; its journal is `<folder>/journal.jsonl`."""
    return {
        "apiVersion": "gymops.dev/v1alpha1",
        "kind": "GymStack",
        "metadata": {"name": "demo"},
        "spec": {
            "servers": [
                {"name": "env", "kind": "environment", "server": "single-agent-turn"},
                {"name": "policy", "kind": "model", "server": "scripted", "config": {"base_url": engine}},
                {"name": "agent", "kind": "agent", "server": "simple-agent"},
                {
                    "name": "counter",
                    "kind": "resources",
                    "server": "counter",
                    "config": {"journal": str(folder / "journal.jsonl")},
                },
            ],
            "collection": {"tasks": str(tasks), "output": str(folder / "output"), "concurrency": rollouts},
            "checkpoints": {"storage": {"directory": str(folder / "checkpoints")}},
        },
    }


async def demo(folder: Path, options: DemoOptions, announce: Announce) -> dict[str, Any]:
    """Run a collection, checkpoint it in flight, kill `options.kill`, wait for the end; the report.

    Raises DemoFailed where it takes too long or stalls.
    """
    tasks, expected = await asyncio.to_thread(_tasks, folder, options)
    journal = folder / "journal.jsonl"
    async with engine_process(folder, journal, options.tokens_per_second) as engine:
        stack = local_stack(manifest(folder, engine, tasks, expected), folder)
        if options.kill not in (*stack.settings, ALL):
            raise DemoFailed(f"there is no server {options.kill!r} to kill; there are {', '.join(stack.settings)}")
        async with running(stack, folder, announce) as runner:
            pause, recoveries = await _scenario(runner, options)
    counted = account_of(folder, runner.controller.record, expected)
    return {
        **counted.document(),
        "checkpoint": {"pause_seconds": pause},
        "kill": {"target": options.kill, "recovery_seconds": recoveries},
        "problems": counted.problems,
        "ok": counted.ok and counted.continued > 0,
    }


def _tasks(folder: Path, options: DemoOptions) -> tuple[Path, int]:
    """The rows to collect, and how many there are."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = options.tasks or folder / "tasks.jsonl"
    if options.tasks is None:
        rows = counter_rows(options.rollouts, options.seed)
        tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        return tasks, len(load_tasks(str(tasks.absolute()), None))
    except (TasksError, StorageError) as error:
        raise DemoFailed(str(error)) from error


def account_of(folder: Path, record: CellRecord, expected: int) -> Account:
    """Count a local run from what it left in `folder`."""
    entries = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    rows = [json.loads(line) for line in (folder / "output" / "rollouts.jsonl").read_text().splitlines()]
    restored: dict[int, Cut] = {}
    for recovery in record.recoveries:
        if recovery.checkpoint is not None:
            store = open_store(recovery.checkpoint.uri)
            # One that cannot be read was refused: whatever claims to continue it is not proved.
            with suppress(ProtocolError, StorageError):
                restored[recovery.attempt] = read_cut(store, read_publication(store.get(CHECKPOINT)))
    return account(expected, rows, sort_journal(entries), restored)


async def _scenario(runner: Runner, options: DemoOptions) -> tuple[float, list[float]]:
    changed = asyncio.Event()

    async def watch(_: View) -> None:
        changed.set()

    loop = asyncio.create_task(runner.run(watch))

    async def until(what: str, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not condition():
            if loop.done():
                loop.result()
            record = runner.controller.record
            if record.stage is Stage.STALLED or time.monotonic() > deadline:
                raise DemoFailed(f"{what}: still {record.stage} with {runner.progress()}")
            changed.clear()
            look = asyncio.create_task(changed.wait())
            # Also woken by the loop's own end, and by nothing at all: the deadline holds in any case.
            await asyncio.wait({loop, look}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            look.cancel()

    def running_at(attempt: int) -> bool:
        record = runner.controller.record
        return record.stage is Stage.RUNNING and record.attempt >= attempt

    try:
        await until("start", lambda: running_at(0) and runner.progress().get("expected"))
        # Calls have to be under way for there to be something to continue.
        await until("work under way", lambda: _outstanding(runner) > 0)
        await asyncio.sleep(2.0)
        outcome = await runner.checkpoint("demo")
        for number in range(options.kills):
            await asyncio.sleep(1.0)
            attempt = runner.controller.record.attempt
            names = [options.kill] if options.kill != ALL else list(runner.view.seen if runner.view else ())
            for name in names:
                runner.host.kill(name)
            await until(f"recovery {number + 1}", partial(running_at, attempt + 1))
        await until("completion", lambda: runner.progress().get("ended"))
        seconds = [r.seconds for r in runner.controller.record.recoveries if r.seconds is not None]
        return round(outcome.pause_seconds, 3), seconds
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)


def _outstanding(runner: Runner) -> int:
    seen = runner.view.seen.values() if runner.view else ()
    return sum(s.status.report.counts.get("outstanding", 0) for s in seen if s.status is not None)


@asynccontextmanager
async def engine_process(folder: Path, journal: Path, rate: float) -> AsyncIterator[str]:
    """A scripted engine process; its address."""
    port = free_ports(1)[0]
    arguments = ["engine", "--port", str(port), "--tokens-per-second", str(rate), "--journal", str(journal)]
    with (folder / "engine.log").open("ab") as log:
        process = await start(log, *arguments)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                if process.returncode is not None:
                    raise DemoFailed(f"the engine ended; see {folder / 'engine.log'}")
                try:
                    await client.get(f"{url}/readyz")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
