"""Brings up the whole node: control plane, container runtime, kubelet, service proxy and DNS, as plain processes.

The caller holds the lock of the node. Each change to the machine is in the record before it is made; whatever fails,
the start is undone from that record and its logs are kept for a look.
"""

from __future__ import annotations

import platform
import socket
from dataclasses import replace
from pathlib import Path

from gym_kit import oci
from gym_kit.cluster.client import answers, ask
from gym_kit.cluster.local import components, host, launch, pki, render, settings
from gym_kit.cluster.local.record import Record, boot_id
from gym_kit.cluster.local.settings import Ports
from gym_kit.errors import KitError
from gym_kit.ports import free_ports
from gym_kit.progress import Progress
from gym_kit.run import run, succeeds

PATIENCE_SECONDS = 120.0
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def start(binaries: Path, progress: Progress) -> Record:
    """The record of a node that is Ready. Raises KitError, with nothing left behind, if it does not get there."""
    host.refuse_second_node()
    host.refuse_taken_network()
    run_folder = launch.new_run_folder()
    record = Record(
        run=run_folder,
        kind="node",
        boot=boot_id(),
        network=True,
        cgroups=host.unmade_cgroups(),
        folders=host.unmade_folders(),
        sysctls=host.read_sysctls(),
    ).save()
    with launch.undone_on_failure(run_folder):
        return _start(record, binaries, progress)


def containerctl(run_folder: Path, *words: str) -> str:
    """One command to the node's containerd, in the namespace that the kubelet uses."""
    socket_path = f"{run_folder}/containerd.sock"
    return run(["ctr", "--address", socket_path, "--namespace=k8s.io", *words], timeout=600)


def import_image(run_folder: Path, archive: Path) -> str:
    """Imports an image archive unless the node has its reference, and returns that."""
    reference = oci.reference_of(archive)
    if reference not in containerctl(run_folder, "images", "list", "--quiet").split():
        containerctl(run_folder, "images", "import", str(archive))
    return reference


def _start(record: Record, binaries: Path, progress: Progress) -> Record:
    run_folder = record.run
    ports = Ports.from_list(free_ports)
    with progress.step("certificates, network and configuration"):
        _configure(run_folder, ports)
        host.set_sysctls(host.NEEDED_SYSCTLS)
        host.make_network()
    with progress.step("API server and container runtime"):
        server = components.api_server(binaries, run_folder, ports, settings.NODE_ADDRESS, with_node=True)
        early = (components.etcd(run_folder, ports), server, components.containerd(run_folder))
        record = launch.start(record, early)
        _import_pause(record, binaries)
        ready = record
        launch.wait_healthy(ready, "the API server", lambda: answers(ready.kubeconfig), PATIENCE_SECONDS)
    with progress.step("node"):
        # Only now: the controller manager gives up on an API server that takes longer than ten seconds.
        late = (
            components.controllers(binaries, run_folder, ports),
            components.scheduler(binaries, run_folder, ports),
            components.kubelet(binaries, run_folder),
            components.proxy(binaries, run_folder),
            components.dns(binaries, run_folder),
        )
        up = launch.start(record, late)
        launch.wait_healthy(up, "the node", lambda: _node_ready(up.kubeconfig), PATIENCE_SECONDS)
        launch.wait_healthy(up, "the cluster's DNS", _dns_listens, PATIENCE_SECONDS)
    return replace(up, ready=True).save()


def _configure(run_folder: Path, ports: Ports) -> None:
    pki.make(run_folder / "pki", components.node_certificates())
    for name in ("admin", "controllers", "scheduler", "proxy", "kubelet"):
        launch.write_kubeconfig(run_folder, name, f"https://{settings.NODE_ADDRESS}:{ports.api}")
    (run_folder / "containerd.toml").write_text(render.containerd(run_folder))
    (run_folder / "kubelet.yaml").write_text(render.kubelet(run_folder, ports))
    (run_folder / "proxy.yaml").write_text(render.kube_proxy(run_folder, ports))
    (run_folder / "Corefile").write_text(render.corefile(run_folder))
    (run_folder / "cni").mkdir()
    (run_folder / "cni" / "10-gym.conflist").write_text(render.cni(run_folder))


def _import_pause(record: Record, binaries: Path) -> None:
    listening = ["ctr", "--address", f"{record.run}/containerd.sock", "version"]
    launch.wait_healthy(record, "containerd", lambda: succeeds(listening), PATIENCE_SECONDS)
    archive = record.run / "pause.tar"
    machine = platform.machine()
    oci.write_single_program(binaries / "pause", settings.PAUSE_IMAGE, ARCHITECTURES.get(machine, machine), archive)
    import_image(record.run, archive)


def _node_ready(kubeconfig: Path) -> bool:
    path = '{.status.conditions[?(@.type=="Ready")].status}'
    try:
        status = ask(kubeconfig, "get", "node", settings.NODE, "-o", f"jsonpath={path}")
        # Pods of the namespace are refused until its account exists.
        ask(kubeconfig, "get", "serviceaccount", "default")
    except KitError:
        return False
    return status == "True"


def _dns_listens() -> bool:
    # CoreDNS opens its port when it has read the cluster's services.
    try:
        socket.create_connection((settings.NODE_ADDRESS, 53), timeout=1.0).close()
    except OSError:
        return False
    return True
