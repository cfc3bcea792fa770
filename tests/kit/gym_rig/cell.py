"""A whole cell in one event loop: real servers, real control planes, the real coordinator, no sockets.

async with cell(tmp_path, rows) as rig:
    await rig.until(rig.running)
    await rig.checkpoint("one")
    rig.kill("agent")
    await rig.until(rig.complete)
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast
from unittest import mock

import httpx
from fastapi._compat import v2 as fastapi_types
from pydantic import TypeAdapter

from gym_rig.network import Alive, Network
from gym_rig.storage import Bucket, BucketView, FaultyOutput
from gym_rig.virtual import end_all, now
from gym_servers import assemble as assembly
from gym_servers.assemble import Server, assemble
from gym_servers.control.app import control_app
from gym_servers.control.plane import ControlPlane
from gym_servers.control.tokens import only
from gym_servers.coordination.cell_host import CellSettings, Process, View
from gym_servers.coordination.checkpoint import Outcome, Progress
from gym_servers.coordination.client import ParticipantClient
from gym_servers.coordination.controller import CellController
from gym_servers.coordination.record import CellRecord, Stage
from gym_servers.engine.app import create_app as engine_app
from gym_servers.http import peers
from gym_servers.local.demo import account_of
from gym_servers.participants.collection import CollectionParticipant, FindJob, Job
from gym_servers.proof.account import Account
from gym_servers.stack.render import checkpoint_root, render_settings
from gym_servers.stack.settings import ServerSettings, StackIdentity
from gym_servers.stack.spec import parse_spec
from gym_servers.storage.locate import open_store
from gym_servers.storage.store import ObjectStore

TOKEN = "token-that-nobody-tells"
COOKIES = "cookies-that-nobody-tells"
IDENTITY = StackIdentity(namespace="local", name="rig", uid="rig-uid")
GRACE = 60.0
LOOK_SECONDS = 0.2
LONGEST_SECONDS = 300.0  # of virtual time: far more than anything here takes


class RigJournal:
    """Appends to a file that it holds open for no longer than an entry takes: processes here end without notice.
    An append takes `seconds`; what a process that died meanwhile had to say is not kept."""

    def __init__(self, path: Path, seconds: float = 0.0) -> None:
        self.path, self.seconds = path, seconds
        self.on_entry: Callable[[Alive, Mapping[str, Any]], None] = lambda alive, entry: None

    def of(self, alive: Alive) -> ProcessJournal:
        return ProcessJournal(self, alive)


@dataclass(frozen=True)
class ProcessJournal:
    journal: RigJournal
    alive: Alive

    async def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        if self.journal.seconds:
            await asyncio.sleep(self.journal.seconds)
        if self.alive.died.is_set():
            await asyncio.get_running_loop().create_future()
        with self.journal.path.open("ab", buffering=0) as file:
            file.write(b"".join(json.dumps(entry).encode() + b"\n" for entry in entries))
        for entry in entries:
            self.journal.on_entry(self.alive, entry)


async def _run(background: Callable[[], Awaitable[None]]) -> None:
    await background()


class _Switch:
    """Stands for the plane of an application that is used again: making its routes costs more than a whole test
    does otherwise."""

    plane: ControlPlane

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plane, name)


_SPARE: list[tuple[_Switch, Any]] = []


_ADAPTERS: dict[str, TypeAdapter[Any]] = {}


def _kept_adapter(type: Any, *, config: Any = None) -> TypeAdapter[Any]:
    """Made once for each type: a process's routes are made again at each of its starts."""
    key = f"{type!r} {config!r}"
    if key not in _ADAPTERS:
        _ADAPTERS[key] = TypeAdapter(type, config=config)
    return _ADAPTERS[key]


@dataclass(eq=False)
class Running:
    """One server process."""

    settings: ServerSettings
    server: Server
    plane: ControlPlane | None
    alive: Alive
    background: asyncio.Task[None] | None

    @property
    def incarnation(self) -> str:
        return self.alive.name

    def kill(self) -> None:
        self.alive.kill()
        if self.background is not None:
            self.background.cancel()
        if self.plane is not None:
            self.plane._lease.end()  # a dead process's timers do not fire


