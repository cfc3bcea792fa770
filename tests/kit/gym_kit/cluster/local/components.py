"""The command lines of the node's programs and the certificates they present, as pure functions.

The API server with etcd and the controllers is described once, for the whole node and for the API-only variant.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gym_kit.cluster.local import settings
from gym_kit.cluster.local.pki import Certificate
from gym_kit.cluster.local.settings import Ports


@dataclass(frozen=True)
class Component:
    """`name` is that of its log file."""

    name: str
    argv: tuple[str, ...]


ADMIN = Certificate("admin", "admin", "system:masters")
CONTROLLERS = Certificate("controllers", "system:kube-controller-manager", "gym-kit")
API_TO_KUBELET = Certificate("apiserver-kubelet", "kube-apiserver-kubelet-client", "system:masters")


def api_certificate(address: str) -> Certificate:
    service = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
    names = (*service, f"{service[-1]}.{settings.DOMAIN}", "localhost")
    addresses = dict.fromkeys((address, "127.0.0.1", settings.API_SERVICE_ADDRESS))
    alternatives = (*(f"DNS:{name}" for name in names), *(f"IP:{one}" for one in addresses))
    return Certificate("apiserver", "kube-apiserver", "gym-kit", alternatives)


def node_certificates() -> tuple[Certificate, ...]:
    node = settings.NODE
    return (
        api_certificate(settings.NODE_ADDRESS),
        API_TO_KUBELET,
        ADMIN,
        CONTROLLERS,
        Certificate("scheduler", "system:kube-scheduler", "gym-kit"),
        Certificate("proxy", "system:kube-proxy", "gym-kit"),
        Certificate("kubelet", f"system:node:{node}", "system:nodes", (f"DNS:{node}", f"IP:{settings.NODE_ADDRESS}")),
    )


def etcd(run: Path, ports: Ports) -> Component:
    client, peer = f"http://127.0.0.1:{ports.etcd}", f"http://127.0.0.1:{ports.etcd_peer}"
    return Component(
        "etcd",
        (
            "etcd",
            f"--data-dir={run}/etcd",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # Nothing in it is meant to survive a power cut, and waiting for the disk is what makes etcd slow.
            "--unsafe-no-fsync",
            "--log-level=warn",
        ),
    )


def api_server(binaries: Path, run: Path, ports: Ports, address: str, *, with_node: bool) -> Component:
    """`with_node`: the server advertises itself to pods and may open connections to the kubelet."""
    pki = run / "pki"
    node_flags = (
        f"--advertise-address={address}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--kubelet-client-certificate={pki}/{API_TO_KUBELET.file}.crt",
        f"--kubelet-client-key={pki}/{API_TO_KUBELET.file}.key",
        # Else exec and logs look the node's name up in the host's DNS.
        "--kubelet-preferred-address-types=InternalIP",
    )
    # A loopback address is refused as an endpoint of the service `kubernetes`, which nobody needs without pods.
    api_flags = ("--authorization-mode=RBAC", "--endpoint-reconciler-type=none")
    return Component(
        "apiserver",
        (
            f"{binaries}/kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{ports.etcd}",
            f"--bind-address={address}",
            f"--secure-port={ports.api}",
            f"--service-cluster-ip-range={settings.SERVICE_SUBNET}",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key",
            f"--service-account-issuer=https://kubernetes.default.svc.{settings.DOMAIN}",
            "--allow-privileged=true",
            "--profiling=false",
            *(node_flags if with_node else api_flags),
        ),
    )


def controllers(binaries: Path, run: Path, ports: Ports) -> Component:
    pki = run / "pki"
    return Component(
        "controllers",
        (
            f"{binaries}/kube-controller-manager",
            f"--kubeconfig={run}/controllers.kubeconfig",
            "--bind-address=127.0.0.1",
            f"--secure-port={ports.controllers}",
            f"--service-account-private-key-file={pki}/sa.key",
            f"--root-ca-file={pki}/ca.crt",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
            # By default it makes a folder under /usr/libexec.
            f"--flex-volume-plugin-dir={run}/volume-plugins",
            "--use-service-account-credentials=true",
            "--leader-elect=false",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
        ),
    )


def scheduler(binaries: Path, run: Path, ports: Ports) -> Component:
    return Component(
        "scheduler",
        (
            f"{binaries}/kube-scheduler",
            f"--kubeconfig={run}/scheduler.kubeconfig",
            "--bind-address=127.0.0.1",
            f"--secure-port={ports.scheduler}",
            "--leader-elect=false",
            "--kube-api-qps=200",
            "--kube-api-burst=400",
        ),
    )


def containerd(run: Path) -> Component:
    return Component("containerd", ("containerd", f"--config={run}/containerd.toml"))


def kubelet(binaries: Path, run: Path) -> Component:
    return Component(
        "kubelet",
        (
            f"{binaries}/kubelet",
            f"--config={run}/kubelet.yaml",
            f"--kubeconfig={run}/kubelet.kubeconfig",
            f"--hostname-override={settings.NODE}",
            f"--node-ip={settings.NODE_ADDRESS}",
            f"--root-dir={run}/kubelet",
        ),
    )


def proxy(binaries: Path, run: Path) -> Component:
    return Component("proxy", (f"{binaries}/kube-proxy", f"--config={run}/proxy.yaml"))


def dns(binaries: Path, run: Path) -> Component:
    return Component("dns", (f"{binaries}/coredns", f"-conf={run}/Corefile"))


def belongs_to(argv: list[str], run: Path) -> bool:
    """Whether a process with this command line was started for this run folder.

    Every program of the node names the folder on its command line, and so do the shims that containerd leaves behind;
    an editor or `tail` on a log there is somebody else's.
    """
    ours = {"etcd", "containerd", "containerd-shim-runc-v2", "coredns", "kubelet", "kube-proxy", "kube-apiserver"}
    ours |= {"kube-controller-manager", "kube-scheduler"}
    return Path(argv[0]).name in ours and any(f"{run}/" in word for word in argv[1:])
