"""Lets one process at a time do what must not happen twice at once, and tells the others who is at it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gym_kit.errors import KitError
from gym_kit.progress import Progress

PATIENCE_SECONDS = 1800.0


@contextmanager
def exclusive(path: Path, doing: str, progress: Progress, patience: float = PATIENCE_SECONDS) -> Iterator[None]:
    """Holds the lock file `path` during the block; the kernel frees it even if this process is killed.

    Waits up to `patience` seconds for another holder, saying who it is; then raises KitError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        if not _taken(file.fileno()):
            file.seek(0)
            holder = file.read().strip() or "another process"
            deadline = time.monotonic() + patience
            with progress.step(f"waiting for {holder}"):
                while not _taken(file.fileno()):
                    if time.monotonic() >= deadline:
                        raise KitError(f"{holder} holds {path}: wait for it or end it, then try again")
                    time.sleep(0.2)
        file.truncate(0)
        file.write(f"process {os.getpid()} ({doing})\n")
        file.flush()
        yield


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
