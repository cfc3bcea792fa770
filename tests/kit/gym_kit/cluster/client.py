"""The few questions the providers themselves put to an API server, through kubectl."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from gym_kit import tools
from gym_kit.errors import KitError
from gym_kit.run import run


def ask(kubeconfig: Path, *words: str, timeout: float = 30.0) -> str:
    """Output of one kubectl command against that cluster; KitError if it fails."""
    return run([tools.kubectl(), "--kubeconfig", kubeconfig, *words], timeout=timeout)


def server_version(kubeconfig: Path) -> str:
    return str(json.loads(ask(kubeconfig, "get", "--raw", "/version"))["gitVersion"])


def answers(kubeconfig: Path) -> bool:
    try:
        ask(kubeconfig, "get", "--raw", "/readyz", timeout=5.0)
    except KitError:
        return False
    return True


def wait_until(what: str, holds: Callable[[], bool], seconds: float, interval: float = 0.1) -> None:
    """Polls `holds` until it is true; KitError naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() >= deadline:
            raise KitError(f"{what}: not within {seconds:.0f} s")
        time.sleep(interval)
