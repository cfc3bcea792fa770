"""Runs a program to its end and turns a failure into a KitError that shows the program's own last words."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from gym_kit.errors import KitError

LAST_LINES = 15
# Administrators' programs (nft, ip, runc) lie where an ordinary user's PATH does not look.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def search_path() -> str:
    """PATH for every program the kit starts: the user's own, then the system's."""
    return f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}".removeprefix(":")


def last_lines(text: str, count: int = LAST_LINES) -> str:
    """The last non-empty lines of a log, indented for an error text."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return "\n".join("    " + line[:400] for line in lines[-count:])


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    timeout: float | None = None,
) -> str:
    """The standard output of `argv`. `env` is added to this process's environment; `timeout` is in seconds.

    Raises KitError when the program is missing, fails or takes too long.
    """
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            env={**os.environ, "PATH": search_path(), **(env or {})},
            cwd=cwd,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as missing:
        raise KitError(f"{words[0]} is not installed") from missing
    except subprocess.TimeoutExpired as slow:
        raise KitError(f"`{' '.join(words[:4])}` did not end within {timeout} s") from slow
    if done.returncode != 0:
        said = last_lines(done.stderr) or last_lines(done.stdout)
        raise KitError(f"`{' '.join(words[:4])}` failed with exit code {done.returncode}:\n{said}")
    return done.stdout


def succeeds(argv: Sequence[str | Path], *, timeout: float = 30.0) -> bool:
    """Whether `argv` exists and ends with exit code 0 in time."""
    try:
        run(argv, timeout=timeout)
    except KitError:
        return False
    return True
