"""An API server without a node, for tests that create and watch objects but run no pods.

Needs neither root nor a network of its own, starts in seconds, and any number can run side by side. It lives as long
as the process that started it: what a killed test run leaves is removed by the next start.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from gym_kit import packages, procs
from gym_kit.cluster.client import answers
from gym_kit.cluster.local import components, launch, pki
from gym_kit.cluster.local.build import build_kubernetes
from gym_kit.cluster.local.record import Record, all_records, boot_id, is_abandoned, read
from gym_kit.cluster.local.settings import KUBERNETES, Ports
from gym_kit.cluster.local.teardown import take_down
from gym_kit.ports import free_ports
from gym_kit.progress import Progress

ADDRESS = "127.0.0.1"
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class ApiServer:
    """`kubeconfig` is of an administrator. Leaving the `with` block takes the server down."""

    kubeconfig: Path
    kubernetes_version: str
    run_folder: Path

    def down(self) -> None:
        with suppress(FileNotFoundError):
            take_down(read(self.run_folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.down()


def api_server_only(progress: Progress, *, controllers: bool = False) -> ApiServer:
    """Starts etcd and an API server, with `controllers` also the controller manager (garbage collection, accounts).

    Raises KitError if it does not come up.
    """
    packages.ensure_installed(packages.API_SERVER, progress)
    binaries = build_kubernetes(progress)
    for leftover in all_records():
        if leftover.kind == "api" and is_abandoned(leftover):
            # Two test runs may sweep at once; the slower one finds files gone under its hands.
            with suppress(OSError):
                take_down(leftover)
    run_folder = launch.new_run_folder()
    owner = procs.identify(os.getpid())
    record = Record(run=run_folder, kind="api", boot=boot_id(), owner=owner).save()
    with launch.undone_on_failure(run_folder), progress.step("starting an API server"):
        _start(record, binaries, controllers)
    return ApiServer(record.kubeconfig, KUBERNETES, run_folder)


def _start(record: Record, binaries: Path, controllers: bool) -> None:
    run_folder, ports = record.run, Ports.from_list(free_ports)
    certificates = (components.api_certificate(ADDRESS), components.ADMIN, components.CONTROLLERS)
    pki.make(run_folder / "pki", certificates)
    for name in (components.ADMIN.file, components.CONTROLLERS.file):
        launch.write_kubeconfig(run_folder, name, f"https://{ADDRESS}:{ports.api}")
    server = components.api_server(binaries, run_folder, ports, ADDRESS, with_node=False)
    up = launch.start(record, (components.etcd(run_folder, ports), server))
    launch.wait_healthy(up, "the API server", lambda: answers(up.kubeconfig), PATIENCE_SECONDS)
    if controllers:
        launch.start(up, (components.controllers(binaries, run_folder, ports),))
