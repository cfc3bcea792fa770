"""The process behind one sandbox: runs shell commands in its directory, one after another, by lines of JSON.

Run as a script with nothing but the standard library. Nothing but files outlives a command: what it left running is
killed. At the end of its input it removes the directory, so that a server that is killed leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress


def main(directory: str, max_bytes: int, max_output: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    for line in sys.stdin:
        request = json.loads(line)
        if request.get("leave"):
            return
        _run(request["command"], float(request["seconds"]), directory, max_output)
    shutil.rmtree(directory, ignore_errors=True)


def _run(command: str, seconds: float, directory: str, max_output: int) -> None:
    with tempfile.TemporaryFile() as output:
        shell = subprocess.Popen(
            ["/bin/sh", "-c", command],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _tell({"group": shell.pid})  # whoever finds this process dead has to end what it had started
        try:
            code = shell.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
        output.seek(0)
        text = output.read(max_output).decode(errors="replace")
    _tell({"exit_code": code, "output": text})


def _tell(message: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
