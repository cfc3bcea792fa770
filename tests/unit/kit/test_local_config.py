"""What the node's programs are told: one set of ports, all files in the run folder, pods kept on this machine."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import yaml

from gym_kit.cluster.local import components, render, settings
from gym_kit.cluster.local.pki import Certificate, extension_file
from gym_kit.cluster.local.settings import Ports

RUN, BINARIES = Path("/run/of-test"), Path("/cache/bin")
PORTS = Ports.from_list(lambda count: list(range(1000, 1000 + count)))


def test_kubeconfig_holds_its_keys_and_selects_its_only_context() -> None:
    config = yaml.safe_load(render.kubeconfig("https://10.0.0.1:6443", b"authority", b"certificate", b"key"))

    assert config["clusters"][0]["cluster"]["server"] == "https://10.0.0.1:6443"
    assert base64.b64decode(config["users"][0]["user"]["client-key-data"]) == b"key"
    assert config["current-context"] == config["contexts"][0]["name"]


def test_kubelet_listens_on_the_picked_port_and_keeps_images() -> None:
    config = yaml.safe_load(render.kubelet(RUN, PORTS))

    assert (config["port"], config["healthzPort"]) == (PORTS.kubelet, PORTS.kubelet_health)
    assert config["imageGCHighThresholdPercent"] == 100
    assert config["containerRuntimeEndpoint"] == "unix:///run/of-test/containerd.sock"


def test_pods_get_addresses_of_the_bridge_and_their_state_stays_in_the_run_folder() -> None:
    (plugin,) = json.loads(render.cni(RUN))["plugins"]

    assert plugin["bridge"] == settings.BRIDGE
    assert plugin["ipam"]["ranges"] == [[{"subnet": settings.POD_SUBNET}]]
    assert plugin["ipam"]["dataDir"].startswith(str(RUN))


def test_forwarding_between_pods_and_the_world_is_dropped_both_ways() -> None:
    rules = render.nft_isolation()

    assert 'iifname "gym0" oifname != "gym0" drop' in rules
    assert 'iifname != "gym0" oifname "gym0" drop' in rules


def test_every_listener_has_a_port_of_its_own() -> None:
    ports = list(vars(PORTS).values())

    assert len(set(ports)) == len(ports) == 9


def test_an_api_server_without_a_node_advertises_nothing_and_trusts_no_kubelet() -> None:
    alone = components.api_server(BINARIES, RUN, PORTS, "127.0.0.1", with_node=False).argv
    whole = components.api_server(BINARIES, RUN, PORTS, "10.244.0.1", with_node=True).argv

    assert "--endpoint-reconciler-type=none" in alone
    assert not any(word.startswith("--kubelet-") for word in alone)
    assert "--advertise-address=10.244.0.1" in whole
    assert "--authorization-mode=Node,RBAC" in whole


def test_the_api_servers_certificate_is_good_for_pods_and_for_the_host() -> None:
    names = components.api_certificate("10.244.0.1").names

    assert {"DNS:kubernetes.default.svc", "IP:10.96.0.1", "IP:10.244.0.1", "IP:127.0.0.1"} <= set(names)
    assert len(set(components.api_certificate("127.0.0.1").names)) == len(
        components.api_certificate("127.0.0.1").names
    )


def test_a_certificate_without_names_is_a_clients() -> None:
    assert "serverAuth" not in extension_file(Certificate("admin", "admin", "system:masters"))
    assert "subjectAltName=DNS:a,IP:1.2.3.4" in extension_file(Certificate("x", "x", "x", ("DNS:a", "IP:1.2.3.4")))


def test_programs_and_shims_of_a_run_are_told_from_somebody_reading_its_logs() -> None:
    started = components.kubelet(BINARIES, RUN).argv
    shim = ["/usr/bin/containerd-shim-runc-v2", "-id", "1", "-address", "/run/of-test/containerd.sock"]

    assert components.belongs_to(list(started), RUN)
    assert components.belongs_to(shim, RUN)
    assert not components.belongs_to(list(started), Path("/run/of-test-2"))
    assert not components.belongs_to(["tail", "-f", "/run/of-test/log/kubelet.log"], RUN)
    assert not components.belongs_to([""], RUN)
