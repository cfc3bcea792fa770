"""One sandbox: a directory, and the worker process whose commands change it. All of it blocks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_servers.resources.file_tree import Tree, TreeTooLarge, build, snapshot

WORKER = Path(__file__).with_name("sandbox_worker.py")
STOP_SECONDS = 2.0  # for a worker that is told to end, before it is killed
LATE_SECONDS = 5.0  # how much longer than a command may take its answer may: a worker that hangs is killed


class BoxLost(Exception):
    """The sandbox is not what it was: it must never be used again, nor a blank one in its place."""


@dataclass(frozen=True)
class Limits:
    """What a sandbox may use. Bytes are those of its files, `seconds` is for one command."""

    max_bytes: int = 16 * 1024 * 1024
    max_files: int = 10_000
    max_output: int = 64 * 1024
    seconds: float = 30.0


class Box:
    """`commands` counts those that ran. `lost` says why it cannot be used any more, empty where it can."""

    def __init__(self, directory: Path, limits: Limits, commands: int = 0, lost: str = "") -> None:
        self.directory, self._limits = directory, limits
        self.commands, self.lost = commands, lost
        self._worker: subprocess.Popen[str] | None = None
        self._group: int | None = None
        # A build that was cut short goes on in its thread: what frees the sandbox waits for it.
        self._lock = threading.Lock()
        self._removed = False

    @property
    def pid(self) -> int | None:
        return self._worker.pid if self._worker is not None else None

    def create(self, tree: Sequence[dict[str, Any]]) -> None:
        """Raises OSError; BoxLost where it was removed before it was there."""
        with self._lock:
            if self._removed:
                raise self._lose("it was removed")
            build(self.directory, tree)
            self._start()

    def start(self) -> None:
        """Start the worker over the directory as it is. Raises OSError."""
        with self._lock:
            if not self._removed:
                self._start()

    def _start(self) -> None:
        limits = [str(self._limits.max_bytes), str(self._limits.max_output)]
        self._worker = subprocess.Popen(
            [sys.executable, "-I", "-S", str(WORKER), str(self.directory), *limits],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            # Nothing of the server's environment: it holds secrets.
            env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.directory), "LANG": "C.UTF-8"},
            start_new_session=True,
        )

    def run(self, command: str) -> dict[str, Any]:
        """Run a command: its exit code - None where it took too long - and its output. Raises BoxLost."""
        worker = self._alive()
        assert worker.stdin is not None
        late = threading.Timer(self._limits.seconds + LATE_SECONDS, worker.kill)
        late.start()
        try:
            worker.stdin.write(json.dumps({"command": command, "seconds": self._limits.seconds}) + "\n")
            worker.stdin.flush()
            self._group = int(self._read(worker)["group"])
            reply = self._read(worker)
        except (OSError, ValueError, KeyError) as error:
            self._end_group()
            raise self._lose("its process died during a command") from error
        finally:
            late.cancel()
        self._group = None
        self.commands += 1
        self.tree()  # what cannot be kept is found out now, not by a checkpoint
        return reply

    def _read(self, worker: subprocess.Popen[str]) -> dict[str, Any]:
        assert worker.stdout is not None
        message: dict[str, Any] = json.loads(worker.stdout.readline())
        return message

    def tree(self) -> Tree:
        """The directory as it is. Raises BoxLost, also where it cannot be kept."""
        self._alive()
        try:
            return snapshot(self.directory, self._limits.max_bytes, self._limits.max_files)
        except (TreeTooLarge, OSError) as error:
            raise self._lose(str(error)) from error

    def _alive(self) -> subprocess.Popen[str]:
        if not self.lost and (self._worker is None or self._worker.poll() is not None):
            self._lose("its process died")
        if self.lost or self._worker is None:
            raise BoxLost(self.lost)
        return self._worker

    def _lose(self, why: str) -> BoxLost:
        self.lost = why
        return BoxLost(why)

    def _end_group(self) -> None:
        if self._group is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)

    def leave(self) -> None:
        """End the worker and keep the directory."""
        with self._lock:
            self._leave()

    def _leave(self) -> None:
        worker = self._worker
        if worker is not None and worker.stdin is not None and worker.poll() is None:
            with suppress(OSError):
                worker.stdin.write(json.dumps({"leave": True}) + "\n")
                worker.stdin.flush()
        self._end()

    def remove(self) -> None:
        """End the worker and remove the directory. Repeatable."""
        with self._lock:
            self._removed = True
            self._end()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self) -> None:
        worker, self._worker = self._worker, None
        if worker is None:
            return
        with suppress(OSError):
            if worker.stdin is not None:
                worker.stdin.close()
        try:
            worker.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._end_group()
            worker.kill()
            worker.wait()
        if worker.stdout is not None:
            worker.stdout.close()
