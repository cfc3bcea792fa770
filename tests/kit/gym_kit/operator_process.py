"""An operator as a process of this machine, from this source tree, and the CRDs it needs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import yaml

from gym_kit.errors import KitError
from gym_operator.effects.kube import Kube, Resource

ROOT: Final = Path(__file__).parents[3]
CRDS: Final = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions")
SERVED_SECONDS: Final = 30.0


def start(kubeconfig: Path, health_port: int, log: Path, *options: str) -> subprocess.Popen[bytes]:
    """The process, just started; what it says is appended to `log`."""
    paths = os.pathsep.join([str(ROOT / "operator"), str(ROOT / "servers")])
    with log.open("ab") as said:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "gym_operator", "run", "--kubeconfig", str(kubeconfig)),
                *("--health-port", str(health_port), *options),
            ],
            env={**os.environ, "PYTHONPATH": paths},
            stdout=said,
            stderr=said,
        )


async def install_crds(kube: Kube) -> None:
    """Create them and wait until they are served. Raises KubeError, KitError."""
    for path in sorted((ROOT / "crds").glob("*.yaml")):
        crd = yaml.safe_load(path.read_text())
        await kube.create(CRDS, "", crd)
        give_up = time.monotonic() + SERVED_SECONDS
        while not _is_served(await kube.get(CRDS, None, crd["metadata"]["name"])):
            if time.monotonic() > give_up:
                raise KitError(f"{path.name} is not served after {SERVED_SECONDS:g} s")
            await asyncio.sleep(0.05)


def _is_served(crd: dict[str, Any]) -> bool:
    conditions = (crd.get("status") or {}).get("conditions") or ()
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)
