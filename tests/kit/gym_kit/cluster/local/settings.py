"""Fixed choices of the local node: versions, names and addresses. Ports are picked anew for every start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Self

KUBERNETES = "v1.34.4"
COREDNS = "v1.15.0"

NODE = "node1"
BRIDGE = "gym0"
NODE_ADDRESS = "10.244.0.1"  # the bridge's: API server, DNS and whatever the host offers to pods listen here
POD_SUBNET = "10.244.0.0/24"
SERVICE_SUBNET = "10.96.0.0/16"
API_SERVICE_ADDRESS = "10.96.0.1"
DOMAIN = "cluster.local"
PAUSE_IMAGE = "localhost/pause:gym-kit"
NETWORK = "gym-kit"  # of the CNI; also the prefix of what the CNI library keeps about each pod
NFT_TABLE = "gym-kit"


@dataclass(frozen=True)
class Ports:
    """One TCP port for each listener of the node's programs."""

    api: int
    etcd: int
    etcd_peer: int
    controllers: int
    scheduler: int
    kubelet: int
    kubelet_health: int
    proxy_health: int
    proxy_metrics: int

    @classmethod
    def from_list(cls, pick: Callable[[int], list[int]]) -> Self:
        """Takes as many ports as there are listeners from `pick(count)`."""
        return cls(*pick(len(fields(cls))))
