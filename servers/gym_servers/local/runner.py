"""Runs a stack on this machine until its collection is complete or it is told to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import httpx

from gym_servers.coordination.cell_host import CellSettings, View
from gym_servers.coordination.checkpoint import CheckpointFailed, Outcome, Progress
from gym_servers.coordination.controller import CellController
from gym_servers.coordination.record import CellRecord, Hold, Stage, tried_again
from gym_servers.local.processes import Announce, LocalHost
from gym_servers.local.stack import LocalStack
from gym_servers.stack.durations import age_seconds, parse_duration
from gym_servers.stack.render import s3_settings
from gym_servers.storage.locate import open_store
from gym_servers.storage.store import StorageError

LOOK_SECONDS = 0.2
_WHAT_HELPS = {
    Hold.CODE: "run it with the servers of before, or set recovery.codeMismatch to Accept",
    Hold.POLICY: "run it again to go on from there",
}
Watch = Callable[[View], Awaitable[None]]


class Runner:
    """One local cell with its coordinator."""

    def __init__(self, host: LocalHost, controller: CellController, announce: Announce) -> None:
        self.host, self.controller, self._announce = host, controller, announce
        self.view: View | None = None
        self._problems: dict[str, str] = {}

    async def run(self, watch: Watch) -> None:
        """Look again and again; `watch` sees each look and may end the run by an exception or cancellation."""
        while True:
            try:
                self.view = await self.controller.look()
                self._tell("StorageError", "", "")
                for name, one in self.view.seen.items():
                    if one.status is not None:
                        self._tell("Problem", name, one.status.problem)
                await watch(self.view)
            except StorageError as error:
                self._tell("StorageError", "", str(error))
            await asyncio.sleep(LOOK_SECONDS)

    def _tell(self, reason: str, server: str, problem: str) -> None:
        """Announce what keeps a server, or the coordinator itself, from its work: once, until it changes."""
        if problem != self._problems.get(server, "") and problem:
            self._announce("Warning", reason, f"{server}: {problem}" if server else problem)
        self._problems[server] = problem

    async def checkpoint(self, name: str) -> Outcome:
        """Take a checkpoint. Raises CheckpointFailed."""

        async def tell(progress: Progress) -> None:
            self._announce("Normal", progress.phase, f"checkpoint {name}")

        outcome = await self.controller.take(f"{name}-{time.time_ns():x}", name, tell)
        self._announce(
            "Normal",
            "Published",
            f"checkpoint {name}: {len(outcome.publication.episodes)} episodes, {outcome.bytes} bytes, "
            f"paused {outcome.pause_seconds:.2f} s",
        )
        return outcome

    def progress(self) -> dict[str, int]:
        """The driver's counters: expected, rows, failed, ended, complete."""
        seen = self.view.seen.values() if self.view else ()
        return next((s.status.progress for s in seen if s.status is not None and s.status.progress), {})


@asynccontextmanager
async def running(stack: LocalStack, folder: Path, announce: Announce) -> AsyncIterator[Runner]:
    """A runner whose processes are ended on the way out. `folder` has to be the caller's alone. Raises SettingsError
    where an earlier run in it cannot be continued."""
    storage = stack.spec.checkpoints.storage
    s3 = storage.s3 if storage else None
    reach = s3_settings(s3) if s3 else None
    host = LocalHost(folder, stack.settings, stack.environment, announce)
    async with httpx.AsyncClient(trust_env=False) as http:
        controller = CellController(
            host,
            CellSettings(
                stack_uid=stack.identity.uid,
                cell=0,
                token=stack.environment["GYM_CONTROL_TOKEN"],
                root=stack.root,
                policy=stack.spec.recovery.policy,
                max_checkpoint_age=age_seconds(stack.spec.recovery.max_checkpoint_age),
                backoff_limit=stack.spec.recovery.backoff_limit,
                prepare_timeout=parse_duration(stack.spec.checkpoints.prepare_timeout),
                commit_timeout=parse_duration(stack.spec.checkpoints.commit_timeout),
                restart_blockers_after=stack.spec.checkpoints.restart_blockers_after,
                any_code=stack.spec.recovery.code_mismatch == "Accept",
            ),
            partial(open_store, s3=reach),
            http,
            _continued(host.load(), announce),
        )
        try:
            yield Runner(host, controller, announce)
        finally:
            await controller.close()
            await host.close()


def _continued(record: CellRecord | None, announce: Announce) -> CellRecord | None:
    """The record of the run before, as it is for one that goes on: whoever runs a stack again asks for another
    try."""
    if record is None:
        return None
    if record.stage is Stage.STALLED:
        announce("Normal", "TriedAgain", "the run before had given up; its cell is tried again")
    return tried_again(record, 0, suspended=True) or record


async def up(stack: LocalStack, folder: Path, announce: Announce, every: float | None) -> bool:
    """Run until the collection has ended, taking a checkpoint each `every` seconds; whether it is complete.

    A stack without a collection runs until it is cancelled.
    """
    async with running(stack, folder, announce) as runner:
        announce("Normal", "Starting", f"{folder / 'addresses.json'} has the servers' addresses")
        finished = asyncio.Event()

        async def watch(view: View) -> None:
            if view.record.stage is Stage.STALLED or view.record.held or runner.progress().get("ended"):
                finished.set()

        async def checkpoints(seconds: float) -> None:
            number = 0
            while True:
                await asyncio.sleep(seconds)
                number += 1
                try:
                    await runner.checkpoint(f"auto-{number}")
                except CheckpointFailed as error:
                    announce("Warning", error.reason, str(error))
                except StorageError as error:
                    announce("Warning", "StorageError", str(error))

        tasks: list[asyncio.Task[None]] = [asyncio.create_task(runner.run(watch))]
        if every is not None:
            tasks.append(asyncio.create_task(checkpoints(every)))
        done = asyncio.create_task(_until(finished))
        try:
            await asyncio.wait([*tasks, done], return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            for task in (*tasks, done):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        progress = runner.progress()
        complete = bool(progress) and progress["rows"] == progress["expected"]
        if complete:
            announce(
                "Normal", "Complete", f"all {progress['expected']} rows are there; the output says what they are"
            )
        else:
            announce("Warning", "Incomplete", _what_is_missing(runner.controller.record, progress, folder))
        return complete


def _what_is_missing(record: CellRecord, progress: Mapping[str, int], folder: Path) -> str:
    rows = f"{progress.get('rows', 0)} of {progress.get('expected', 0)} rows are there"
    if record.held:
        return f"{rows}; {record.held}; {_WHAT_HELPS[record.held_for]}"
    if record.stage is Stage.STALLED:
        logs = f"their logs are in {folder}"
        return f"{rows}; the cell has given up: correct what ends its servers - {logs} - and run it again"
    return f"{rows}, {progress.get('failed', 0)} rollouts failed; rollouts_failures.jsonl in the output says why"


async def _until(event: asyncio.Event) -> None:
    await event.wait()
