"""What the node changes on the machine around it: bridge, route, packet filter, kernel settings, cgroups.

Each has its undoing beside it. Making is idempotent, undoing accepts that there is nothing to undo.
"""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

from gym_kit.cluster.local import render, settings
from gym_kit.errors import KitError
from gym_kit.procs import ProcessId, find, identify
from gym_kit.run import run, succeeds

CGROUPS = Path("/sys/fs/cgroup")
NFT_TABLES = (f"inet {settings.NFT_TABLE}", "ip kube-proxy", "ip6 kube-proxy")
# The last two make a reply between two pods pass the service translation although the bridge could shortcut it.
NEEDED_SYSCTLS = {
    "net/ipv4/ip_forward": "1",
    "net/bridge/bridge-nf-call-iptables": "1",
    "net/bridge/bridge-nf-call-ip6tables": "1",
}
# Kubelet and kube-proxy set these themselves: we only remember what to put back.
TOUCHED_SYSCTLS = (
    *("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops"),
    *("kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes", "net/ipv4/conf/all/route_localnet"),
)
# Programs of the node insist on these places outside the run folder.
OUTSIDE_FOLDERS = (
    *("/run/containerd", "/var/lib/cni", "/var/lib/kubelet"),
    *("/var/log/containers", "/var/log/pods"),
)


def refuse_second_node() -> None:
    """KitError if a kubelet that is not ours runs in this network: both would write the same rules."""
    network = Path("/proc/self/ns/net").stat().st_ino
    for process in find(lambda argv: Path(argv[0]).name == "kubelet"):
        with suppress(OSError):
            if Path(f"/proc/{process.pid}/ns/net").stat().st_ino == network:
                raise KitError(
                    f"this machine already is a Kubernetes node (kubelet, process {process.pid}): "
                    "use that cluster with KUBECONFIG, or stop it"
                )


def refuse_taken_network() -> None:
    """KitError if another interface has the pods' addresses."""
    mine = re.escape(settings.NODE_ADDRESS.rpartition(".")[0])
    for line in run(["ip", "-o", "-4", "addr", "show"]).splitlines():
        if re.search(rf"\binet {mine}\.", line) and line.split()[1] != settings.BRIDGE:
            raise KitError(
                f"interface {line.split()[1]} already uses {settings.POD_SUBNET}, the local node's network"
            )


def make_network() -> None:
    if not succeeds(["ip", "link", "show", settings.BRIDGE]):
        run(["ip", "link", "add", settings.BRIDGE, "type", "bridge"])
    prefix = settings.POD_SUBNET.rpartition("/")[2]
    run(["ip", "addr", "replace", f"{settings.NODE_ADDRESS}/{prefix}", "dev", settings.BRIDGE])
    run(["ip", "link", "set", settings.BRIDGE, "up"])
    # Service addresses are translated on the way out; without a route of their own they would leave the machine.
    run(["ip", "route", "replace", settings.SERVICE_SUBNET, "dev", settings.BRIDGE])
    run(["nft", "-f", "-"], stdin=render.nft_isolation())


def remove_network() -> None:
    for table in NFT_TABLES:
        succeeds(["nft", "delete", "table", *table.split()])
    # Takes the address and the route along.
    succeeds(["ip", "link", "delete", settings.BRIDGE])


def read_sysctls() -> dict[str, str]:
    """Values to put back at tear-down, of those settings that this kernel has."""
    # The bridge settings appear with a kernel module, which may be built in, loaded by now, or not exist.
    succeeds(["modprobe", "br_netfilter"])
    values = {}
    for name in (*NEEDED_SYSCTLS, *TOUCHED_SYSCTLS):
        with suppress(OSError):
            values[name] = (Path("/proc/sys") / name).read_text().strip()
    return values


def set_sysctls(values: dict[str, str]) -> None:
    """Writes what differs; a setting the kernel refuses to change back is left (some only grow stricter)."""
    for name, value in values.items():
        file = Path("/proc/sys") / name
        with suppress(OSError):
            if file.read_text().strip() != value:
                file.write_text(value)


def unmade_cgroups() -> tuple[str, ...]:
    """Where the kubelet will make its cgroups: on each hierarchy of version 1, or on the one of version 2.

    Raises KitError if containers live in such a cgroup already.
    """
    version_2 = (CGROUPS / "cgroup.controllers").exists()
    roots = [CGROUPS] if version_2 else [folder for folder in sorted(CGROUPS.iterdir()) if not folder.is_symlink()]
    paths = [str(root / "kubepods") for root in roots if (root / "cgroup.procs").exists()]
    if processes_in(tuple(paths)):
        raise KitError(
            f"containers of another Kubernetes node run in {paths[0]}: stop that node, or use it with KUBECONFIG"
        )
    return tuple(paths)


def processes_in(cgroups: tuple[str, ...]) -> list[ProcessId]:
    """Everything that runs in these cgroups and below: the containers."""
    pids: set[int] = set()
    for cgroup in cgroups:
        for file in Path(cgroup).rglob("cgroup.procs"):
            with suppress(OSError):
                # 0 stands for a process of an outer pid namespace, which is none of ours.
                pids |= {int(line) for line in file.read_text().split()} - {0}
    return [process for process in map(identify, sorted(pids)) if process]


def remove_cgroups(cgroups: tuple[str, ...]) -> None:
    for cgroup in cgroups:
        inner = [folder for folder in Path(cgroup).rglob("*") if folder.is_dir()] if Path(cgroup).is_dir() else []
        for folder in [*sorted(inner, reverse=True), Path(cgroup)]:
            with suppress(OSError):
                folder.rmdir()


def unmade_folders() -> tuple[str, ...]:
    return tuple(folder for folder in OUTSIDE_FOLDERS if not Path(folder).exists())


def mounts_below(folder: Path, mountinfo: str) -> list[str]:
    """Mount points at or below `folder`, innermost first."""
    points = []
    for line in mountinfo.splitlines():
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split(" ")[4])
        if point == str(folder) or point.startswith(f"{folder}/"):
            points.append(point)
    return sorted(points, reverse=True)


def unmount_below(folder: Path) -> None:
    """Raises KitError if a mount stays: nothing may delete `folder` then, it would reach through the mount."""
    # Mounts may lie on top of each other, so one round per layer.
    for _ in range(5):
        for point in mounts_below(folder, Path("/proc/self/mountinfo").read_text()):
            if not succeeds(["umount", point]):
                succeeds(["umount", "--lazy", point])
    left = mounts_below(folder, Path("/proc/self/mountinfo").read_text())
    if left:
        raise KitError(f"{left[0]} cannot be unmounted: unmount it, then take the cluster down again")


def remove_traces_outside(run_folder: Path, folders: tuple[str, ...]) -> None:
    """Files that node programs keep outside the run folder: whole folders where these are ours alone."""
    for address in run_folder.glob("containerd/state/io.containerd.runtime.v2.task/*/*/address"):
        with suppress(OSError):
            Path(address.read_text().removeprefix("unix://")).unlink()
    for cached in Path("/var/lib/cni/results").glob(f"{settings.NETWORK}-*-eth0"):
        sandbox = cached.name.removeprefix(f"{settings.NETWORK}-").removesuffix("-eth0")
        cached.unlink(missing_ok=True)
        cached.with_name(f"cni-loopback-{sandbox}-lo").unlink(missing_ok=True)
    for link in Path("/var/log/containers").glob("*"):
        if link.is_symlink() and str(link.readlink()).startswith(f"{run_folder}/"):
            link.unlink(missing_ok=True)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
