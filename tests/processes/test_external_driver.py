"""The worked example of a driver outside of the stack, as somebody would run it: a real stack by `gym-servers up`,
the example's own program, and a server that is killed under it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import yaml

from gym_servers.coordination.record import CellRecord
from gym_servers.engine.rows import counter_rows
from gym_servers.local.demo import account_of, engine_process

EXAMPLE = Path(__file__).parents[2] / "examples" / "external-driver"
ROLLOUTS = 4
PATIENCE_SECONDS = 100.0

pytestmark = pytest.mark.timeout(300)


@asynccontextmanager
async def started(log: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program of ours; told to end on the way out."""
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=file, stderr=file)
        try:
            yield process
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()


def end_of(log: Path) -> str:
    return log.read_text()[-2000:]


async def until(what: str, holds: Callable[[], object], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, f"{what}: {end_of(log)}"
        await asyncio.sleep(0.05)


async def test_the_example_drives_a_stack_through_a_death(tmp_path: Path) -> None:
    """Its driver is ended and started again, too: what still runs is joined."""
    folder, tasks = tmp_path / "stack", tmp_path / "tasks.jsonl"
    rows, said = folder / "output" / "rollouts.jsonl", tmp_path / "up.log"
    rows.parent.mkdir(parents=True)
    tasks.write_text("".join(json.dumps(row) + "\n" for row in counter_rows(ROLLOUTS, 7, (16, 18))))
    async with engine_process(tmp_path, folder / "journal.jsonl", 120.0) as engine:
        stack = yaml.safe_load((EXAMPLE / "stack.yaml").read_text())
        servers = {server["name"]: server for server in stack["spec"]["servers"]}
        servers["policy"]["config"]["base_url"] = engine
        servers["counter"]["config"] = {"journal": str(folder / "journal.jsonl")}
        stack["spec"]["checkpoints"]["storage"]["directory"] = str(folder / "checkpoints")
        manifest = tmp_path / "stack.yaml"
        manifest.write_text(yaml.safe_dump(stack))
        up = ("-m", "gym_servers", "up", str(manifest), "--folder", str(folder), "--every", "2s")
        drive = (
            str(EXAMPLE / "drive.py"),
            "--addresses",
            str(folder / "addresses.json"),
            str(tasks),
            str(rows),
        )
        async with started(said, *up):
            await until("addresses", (folder / "addresses.json").exists, said)
            driven = tmp_path / "drive.log"
            async with started(driven, *drive):
                await until("a checkpoint of all", lambda: f": {ROLLOUTS} episodes" in said.read_text(), said)
            async with started(driven, *drive) as driver:
                os.kill(int((folder / "agent.pid").read_text()), signal.SIGKILL)
                await until("the driver's end", lambda: driver.returncode is not None, driven)
                assert driver.returncode == 0, driven.read_text()
        record = CellRecord.model_validate_json((folder / "cell.json").read_text())
        counted = account_of(folder, record, ROLLOUTS)
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean, counted.continued) == (ROLLOUTS, 1.0, ROLLOUTS)
        assert record.attempt == 1
