"""The configuration files of the node's programs, as pure functions of the run folder and the ports.

Settings favour quick reactions on two cores over frugality: the node lives for a test run, not for a year.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import yaml

from gym_kit.cluster.local import settings
from gym_kit.cluster.local.settings import Ports


def kubeconfig(server: str, authority: bytes, certificate: bytes, key: bytes) -> str:
    """A kubeconfig that holds its keys itself, so that it can be copied anywhere."""

    def encoded(content: bytes) -> str:
        return base64.b64encode(content).decode()

    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "gym", "cluster": {"server": server, "certificate-authority-data": encoded(authority)}}
            ],
            "users": [
                {
                    "name": "gym",
                    "user": {"client-certificate-data": encoded(certificate), "client-key-data": encoded(key)},
                }
            ],
            "contexts": [{"name": "gym", "context": {"cluster": "gym", "user": "gym"}}],
            "current-context": "gym",
        },
        sort_keys=False,
    )


def kubelet(run: Path, ports: Ports) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": settings.NODE_ADDRESS,
            "port": ports.kubelet,
            "healthzPort": ports.kubelet_health,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{run}/pki/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{run}/pki/kubelet.crt",
            "tlsPrivateKeyFile": f"{run}/pki/kubelet.key",
            "containerRuntimeEndpoint": f"unix://{run}/containerd.sock",
            "podLogsDir": f"{run}/pod-logs",
            "volumePluginDir": f"{run}/volume-plugins",
            "clusterDNS": [settings.NODE_ADDRESS],
            "clusterDomain": settings.DOMAIN,
            # Pods resolve through the cluster alone: the host's resolvers are out of their reach anyway.
            "resolvConf": "/dev/null",
            # Without systemd as the cgroup manager the file system driver is the one that works everywhere.
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            # Its chains in iptables would outlive the node.
            "makeIPTablesUtilChains": False,
            # Lowering the score needs a capability that containers often lack.
            "oomScoreAdj": 0,
            "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            # 100 switches the collection off: images were put there for tests to use.
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "syncFrequency": "10s",
            "nodeStatusUpdateFrequency": "4s",
            "kubeAPIQPS": 200,
            "kubeAPIBurst": 400,
            "eventRecordQPS": 0,
        },
        sort_keys=False,
    )


def kube_proxy(run: Path, ports: Ports) -> str:
    return yaml.safe_dump(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "clientConnection": {"kubeconfig": f"{run}/proxy.kubeconfig", "qps": 100, "burst": 200},
            "hostnameOverride": settings.NODE,
            "clusterCIDR": settings.POD_SUBNET,
            "healthzBindAddress": f"127.0.0.1:{ports.proxy_health}",
            "metricsBindAddress": f"127.0.0.1:{ports.proxy_metrics}",
            "oomScoreAdj": 0,
            # Service changes show at once; the default batches them for a second.
            "nftables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
            # Zero leaves the host's connection tracking limits alone.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        },
        sort_keys=False,
    )


def containerd(run: Path) -> str:
    return f"""version = 2
root = "{run}/containerd/root"
state = "{run}/containerd/state"
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.zfs",
]
[grpc]
  address = "{run}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{settings.PAUSE_IMAGE}"
  # Without CAP_SYS_RESOURCE no process may lower its score, and every sandbox would fail.
  restrict_oom_score_adj = true
  # Else they lie under /run/netns, where tear-down could not tell ours from others'.
  netns_mounts_under_state_dir = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{run}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
"""


def cni(run: Path) -> str:
    bridge: dict[str, Any] = {
        "type": "bridge",
        "bridge": settings.BRIDGE,
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": f"{run}/cni-addresses",
            "ranges": [[{"subnet": settings.POD_SUBNET}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    return json.dumps({"cniVersion": "1.0.0", "name": settings.NETWORK, "plugins": [bridge]})


def corefile(run: Path) -> str:
    """Cluster names from the API; every other name is answered with "no such name" at once, never looked up."""
    return f"""{settings.DOMAIN}:53 {{
    bind {settings.NODE_ADDRESS}
    kubernetes {settings.DOMAIN} {{
        kubeconfig {run}/admin.kubeconfig gym
        pods verified
    }}
    errors
}}
.:53 {{
    bind {settings.NODE_ADDRESS}
    template ANY ANY {{
        rcode NXDOMAIN
    }}
    errors
}}
"""


def nft_isolation() -> str:
    """No packet is forwarded between pods and anything but pods: tests and demos stay on this machine."""
    bridge = settings.BRIDGE
    return f"""table inet {settings.NFT_TABLE} {{
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname "{bridge}" oifname != "{bridge}" drop
    iifname != "{bridge}" oifname "{bridge}" drop
  }}
}}
"""
