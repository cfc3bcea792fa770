"""The scripted engine and the journal as processes of this machine, beside whatever is tested.

They outlive all that a test takes away, and a test can hold them: a held journal keeps every tool call in its middle.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gym_kit.ports import free_ports


@dataclass(frozen=True)
class Program:
    """One that runs. `url` is where it answers, as soon as it does."""

    url: str
    _process: subprocess.Popen[bytes]

    @contextmanager
    def held(self) -> Iterator[None]:
        """It does nothing meanwhile, and answers nobody; what reaches it is done afterwards."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


@contextmanager
def serving(folder: Path, *arguments: str, host: str = "127.0.0.1") -> Iterator[Program]:
    """`gym-servers` with these arguments, such as `journal --file ...`; what it says is appended to a log in
    `folder`."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "gym_servers", *arguments, "--host", host, "--port", str(port)]
    with (folder / f"{arguments[0]}.log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield Program(f"http://{host}:{port}", process)
    finally:
        process.kill()
        process.wait()
