"""What every provider hands back: a cluster with a kubeconfig, a way in for images and an address of this host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Provider = Literal["kind", "local", "current"]


@dataclass(frozen=True)
class Cluster(ABC):
    """A cluster that answers. `host_address` is where pods reach a server of this machine; None if unknown.

    `started` is True when this call brought it up: a caller takes down only what it started.
    """

    name: str
    kubeconfig: Path
    kubernetes_version: str
    host_address: str | None
    started: bool

    @property
    @abstractmethod
    def provider(self) -> Provider: ...

    @abstractmethod
    def load_image(self, archive: Path) -> str:
        """Brings an OCI archive to the nodes unless they have it, and returns the image's reference.

        Raises KitError where the kit has no way to the nodes.
        """

    @abstractmethod
    def down(self) -> None:
        """Removes the cluster and all it left on this machine; a given cluster is left alone."""
