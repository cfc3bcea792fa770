"""S3 servers that `make demo KEEP=1` leaves up beside its cluster, until `make down` ends them."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from gym_kit.bucket import end_left
from gym_kit.paths import private_folder, state_folder


def new_folder() -> Path:
    """For the data of one more."""
    return Path(tempfile.mkdtemp(prefix="s3-", dir=private_folder(_folder())))


def end_all() -> int:
    """End them and remove what they store; how many they were."""
    found = [folder for folder in _folder().glob("s3-*") if folder.is_dir()]
    for folder in found:
        end_left(folder)
        shutil.rmtree(folder)
    return len(found)


def _folder() -> Path:
    return state_folder() / "kept"
