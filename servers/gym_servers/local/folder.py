"""A run's folder belongs to one process at a time: two runners would undo each other's recoveries, and write each row
twice."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gym_servers.stack.settings import SettingsError

LOCK: Final = "lock"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold `folder`, made where it is missing, during the block; the kernel frees it however this process ends.

    Raises SettingsError where another process holds it, or where it cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("ab")
    except OSError as error:
        raise SettingsError(f"cannot use {folder}: {error.strerror}; check its permissions and free space") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SettingsError(
                f"another gym-servers is at work in {folder}: wait for its end, or give another --folder"
            ) from error
        yield
