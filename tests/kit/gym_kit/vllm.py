"""Whether this machine can have vLLM, in an environment of its own, and making it."""

from __future__ import annotations

import os
import platform
import shutil

from gym_kit.errors import KitError
from gym_kit.image import PROJECT
from gym_kit.progress import Progress
from gym_kit.run import run

STAMP = ".venv-vllm/.installed"
DISK_BYTES = 12 * 1024**3  # twice of what it takes: it is downloaded, and unpacked
MEMORY_BYTES = 5 * 1024**3
INSTALL_SECONDS = 1800.0


def missing(progress: Progress) -> str | None:
    """Why vLLM cannot be run here; None once it can."""
    if (reason := unfit(platform.machine(), _memory())) is not None:
        return reason
    if (PROJECT / STAMP).is_file():
        return None
    if (free := shutil.disk_usage(PROJECT).free) < DISK_BYTES:
        return f"{free / 1024**3:.0f} GiB of disk are free, {DISK_BYTES // 1024**3} are needed to install it"
    try:
        with progress.step("installing vLLM"):
            run(["make", STAMP], cwd=PROJECT, timeout=INSTALL_SECONDS)
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


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
