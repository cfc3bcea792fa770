"""Where the kit keeps what it may rebuild (cache) and what it must be able to take down again (state).

The cache holds binaries, wheels and base images: deleting it costs time only. The state folder holds one folder per
running cluster, with the record that tear-down works from. Unix socket paths end at 107 bytes, so the state folder
has a short default and its name is checked.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gym_kit.errors import KitError

LONGEST_STATE_FOLDER = 60


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """`$XDG_CACHE_HOME/gym-operator`, by default under `~/.cache`; not created."""
    env = os.environ if environ is None else environ
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gym-operator"


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """`$XDG_STATE_HOME/gym-operator`, by default under `/var/tmp`; not created.

    Raises KitError when the path is too long for the sockets below it.
    """
    env = os.environ if environ is None else environ
    folder = Path(env.get("XDG_STATE_HOME") or "/var/tmp") / "gym-operator"
    if len(str(folder)) > LONGEST_STATE_FOLDER:
        raise KitError(
            f"{folder} is too long a path for unix sockets: set XDG_STATE_HOME to a folder whose path has at most "
            f"{LONGEST_STATE_FOLDER - len('/gym-operator')} characters"
        )
    return folder


def private_folder(path: Path) -> Path:
    """Creates `path` for this user alone; KitError if somebody else owns it (keys will lie in it)."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise KitError(f"{path} belongs to another user: set XDG_STATE_HOME to a folder of your own")
    path.chmod(0o700)
    return path


@contextmanager
def built_in_place(target: Path) -> Iterator[Path]:
    """A scratch folder that becomes `target` only if the block succeeds: a half-made target is never seen."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        yield made
        try:
            made.rename(target)
        except OSError:
            # Another process finished the same build first: its result is as good as ours.
            if not target.is_dir():
                raise
