"""Installs the few system programs that come neither as Go modules nor as wheels, where apt can do it.

What counts is whether the program is there, not who packaged it: on other distributions a person installs them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gym_kit.errors import KitError
from gym_kit.progress import Progress
from gym_kit.run import run, search_path

APT_TIMEOUT = 1800.0


@dataclass(frozen=True)
class Requirement:
    """A program (or absolute path) and the Debian package that has it."""

    program: str
    package: str


API_SERVER = (Requirement("etcd", "etcd-server"), Requirement("openssl", "openssl"))
NODE = (
    *API_SERVER,
    Requirement("containerd", "containerd"),
    Requirement("ctr", "containerd"),
    Requirement("runc", "runc"),
    Requirement("/usr/lib/cni/bridge", "containernetworking-plugins"),
    Requirement("ip", "iproute2"),
    Requirement("nft", "nftables"),
    Requirement("mount", "mount"),
)
IMAGE = (Requirement("buildah", "buildah"), Requirement("debootstrap", "debootstrap"))


def is_there(program: str) -> bool:
    if program.startswith("/"):
        return Path(program).exists()
    return shutil.which(program, path=search_path()) is not None


def missing_packages(requirements: Sequence[Requirement], there: Callable[[str], bool]) -> list[str]:
    """Packages of the programs that are not there, each once, in order."""
    return list(dict.fromkeys(need.package for need in requirements if not there(need.program)))


def ensure_installed(requirements: Sequence[Requirement], progress: Progress) -> None:
    """Installs what is missing. Raises KitError naming it where this process may not or cannot."""
    missing = missing_packages(requirements, is_there)
    if not missing:
        return
    if os.geteuid() != 0 or not is_there("apt-get"):
        raise KitError(
            f"these packages are missing: {' '.join(missing)}. Install them (Debian: `apt-get install "
            f"{' '.join(missing)}`), or run this as root where apt-get is available"
        )
    with progress.step(f"installing {', '.join(missing)}"):
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update"], env=env, timeout=APT_TIMEOUT)
        run(["apt-get", "install", "-y", "--no-install-recommends", *missing], env=env, timeout=APT_TIMEOUT)
    still = missing_packages(requirements, is_there)
    if still:
        raise KitError(f"apt-get installed {' '.join(still)} without the programs expected of them")
