"""One S3 server for all process tests; a stack of real processes that keeps its checkpoints and rows there; and one
whose storage fails as a test wants."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gym_kit.bucket import REGION, SeaweedFS
from gym_kit.faulty_s3 import FaultyS3
from gym_kit.local_run import LocalRun, followed
from gym_rig.stack_storage import Stack
from gym_servers.coordination.checkpoint import Outcome, Progress
from gym_servers.engine.rows import counter_rows
from gym_servers.local.demo import engine_process, manifest
from gym_servers.proof.account import Account, account
from gym_servers.proof.history import read_cut, sort_journal
from gym_servers.stack.settings import S3Settings
from gym_servers.storage import s3 as s3_module
from gym_servers.storage.locate import open_store
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.store import ObjectStore

BUCKET = "gym"


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """A running S3 server with one bucket; its credentials are in this process's environment."""
    with SeaweedFS(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patched:
        server.create_bucket(BUCKET)
        patched.setenv("AWS_ACCESS_KEY_ID", server.credentials.access_key)
        patched.setenv("AWS_SECRET_ACCESS_KEY", server.credentials.secret_key)
        yield server


@pytest.fixture
def faulty(s3: SeaweedFS) -> Iterator[FaultyS3]:
    """The S3 server behind a proxy that fails as a test wants."""
    with FaultyS3(s3.endpoint) as proxy:
        yield proxy


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults that last are seen in a moment."""
    monkeypatch.setattr(s3_module, "READ_SECONDS", 1)
    monkeypatch.setattr(s3_module, "REQUEST_TRIES", 2)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """The test's own place in the bucket."""
    return tmp_path.name.lower().replace("_", "-")


@pytest.fixture
def stack(faulty: FaultyS3, s3: SeaweedFS, prefix: str) -> Stack:
    """A stack whose storage may fail."""
    return Stack(prefix, faulty.endpoint, s3.credentials)


def document(folder: Path, engine: str, rollouts: int, endpoint: str, prefix: str) -> dict[str, Any]:
    """The demonstration's stack with checkpoints and rows in the bucket."""
    stack = manifest(folder, engine, folder / "tasks.jsonl", rollouts)
    reach = {"bucket": BUCKET, "prefix": prefix, "endpoint": endpoint, "region": REGION, "addressingStyle": "path"}
    stack["spec"]["checkpoints"]["storage"] = {"s3": reach}
    stack["spec"]["collection"]["output"] = f"s3://{BUCKET}/{prefix}/output"
    return stack


@dataclass
class Run(LocalRun):
    """A collection on real processes, and what a test does to it."""

    store: Callable[[str], ObjectStore]
    prefix: str

    async def settled(self) -> None:
        """Until no checkpoint is open: one whose storage was away is settled by a look after it is back."""
        await self.until("nothing open", lambda: self.runner.controller.record.open is None)

    async def progress(self, effects: int = 3) -> None:
        """Until that many more tool effects are in the journal."""
        before = self.effects()
        await self.until(f"{effects} more effects", lambda: self.effects() >= before + effects)

    async def end(self) -> Account:
        """Wait for the last row; the account of the run."""
        await self.until("the end", lambda: self.runner.progress().get("ended"))
        return await asyncio.to_thread(self.account)

    def kill(self, name: str) -> None:
        names = [name] if name != "all" else list(self.runner.view.seen if self.runner.view else ())
        for one in names:
            self.runner.host.kill(one)

    async def take(self, name: str, at: str = "", then: Callable[[], None] = lambda: None) -> Outcome:
        """A checkpoint; `then` runs when it announces the phase `at`."""

        async def tell(progress: Progress) -> None:
            if progress.phase == at:
                then()

        return await self.runner.controller.take(f"{name}-{time.time_ns():x}", name, tell)

    def entries(self) -> list[dict[str, Any]]:
        journal = self.folder / "journal.jsonl"
        text = journal.read_text() if journal.exists() else ""  # made by its first entry
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def effects(self) -> int:
        return sum(entry["kind"] == "effect" for entry in self.entries())

    def account(self) -> Account:
        rows = self.store(f"s3://{BUCKET}/{self.prefix}/output").get("rollouts.jsonl")
        cuts = {}
        for recovery in self.runner.controller.record.recoveries:
            if recovery.checkpoint is not None:
                store = self.store(recovery.checkpoint.uri)
                cuts[recovery.attempt] = read_cut(store, read_publication(store.get(CHECKPOINT)))
        return account(self.rollouts, list(map(json.loads, rows.splitlines())), sort_journal(self.entries()), cuts)

    def sources(self) -> list[str | None]:
        """What each recovery continued from."""
        recoveries = self.runner.controller.record.recoveries
        return [one.checkpoint.name if one.checkpoint else None for one in recoveries]


@pytest.fixture
def collecting(s3: SeaweedFS, tmp_path: Path, prefix: str) -> Callable[..., Any]:
    """Start a collection whose rollouts last about `steps` tool rounds each."""

    @asynccontextmanager
    async def start(
        rollouts: int = 4, steps: int = 12, rate: float = 120.0, endpoint: str = s3.endpoint
    ) -> AsyncIterator[Run]:
        rows = counter_rows(rollouts, 7, (steps, steps + 3))
        (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        reach = S3Settings(bucket=BUCKET, endpoint=endpoint, region=REGION, addressing_style="path")
        async with engine_process(tmp_path, tmp_path / "journal.jsonl", rate) as engine:
            stack = document(tmp_path, engine, rollouts, endpoint, prefix)
            async with followed(stack, tmp_path) as cell:
                run = Run(tmp_path, cell, rollouts, lambda uri: open_store(uri, reach), prefix)
                await run.in_service(0)
                yield run

    return start
