"""The local provider: at most one node on a machine, reused while it is healthy, cleaned up when it is not."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from gym_kit import packages
from gym_kit.cluster.base import Cluster, Provider
from gym_kit.cluster.client import answers, server_version
from gym_kit.cluster.local import node, settings
from gym_kit.cluster.local.build import build_kubernetes
from gym_kit.cluster.local.record import Record, all_records, is_abandoned, is_running
from gym_kit.cluster.local.teardown import take_down
from gym_kit.errors import KitError
from gym_kit.locking import exclusive
from gym_kit.paths import private_folder, state_folder
from gym_kit.progress import Progress


@dataclass(frozen=True)
class LocalCluster(Cluster):
    run_folder: Path

    @property
    def provider(self) -> Provider:
        return "local"

    def load_image(self, archive: Path) -> str:
        return node.import_image(self.run_folder, archive)

    def down(self) -> None:
        down(Progress.silent())


def ensure(progress: Progress) -> LocalCluster:
    """The running node, or a new one (its programs are built first if the cache lacks them).

    Raises KitError when this is not root on Linux, or something is missing that cannot be installed.
    """
    running = find()
    if running is not None:
        return running
    _refuse_without_root()
    packages.ensure_installed(packages.NODE, progress)
    binaries = build_kubernetes(progress)
    with _locked("starting the local node", progress):
        # Somebody else may have started it while we waited for the lock.
        running = find()
        if running is not None:
            return running
        _sweep(progress)
        with progress.step("starting a one-node Kubernetes"):
            return _cluster(node.start(binaries, progress), started=True)


def find() -> LocalCluster | None:
    """The node that runs and answers, if there is one."""
    for record in all_records():
        if record.kind == "node" and is_running(record) and answers(record.kubeconfig):
            return _cluster(record, started=False)
    return None


def down(progress: Progress) -> bool:
    """Removes the node and every leftover of earlier ones; False if there was nothing to remove."""
    if not any(_removable(record) for record in all_records()):
        return False
    _refuse_without_root()
    with _locked("stopping the local node", progress):
        _sweep(progress)
    return True


def _sweep(progress: Progress) -> None:
    for record in all_records():
        if _removable(record):
            with progress.step(f"removing {record.run.name}"):
                take_down(record)


def _removable(record: Record) -> bool:
    return record.kind == "node" or is_abandoned(record)


def _cluster(record: Record, started: bool) -> LocalCluster:
    return LocalCluster(
        name=record.run.name,
        kubeconfig=record.kubeconfig,
        kubernetes_version=server_version(record.kubeconfig),
        host_address=settings.NODE_ADDRESS,
        started=started,
        run_folder=record.run,
    )


def _locked(doing: str, progress: Progress) -> AbstractContextManager[None]:
    return exclusive(private_folder(state_folder()) / "node.lock", doing, progress)


def _refuse_without_root() -> None:
    if os.uname().sysname != "Linux" or os.geteuid() != 0:
        raise KitError(
            "the local node needs Linux and root (network, mounts, containers): run this as root, "
            "start Docker for --cluster kind, or set KUBECONFIG to a cluster"
        )
