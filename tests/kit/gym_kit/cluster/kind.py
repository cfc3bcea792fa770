"""A cluster in Docker by the program kind, which is built once from its Go module.

Pods reach servers of this machine by the gateway address of the network `kind`: on Linux that is an address of the
host itself, so a server can listen on it. Elsewhere Docker runs in a virtual machine with a name for the host.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from gym_kit import oci
from gym_kit.cluster.base import Cluster, Provider
from gym_kit.cluster.client import answers, server_version
from gym_kit.errors import KitError
from gym_kit.paths import built_in_place, cache_folder, private_folder, state_folder
from gym_kit.progress import Progress
from gym_kit.run import run, succeeds

KIND = "v0.30.0"
CLUSTER = "gym"
NODE = f"{CLUSTER}-control-plane"
READY = "180s"


@dataclass(frozen=True)
class KindCluster(Cluster):
    program: Path

    @property
    def provider(self) -> Provider:
        return "kind"

    def load_image(self, archive: Path) -> str:
        reference = oci.reference_of(archive)
        listed = run(["docker", "exec", NODE, "ctr", "--namespace=k8s.io", "images", "list", "--quiet"])
        if reference not in listed.split():
            run([self.program, "load", "image-archive", archive, "--name", CLUSTER], timeout=600)
        return reference

    def down(self) -> None:
        remove()


def docker_answers() -> bool:
    """Whether a Docker engine is there to talk to (the client program alone proves nothing)."""
    return succeeds(["docker", "info"])


def ensure(progress: Progress) -> KindCluster:
    """The running cluster, or a new one. Raises KitError without Docker, or without Go to build kind."""
    if not docker_answers():
        raise KitError("kind needs a Docker engine and `docker info` gets no answer: start it or use --cluster local")
    program = _program(progress)
    private_folder(state_folder())
    kubeconfig = _kubeconfig()
    running = CLUSTER in run([program, "get", "clusters"]).split()
    if running:
        # The file may be gone or stale (the port changes when Docker restarts), the cluster knows it.
        kubeconfig.write_text(run([program, "get", "kubeconfig", "--name", CLUSTER]))
        if not answers(kubeconfig):
            raise KitError("the kind cluster exists but does not answer: `python -m gym_kit down` and try again")
    else:
        with progress.step("creating a kind cluster"):
            where = (f"--name={CLUSTER}", f"--kubeconfig={kubeconfig}", f"--wait={READY}")
            run([program, "create", "cluster", *where], timeout=900)
    return _cluster(program, kubeconfig, started=not running)


def find() -> KindCluster | None:
    """The cluster an earlier `ensure` made, if it still runs; builds nothing."""
    kubeconfig = _kubeconfig()
    program = _path()
    if not (kubeconfig.is_file() and program.is_file() and answers(kubeconfig)):
        return None
    return _cluster(program, kubeconfig, started=False)


def remove() -> bool:
    """Deletes the cluster an earlier `ensure` made, whether it answers or not; False if there is none."""
    kubeconfig = _kubeconfig()
    if not (kubeconfig.is_file() and _path().is_file()):
        return False
    run([_path(), "delete", "cluster", "--name", CLUSTER, "--kubeconfig", kubeconfig], timeout=300)
    kubeconfig.unlink()
    return True


def _kubeconfig() -> Path:
    return state_folder() / f"kind-{CLUSTER}.kubeconfig"


def _cluster(program: Path, kubeconfig: Path, started: bool) -> KindCluster:
    return KindCluster(
        name=CLUSTER,
        kubeconfig=kubeconfig,
        kubernetes_version=server_version(kubeconfig),
        host_address=_host_address(),
        started=started,
        program=program,
    )


def _path() -> Path:
    return cache_folder() / f"kind-{KIND}" / "kind"


def _program(progress: Progress) -> Path:
    program = _path()
    if not program.is_file():
        with (
            progress.step(f"building kind {KIND} from its Go module"),
            built_in_place(program.parent) as scratch,
        ):
            env = {"GOBIN": str(scratch), "CGO_ENABLED": "0"}
            run(["go", "install", "-trimpath", f"sigs.k8s.io/kind@{KIND}"], env=env, timeout=1800)
    return program


def _host_address() -> str:
    if sys.platform != "linux":
        return "host.docker.internal"
    for network in json.loads(run(["docker", "network", "inspect", "kind"])):
        for entry in network["IPAM"]["Config"]:
            # The network has an IPv6 range too; pods of a default kind cluster speak IPv4.
            if "." in entry.get("Gateway", ""):
                return str(entry["Gateway"])
    raise KitError("Docker's network `kind` has no IPv4 gateway: recreate the cluster")
