"""Long-lived processes: started detached, remembered so that a later process can end exactly these.

A process id alone is reused by the kernel, so a process is identified by id and start time. Signals go through a
pidfd opened before the identity is checked: from then on the descriptor can only mean that process.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gym_kit.errors import KitError
from gym_kit.run import search_path


@dataclass(frozen=True)
class ProcessId:
    """`started` is in clock ticks since boot, as the kernel counts it."""

    pid: int
    started: int


def parse_stat(text: str) -> tuple[str, int]:
    """State letter and start time out of `/proc/PID/stat`; the name in it may hold spaces and brackets."""
    fields = text[text.rindex(")") + 1 :].split()
    return fields[0], int(fields[19])


def identify(pid: int) -> ProcessId | None:
    """The identity of the process that has this id now; None if there is none, or only its corpse."""
    try:
        state, started = parse_stat(Path(f"/proc/{pid}/stat").read_text())
    except OSError:
        return None
    return None if state in "ZX" else ProcessId(pid, started)


def is_alive(process: ProcessId) -> bool:
    return identify(process.pid) == process


def spawn(argv: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> ProcessId:
    """Starts `argv` in a session of its own, output appended to `log`; it outlives this process.

    posix_spawn rather than subprocess: a Popen object warns when it is dropped while its child runs, and here that
    is the point. Raises KitError when the program cannot be started.
    """
    words = [str(word) for word in argv]
    whole_env = {**os.environ, "PATH": search_path(), **(env or {})}
    program = shutil.which(words[0], path=whole_env["PATH"])
    if program is None:
        raise KitError(f"{words[0]} is not installed")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, descriptor, 1),
        (os.POSIX_SPAWN_DUP2, descriptor, 2),
    ]
    try:
        pid = os.posix_spawn(program, words, whole_env, file_actions=actions, setsid=True)
    except OSError as failed:
        raise KitError(f"{words[0]} cannot be started: {failed.strerror}") from failed
    finally:
        os.close(descriptor)
    # A child that ended at once is a corpse until we reap it, so its start time can still be read.
    return ProcessId(pid, parse_stat(Path(f"/proc/{pid}/stat").read_text())[1])


def send(process: ProcessId, number: signal.Signals) -> None:
    """Signals this very process; nothing happens if it is gone."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (ProcessLookupError, PermissionError):
        return
    try:
        if is_alive(process):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
    finally:
        os.close(descriptor)


def wait_gone(processes: Iterable[ProcessId], seconds: float) -> list[ProcessId]:
    """Waits until all have ended and returns those that have not by then."""
    deadline = time.monotonic() + seconds
    while True:
        left = [process for process in processes if not _ended(process)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.02)


def end(processes: Sequence[ProcessId], grace: float) -> None:
    """SIGTERM, and SIGKILL for what is left after `grace` seconds (0: SIGKILL at once).

    Raises KitError if one survives even that (it hangs in the kernel, usually on a dead mount).
    """
    left = list(processes)
    if grace > 0:
        for process in left:
            send(process, signal.SIGTERM)
        left = wait_gone(left, grace)
    for process in left:
        send(process, signal.SIGKILL)
    stuck = wait_gone(left, 20.0)
    if stuck:
        raise KitError(f"processes {[process.pid for process in stuck]} do not end even on SIGKILL")


def find(matches: Callable[[list[str]], bool]) -> list[ProcessId]:
    """All processes whose command line satisfies `matches`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        process = identify(int(entry.name))
        try:
            argv = (entry / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        except OSError:
            continue
        # Checked again afterwards: the command line must be that of the process identified before.
        if process is not None and matches(argv) and is_alive(process):
            found.append(process)
    return found


def _ended(process: ProcessId) -> bool:
    if is_alive(process):
        return False
    # Looked at first, reaped second: the other way round it could die in between and stay a corpse.
    with suppress(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)
    return True
