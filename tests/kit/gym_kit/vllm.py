"""An environment with vLLM: six gigabytes, made once for all checkouts that want the same packages.

python -m gym_kit.vllm      # makes .venv-vllm, by any Python that has venv and pip
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Final

from gym_kit.errors import KitError
from gym_kit.image import PROJECT
from gym_kit.locking import exclusive
from gym_kit.paths import cache_folder
from gym_kit.progress import Progress
from gym_kit.run import run

LOCK: Final = "requirements/vllm.txt"
LINK: Final = ".venv-vllm"
DONE: Final = ".installed"
KEPT: Final = 2  # environments: of this lock, and of the one before
DISK_BYTES: Final = 12 * 1024**3  # twice of what it takes: it is downloaded, and unpacked
MEMORY_BYTES: Final = 5 * 1024**3
INSTALL_SECONDS: Final = 1800.0


def missing(progress: Progress) -> str | None:
    """Why vLLM cannot be run here; None once it can."""
    if (reason := unfit(platform.machine(), _memory())) is not None:
        return reason
    try:
        ensure(progress)
    except KitError as error:
        return f"it cannot be installed: {' '.join(str(error).split())[:300]}"
    return None


def unfit(machine: str, memory: int) -> str | None:
    """What the machine lacks. The lock holds packages for one kind of processor."""
    if machine not in ("x86_64", "AMD64"):
        return f"its packages are for x86_64, this is {machine}"
    if memory < MEMORY_BYTES:
        return f"it needs {MEMORY_BYTES // 1024**3} GiB of memory, here are {memory / 1024**3:.1f}"
    return None


def ensure(progress: Progress, project: Path = PROJECT) -> Path:
    """The environment of the project's lock, where `.venv-vllm` leads to. Raises KitError where it cannot be made."""
    lock = project / LOCK
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
    environment = cache_folder() / "vllm" / f"{digest}-py{sys.version_info.major}.{sys.version_info.minor}"
    with exclusive(cache_folder() / "vllm.lock", "installing vLLM", progress):
        if not (environment / DONE).is_file():
            _make(environment, lock, progress)
        _lead(project / LINK, environment)
        (environment / DONE).touch()  # it is newer than the lock that it was made by
    return environment


def _make(environment: Path, lock: Path, progress: Progress) -> None:
    environment.parent.mkdir(parents=True, exist_ok=True)
    _forget_old(environment)
    free = shutil.disk_usage(environment.parent).free
    if free < DISK_BYTES:
        raise KitError(f"{free / 1024**3:.0f} GiB of disk are free, {DISK_BYTES // 1024**3} are needed")
    with progress.step("installing vLLM (six gigabytes, once; some minutes)"):
        run([sys.executable, "-m", "venv", environment], timeout=INSTALL_SECONDS)
        # vLLM pins a build of torch that has no name of its own. The lock has what works: nothing is resolved here.
        words = ("install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes")
        run([environment / "bin/pip", *words, "--requirement", lock], timeout=INSTALL_SECONDS)


def _forget_old(environment: Path) -> None:
    """What was left half-made, and environments that nobody has asked for since `KEPT` others."""
    shutil.rmtree(environment, ignore_errors=True)
    whole = [folder for folder in environment.parent.iterdir() if (folder / DONE).is_file()]
    whole.sort(key=lambda folder: (folder / DONE).stat().st_mtime, reverse=True)
    for folder in environment.parent.iterdir():
        if folder not in whole[: KEPT - 1]:
            shutil.rmtree(folder, ignore_errors=True)


def _lead(link: Path, environment: Path) -> None:
    if link.is_symlink() or not link.exists():
        link.unlink(missing_ok=True)
    else:
        shutil.rmtree(link)  # as earlier checkouts made it
    link.symlink_to(environment, target_is_directory=True)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def main() -> int:
    """Exit code 0 once `.venv-vllm` is there."""
    try:
        ensure(Progress.to_stderr())
    except KitError as error:
        print(f"vLLM cannot be installed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