class Rig:
    """The cell's processes and its coordinator; also the coordinator's `CellHost`."""

    plane_type: type[ControlPlane] = ControlPlane

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, ServerSettings],
        root: str,
        *,
        rate: float,
        backoff_limit: int = 5,
        beside: Rig | None = None,
        suffix: str = "",
    ) -> None:
        """`beside`: another cell of the same stack, in whose network this one is; `suffix` is what its hosts' names
        end with there."""
        self.folder, self.settings, self._suffix = folder, settings, suffix
        self.wall = asyncio.get_running_loop().time  # bound: threads ask it too
        self.network: Network = beside.network if beside is not None else Network()
        self.processes_by_name: dict[str, Running] = {}
        self.saved: list[CellRecord] = []
        self.on_save: Callable[[CellRecord], None] = lambda record: None
        self.said: list[tuple[str, str, str]] = []
        self._count = 0
        self.journal_file = RigJournal(folder / "journal.jsonl")
        self.bucket: Bucket | None = None  # where it is set, all storage goes through it
        self._control_apps: list[tuple[_Switch, Any]] = []
        if beside is None:
            engine = Alive("engine")
            self.network.listen("engine", engine_app(rate, self.journal_file.of(engine)), engine)
        self.http = self.network.client()
        self.root, self.backoff_limit = root, backoff_limit
        self.controller = self.coordinator(None)
        self.view: View | None = None

    def coordinator(self, record: CellRecord | None) -> CellController:
        """A coordinator of this cell, such as one that takes over."""
        return CellController(self, self.cell_settings(), open_store, self.http, record, wall=self.wall)

    def control_host(self, name: str) -> str:
        return f"{name}{self._suffix}-control"

    def cell_settings(self, **changes: Any) -> CellSettings:
        return CellSettings(
            **{
                "stack_uid": IDENTITY.uid,
                "cell": 0,
                "token": TOKEN,
                "root": self.root,
                "backoff_limit": self.backoff_limit,
                "lease_grace": GRACE,
                **changes,
            }
        )

    def opener(self, alive: Alive) -> Callable[..., ObjectStore]:
        """`open_store` as a process has it."""
        bucket = self.bucket
        if bucket is None:
            return open_store
        return lambda uri, *_, **__: BucketView(bucket, uri, alive)

    # ---- CellHost -----------------------------------------------------------------------------------------

    async def processes(self) -> Sequence[Process]:
        for name in self.settings:
            running = self.processes_by_name.get(name)
            if running is None or running.alive.died.is_set():
                self.start(name)
        return [
            Process(
                name,
                one.settings.kind,
                one.incarnation,
                not one.alive.died.is_set(),
                f"http://{self.control_host(name)}",
            )
            for name, one in self.processes_by_name.items()
        ]

    async def end(self, processes: Mapping[str, str]) -> None:
        for name, incarnation in processes.items():
            if self.processes_by_name[name].incarnation == incarnation:
                self.kill(name)

    async def save(self, record: CellRecord) -> None:
        self.saved.append(CellRecord.model_validate_json(record.model_dump_json(by_alias=True)))
        self.on_save(self.saved[-1])

    async def announce(self, level: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        self.said.append((level, reason, message))

    # ---- processes ----------------------------------------------------------------------------------------

    def start(self, name: str) -> Running:
        self._count += 1
        alive = Alive(f"{name}{self._suffix}-{self._count}")
        client = partial(httpx.AsyncClient, transport=self.network.transport(alive))
        opener = self.opener(alive)
        with (
            mock.patch.object(httpx, "AsyncClient", client),
            mock.patch.object(assembly, "open_journal", lambda _: self.journal_file.of(alive)),
            mock.patch.object(assembly, "open_store", opener),
            mock.patch.object(fastapi_types, "TypeAdapter", _kept_adapter),
        ):
            server = assemble(self.settings[name], COOKIES, only(TOKEN))
        server.participant.gate.clock = self.wall
        if self.bucket is not None and isinstance(server.participant, CollectionParticipant):
            server.participant._find = _with_faults(server.participant._find, self.bucket, alive)
        plane = None
        if self.settings[name].checkpoint.enabled:
            grace = self.settings[name].checkpoint.lease_grace_seconds
            plane = self.plane_type(server.participant, server.author, opener, grace=grace, wall=self.wall)
            self.network.listen(self.control_host(name), self._control_app(plane), alive)
        self.network.listen(f"{name}{self._suffix}", server.app, alive)
        background = None
        if server.background is not None:
            background = asyncio.get_running_loop().create_task(_run(server.background), context=alive.context())
        running = Running(self.settings[name], server, plane, alive, background)
        self.processes_by_name[name] = running
        return running

    def _control_app(self, plane: ControlPlane) -> Any:
        if _SPARE:
            switch, app = _SPARE.pop()
        else:
            switch = _Switch()
            app = control_app(cast("ControlPlane", switch), TOKEN)
        switch.plane = plane
        self._control_apps.append((switch, app))
        return app

    def give_back(self) -> None:
        """The cell is at its end: its applications can serve another."""
        _SPARE.extend(self._control_apps)
        self._control_apps.clear()

    def kill(self, *names: str) -> None:
        for name in names or tuple(self.processes_by_name):
            self.processes_by_name[name].kill()

    def participant(self, name: str) -> Any:
        return self.processes_by_name[name].server.participant

    def client(self, name: str) -> ParticipantClient:
        """The coordinator's client of a process, for a test that plays the coordinator."""
        return ParticipantClient(
            name, self.settings[name].kind, f"http://{self.control_host(name)}", TOKEN, self.http, self.wall
        )

    # ---- driving ------------------------------------------------------------------------------------------

    async def until(self, condition: Callable[[], object]) -> None:
        """Look again and again, as a coordinator does, until the condition holds."""
        give_up = now() + LONGEST_SECONDS
        while True:
            self.view = await self.controller.look()
            if condition():
                return
            for one in self.processes_by_name.values():
                if one.background is not None and one.background.done() and not one.background.cancelled():
                    one.background.result()
            if now() > give_up:
                raise AssertionError(f"still {self.controller.record.stage} with {self.progress()}: {self.said[-5:]}")
            await asyncio.sleep(LOOK_SECONDS)

    async def checkpoint(self, name: str) -> Outcome:
        """A checkpoint, while looks go on as they do beside a real one."""

        async def tell(_: Progress) -> None:
            return None

        taken = asyncio.ensure_future(self.controller.take(f"{name}-id", name, tell))
        await self.until(taken.done)
        return taken.result()

    def running(self, attempt: int = 0) -> bool:
        record = self.controller.record
        return record.stage is Stage.RUNNING and record.attempt >= attempt

    def progress(self) -> dict[str, int]:
        seen = self.view.seen.values() if self.view else ()
        return next((s.status.progress for s in seen if s.status is not None and s.status.progress), {})

    def complete(self) -> bool:
        return bool(self.progress().get("complete"))

    def effects(self) -> int:
        """Tool effects in the journal so far."""
        return sum(entry["kind"] == "effect" for entry in self.journal())

    def journal(self) -> list[dict[str, Any]]:
        path = self.folder / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def account(self, expected: int) -> Account:
        return self.account_of(self.controller.record, expected)

    def account_of(self, record: CellRecord, expected: int) -> Account:
        return account_of(self.folder, record, expected)


def rig_settings(
    folder: Path,
    rows: Iterable[Mapping[str, Any]],
    *,
    index: int = 0,
    suffix: str = "",
    cells_file: Path | None = None,
    identity: StackIdentity = IDENTITY,
    **spec: Any,
) -> tuple[dict[str, ServerSettings], str]:
    """The settings of a counter stack's processes, and the root of its checkpoints. `index` is the cell, `suffix` as
    in `Rig`."""
    folder.mkdir(parents=True, exist_ok=True)
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    document = {
        "servers": [
            {"name": "env", "kind": "environment", "server": "single-agent-turn"},
            {"name": "policy", "kind": "model", "server": "scripted", "config": {"base_url": "http://engine"}},
            {"name": "agent", "kind": "agent", "server": "simple-agent"},
            {
                "name": "counter",
                "kind": "resources",
                "server": "counter",
                "config": {"journal": str(folder / "journal.jsonl")},
            },
        ],
        "collection": {"tasks": str(tasks), "output": str(folder / "output"), "concurrency": 64},
        "checkpoints": {"storage": {"directory": str(folder / "checkpoints")}},
        **spec,
    }
    parsed = parse_spec({name: value for name, value in document.items() if value is not None})
    file = str(cells_file) if cells_file is not None else None
    rendered = render_settings(identity, parsed, lambda server: f"http://{server}{suffix}", cells_file=file)
    root = checkpoint_root(parsed.checkpoints.storage, identity, index) if parsed.checkpoints.storage else ""
    return {name: ServerSettings.model_validate({**values, "cell": index}) for name, values in rendered.items()}, root


@asynccontextmanager
async def cell(
    folder: Path, rows: Iterable[Mapping[str, Any]], *, rate: float = 100.0, **spec: Any
) -> AsyncIterator[Rig]:
    """A counter cell that collects `rows` at `rate` tokens a second; everything ends on the way out."""
    settings, root = rig_settings(folder, rows, **spec)
    with mock.patch.object(peers, "time", SimpleNamespace(monotonic=now)):
        backoff_limit = spec.get("recovery", {}).get("backoffLimit", 5)
        rig = Rig(folder, settings, root, rate=rate, backoff_limit=backoff_limit)
        try:
            yield rig
        finally:
            await rig.controller.close()
            rig.kill()
            await end_all()
            rig.give_back()


def _with_faults(find: FindJob, bucket: Bucket, alive: Alive) -> FindJob:
    """A job whose rows go where they may fail to be written."""

    async def found() -> Job:
        job = await find()
        return replace(job, output=FaultyOutput(job.output, bucket, alive))

    return found
