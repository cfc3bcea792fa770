"""Local processes as a cell's host: starts them, sees them end, and replaces them as a StatefulSet would."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final, Literal

from pydantic import ValidationError

from gym_servers.coordination.cell_host import Process
from gym_servers.coordination.record import CellRecord
from gym_servers.local.children import start
from gym_servers.stack.settings import SettingsError, describe
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import ObjectMissing, StorageError

Announce = Callable[[str, str, str], None]
RECORD: Final = "cell.json"
ADDRESSES: Final = "addresses.json"


@dataclass
class _Child:
    process: asyncio.subprocess.Process
    incarnation: str
    log: IO[bytes]
    told_to_end: bool = False


class LocalHost:
    """The processes of one cell. `settings`: server name -> rendered settings; `folder`, which is this process's
    alone, keeps settings, logs and the cell's record, `<server>.pid` with the number of each process, and
    `addresses.json` with where it takes calls. `environment` carries the secrets."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, dict[str, Any]],
        environment: Mapping[str, str],
        announce: Announce,
    ) -> None:
        self._folder, self._settings, self._announce = folder, settings, announce
        self._files = DirectoryStore(folder)
        self._environment = environment
        self._children: dict[str, _Child] = {}
        self._said: dict[str, str] = {}

    # ---- CellHost -----------------------------------------------------------------------------------------

    async def processes(self) -> Sequence[Process]:
        """Starts whatever has no process, then tells what there is. Raises StorageError where the folder cannot be
        used."""
        for name in self._settings:
            child = self._children.get(name)
            if child is None or child.process.returncode is not None:
                try:
                    if child is not None and not child.told_to_end:
                        self._say_why(name, child)
                    await self._start(name)
                except OSError as error:
                    raise StorageError(f"cannot start {name} in {self._folder}: {error.strerror}") from error
        return [self._process(name) for name in self._settings]

    async def end(self, processes: Mapping[str, str]) -> None:
        for name, incarnation in processes.items():
            child = self._children.get(name)
            if child is not None and child.incarnation == incarnation:
                await self._kill(child)

    async def save(self, record: CellRecord) -> None:
        """Nobody else writes into this folder. Not in a thread: two writes must not overtake each other. Raises
        StorageError."""
        self._files.replace(RECORD, record.model_dump_json(by_alias=True).encode())

    async def announce(self, level: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        self._announce(level, reason, message)

    # ---- processes ----------------------------------------------------------------------------------------

    def load(self) -> CellRecord | None:
        """The record of an earlier run in this folder. Raises SettingsError for one that cannot be read: to begin
        anew instead would use attempt numbers twice."""
        path = self._folder / RECORD
        try:
            return CellRecord.model_validate_json(self._files.get(RECORD))
        except ObjectMissing:
            return None
        except (StorageError, ValidationError) as error:
            raise SettingsError(
                f"the record of the run cannot be read - {path}: {describe(error)}; restore that file from a copy, "
                "or begin another run in another --folder"
            ) from error

    def kill(self, name: str) -> None:
        """SIGKILL one server, as a test of what follows. Raises KeyError for an unknown name."""
        os.kill(self._children[name].process.pid, signal.SIGKILL)

    async def close(self) -> None:
        await asyncio.gather(*(self._kill(child) for child in self._children.values()))

    def _process(self, name: str) -> Process:
        settings, child = self._settings[name], self._children[name]
        url = f"http://127.0.0.1:{settings['control_port']}"
        return Process(name, settings["kind"], child.incarnation, child.process.returncode is None, url)

    async def _start(self, name: str) -> None:
        old = self._children.get(name)
        if old is not None:
            old.log.close()
        ports = {one: each["data_port"] for one, each in self._settings.items() if "data_port" in each}
        addresses = {one: f"http://127.0.0.1:{port}" for one, port in ports.items()}
        self._files.replace(ADDRESSES, json.dumps(addresses, indent=1).encode())
        path = self._folder / f"{name}.json"
        path.write_text(json.dumps(self._settings[name], indent=1))
        log = (self._folder / f"{name}.log").open("ab")
        try:
            process = await start(log, "serve", "--settings", str(path), environment=self._environment)
        except BaseException:
            log.close()
            raise
        self._children[name] = _Child(process, f"{process.pid}-{uuid.uuid4().hex[:8]}", log)
        (self._folder / f"{name}.pid").write_text(str(process.pid))

    def _say_why(self, name: str, child: _Child) -> None:
        """Why a server ended by itself, in its own last words; once, or a server that cannot start would fill the
        screen."""
        path = self._folder / f"{name}.log"
        words = path.read_text(errors="replace").strip().rpartition("\n")[2][-500:]
        text = f"{name} ended with {child.process.returncode}; its log {path} ends with: {words or 'nothing'}"
        if self._said.get(name) != text:
            self._said[name] = text
            self._announce("Warning", "ServerEnded", text)

    @staticmethod
    async def _kill(child: _Child) -> None:
        child.told_to_end = True
        if child.process.returncode is None:
            child.process.kill()
        await child.process.wait()
        child.log.close()
