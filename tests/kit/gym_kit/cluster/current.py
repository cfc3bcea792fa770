"""A cluster that somebody gives us: we use it, we never take it down, and we cannot reach its nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from gym_kit.cluster.base import Cluster, Provider
from gym_kit.cluster.client import server_version
from gym_kit.errors import KitError

HOST_ADDRESS_VARIABLE = "GYM_KIT_HOST_ADDRESS"


@dataclass(frozen=True)
class CurrentCluster(Cluster):
    @property
    def provider(self) -> Provider:
        return "current"

    def load_image(self, archive: Path) -> str:
        raise KitError(
            "a given cluster pulls its images itself: push the image to a registry it can pull from and name it there"
        )

    def down(self) -> None:
        return None


def take(kubeconfig: Path | None) -> CurrentCluster:
    """Raises KitError when no kubeconfig was given or its cluster does not answer."""
    if kubeconfig is None:
        raise KitError("--cluster current needs a kubeconfig: set KUBECONFIG")
    if not kubeconfig.is_file():
        raise KitError(f"there is no kubeconfig {kubeconfig}: KUBECONFIG must name one existing file")
    return CurrentCluster(
        name=kubeconfig.stem,
        kubeconfig=kubeconfig.resolve(),
        kubernetes_version=server_version(kubeconfig),
        host_address=os.environ.get(HOST_ADDRESS_VARIABLE),
        started=False,
    )
