"""The children of a stack: what must hold of each manifest for pods to be safe, reachable and replaceable."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from gym_operator.api import names
from gym_operator.rules.workloads import (
    Manifest,
    StackContext,
    build_children,
    build_control_secret,
    is_foreign,
    needs_update,
    templates,
)
from gym_servers.stack.settings import AWAIT_FINAL, ServerSettings

Build = Callable[[dict[str, Any]], StackContext]
SERVERS = ["env", "policy", "agent", "counter", "collection"]


@pytest.fixture
def children(context: Build, spec_document: dict[str, Any]) -> tuple[Manifest, ...]:
    return build_children(context(spec_document))


def of_kind(manifests: tuple[Manifest, ...], kind: str) -> dict[str, Manifest]:
    return {m["metadata"]["name"]: m for m in manifests if m["kind"] == kind}


def pod_of(manifests: tuple[Manifest, ...], server: str) -> Manifest:
    template: Manifest = of_kind(manifests, "StatefulSet")[f"demo-{server}"]["spec"]["template"]
    return template


def container_of(manifests: tuple[Manifest, ...], server: str) -> dict[str, Any]:
    (container,) = pod_of(manifests, server)["spec"]["containers"]
    return dict(container)


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_there_is_a_workload_and_two_services_per_server(children: tuple[Manifest, ...]) -> None:
    assert set(of_kind(children, "StatefulSet")) == {f"demo-{name}" for name in SERVERS}
    assert set(of_kind(children, "Service")) == {f"demo-{name}{end}" for name in SERVERS for end in ("", "-0")}
    assert set(of_kind(children, "ConfigMap")) == {"demo-config"}


def test_what_pods_need_is_applied_before_the_pods(children: tuple[Manifest, ...]) -> None:
    kinds = [child["kind"] for child in children]
    assert kinds.index("StatefulSet") == len(kinds) - len(SERVERS)


def test_the_stack_owns_every_child(context: Build, spec_document: dict[str, Any]) -> None:
    stack = context(spec_document)
    for child in (*build_children(stack), build_control_secret(stack, "t", "c")):
        (owner,) = child["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("GymStack", stack.identity.uid)
        assert owner["controller"] and owner["blockOwnerDeletion"]
        assert child["metadata"]["namespace"] == "team"
        assert not is_foreign(child, stack.identity.uid)
        assert is_foreign(child, "another-uid")
    assert is_foreign({"metadata": {"name": "demo-env"}}, stack.identity.uid)


def test_only_the_operator_replaces_pods(children: tuple[Manifest, ...]) -> None:
    for stateful_set in of_kind(children, "StatefulSet").values():
        spec = stateful_set["spec"]
        assert spec["replicas"] == 1
        assert spec["updateStrategy"] == {"type": "OnDelete"}
        assert spec["podManagementPolicy"] == "Parallel"
        assert spec["serviceName"] == stateful_set["metadata"]["name"]
        assert selects(spec["selector"]["matchLabels"], spec["template"]["metadata"]["labels"])


def test_a_stopped_stack_keeps_no_pods(context: Build, spec_document: dict[str, Any]) -> None:
    stopped = build_children(context(spec_document), running=False)
    assert {s["spec"]["replicas"] for s in of_kind(stopped, "StatefulSet").values()} == {0}


@pytest.mark.parametrize("server", SERVERS)
def test_pods_meet_the_restricted_standard(children: tuple[Manifest, ...], server: str) -> None:
    pod, container = pod_of(children, server)["spec"], container_of(children, server)
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    writable = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
    assert writable == ["/tmp"]


def test_a_process_finds_its_settings_cell_and_secrets(children: tuple[Manifest, ...]) -> None:
    container, pod = container_of(children, "agent"), pod_of(children, "agent")["spec"]
    env = {entry["name"]: entry for entry in container["env"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert container["command"] == ["gym-servers", "serve", "--settings", "/etc/gym/agent.json"]
    assert volumes["settings"]["configMap"] == {
        "name": "demo-config",
        "items": [{"key": "agent.json", "path": "agent.json"}],
    }
    assert "pod-index" in env["GYM_CELL"]["valueFrom"]["fieldRef"]["fieldPath"]
    for variable, key in (
        ("GYM_CONTROL_TOKEN_FILE", names.CONTROL_TOKEN_KEY),
        ("GYM_CONTROL_TOKEN_PREVIOUS_FILE", names.PREVIOUS_TOKEN_KEY),
        ("GYM_COOKIE_SECRET_FILE", names.COOKIE_SECRET_KEY),
    ):
        assert env[variable]["value"] == f"{mounts['secrets']}/{key}"
    assert volumes["secrets"]["secret"]["secretName"] == "demo-control"


def test_the_secret_s_keys_are_the_files_pods_read(context: Build, spec_document: dict[str, Any]) -> None:
    secret = build_control_secret(context(spec_document), "token", "cookie")
    assert secret["stringData"] == {"control-token": "token", "cookie-secret": "cookie"}
    assert "immutable" not in secret, "the token is rotated in it, under pods that run"


def test_readiness_is_looked_at_every_second_and_liveness_is_patient(children: tuple[Manifest, ...]) -> None:
    container = container_of(children, "env")
    ready, alive = container["readinessProbe"], container["livenessProbe"]
    assert ready["httpGet"] == {"path": "/readyz", "port": "data"} and ready["periodSeconds"] == 1
    assert alive["httpGet"] == {"path": "/livez", "port": "data"}
    assert alive["periodSeconds"] * alive["failureThreshold"] >= 60


def test_a_server_that_loads_for_long_is_not_taken_for_one_that_is_stuck(children: tuple[Manifest, ...]) -> None:
    """Readiness is not looked at before: the startup probe must not hold a recovery up."""
    for server in SERVERS:
        startup = container_of(children, server)["startupProbe"]
        assert startup["httpGet"] == {"path": "/livez", "port": "data"}
        assert startup["periodSeconds"] == 1
        assert startup["failureThreshold"] >= 1800


def s3_secrets(children: tuple[Manifest, ...], server: str) -> dict[str, str]:
    """Secrets for S3 that a server's pod mounts, by the variable that says where."""
    container, pod = container_of(children, server), pod_of(children, server)["spec"]
    env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    found = {}
    for variable in ("GYM_S3_CREDENTIALS_FOLDER", "GYM_S3_CA_FILE"):
        for mount in container["volumeMounts"]:
            if env.get(variable) in (mount["mountPath"], f"{mount['mountPath']}/ca.crt"):
                (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
                assert mount["readOnly"] is True and "subPath" not in mount, "a subPath is never brought up to date"
                found[variable] = volume["secret"]["secretName"]
    return found


def test_s3_credentials_are_files_of_the_named_secret(children: tuple[Manifest, ...]) -> None:
    for server in SERVERS:
        assert s3_secrets(children, server) == {"GYM_S3_CREDENTIALS_FOLDER": "s3-keys"}
        variables = [entry["name"] for entry in container_of(children, server)["env"]]
        assert not any(name.startswith("AWS_") for name in variables), "a variable never changes in a process"


def test_s4_every_pod_that_uses_the_bucket_trusts_its_authority(
    context: Build, spec_document: dict[str, Any]
) -> None:
    s3 = spec_document["checkpoints"]["storage"]["s3"]
    s3.update(endpoint="https://minio:9000", caSecret="minio-ca")
    children = build_children(context(spec_document))
    for server in SERVERS:
        assert s3_secrets(children, server)["GYM_S3_CA_FILE"] == "minio-ca"


def test_without_a_secret_a_role_is_used(context: Build, spec_document: dict[str, Any]) -> None:
    del spec_document["checkpoints"]["storage"]["s3"]["credentialsSecret"]
    spec_document["serviceAccountName"] = "with-role"
    children = build_children(context(spec_document))
    assert s3_secrets(children, "env") == {}
    assert pod_of(children, "env")["spec"]["serviceAccountName"] == "with-role"


def test_a_process_without_storage_gets_no_credentials(context: Build, spec_document: dict[str, Any]) -> None:
    spec_document["checkpoints"]["enabled"] = False
    children = build_children(context(spec_document))
    assert s3_secrets(children, "env") == {}
    assert s3_secrets(children, "collection")


def test_resources_and_pull_settings_reach_the_pod(context: Build, spec_document: dict[str, Any]) -> None:
    spec_document["servers"][1]["resources"] = {"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": "2"}}
    spec_document |= {"imagePullPolicy": "Never", "imagePullSecrets": [{"name": "reg"}]}
    children = build_children(context(spec_document))
    container = container_of(children, "policy")
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": "2"}}
    assert (container["image"], container["imagePullPolicy"]) == ("registry.example/gym:1", "Never")
    assert pod_of(children, "policy")["spec"]["imagePullSecrets"] == [{"name": "reg"}]


def test_control_reaches_unready_pods_and_data_only_ready_ones(children: tuple[Manifest, ...]) -> None:
    services = of_kind(children, "Service")
    control, data = services["demo-env"]["spec"], services["demo-env-0"]["spec"]
    assert control["clusterIP"] == "None" and control["publishNotReadyAddresses"] is True
    assert [(p["name"], p["port"]) for p in control["ports"]] == [("control", 8001)]
    assert "clusterIP" not in data and not data.get("publishNotReadyAddresses")
    assert [(p["name"], p["port"]) for p in data["ports"]] == [("data", 8000)]
    assert services["demo-env-0"]["metadata"]["labels"][names.CELL_LABEL] == "0"


@pytest.mark.parametrize("server", SERVERS)
def test_a_data_service_selects_exactly_its_pod(children: tuple[Manifest, ...], server: str) -> None:
    selector = of_kind(children, "Service")[f"demo-{server}-0"]["spec"]["selector"]
    for other in SERVERS:
        labels = pod_of(children, other)["metadata"]["labels"]
        labels = {**labels, "statefulset.kubernetes.io/pod-name": f"demo-{other}-0"}
        assert selects(selector, labels) == (other == server)


def test_a_stack_made_again_does_not_select_the_old_one_s_pods(context: Build, spec_document: dict[str, Any]) -> None:
    stack = context(spec_document)
    again = StackContext(stack.identity.model_copy(update={"uid": "new"}), stack.spec, stack.operator_namespace)
    old_labels = pod_of(build_children(stack), "env")["metadata"]["labels"]
    new = build_children(again)
    assert not selects(of_kind(new, "Service")["demo-env"]["spec"]["selector"], old_labels)
    assert not selects(of_kind(new, "StatefulSet")["demo-env"]["spec"]["selector"]["matchLabels"], old_labels)


def test_addresses_in_the_settings_are_services_that_exist(children: tuple[Manifest, ...]) -> None:
    data = of_kind(children, "ConfigMap")["demo-config"]["data"]
    assert set(data) == {"cells", *(f"{name}.json" for name in SERVERS)}
    services = of_kind(children, "Service")
    for name in SERVERS:
        settings = ServerSettings.model_validate(json.loads(data[f"{name}.json"].replace("{cell}", "0")))
        for peer in settings.peers.values():
            host, port = peer.url.removeprefix("http://").split(":")
            assert int(port) in [entry["port"] for entry in services[host]["spec"]["ports"]]


def test_every_cell_has_a_pod_and_an_address_for_each_server(context: Build, spec_document: dict[str, Any]) -> None:
    spec_document["cells"] = 3
    stack = context(spec_document)
    children = build_children(stack)
    sets, services = of_kind(children, "StatefulSet"), of_kind(children, "Service")
    assert {each["spec"]["replicas"] for each in sets.values()} == {3}
    for server in SERVERS:
        for cell in range(3):
            service = services[f"demo-{server}-{cell}"]
            assert service["spec"]["selector"][names.POD_NAME_LABEL] == f"demo-{server}-{cell}"
            assert service["metadata"]["labels"][names.CELL_LABEL] == str(cell)
    assert of_kind(children, "ConfigMap")["demo-config"]["data"]["cells"] == "3\n"
    stopped = of_kind(build_children(stack, running=False), "StatefulSet")
    assert {each["spec"]["replicas"] for each in stopped.values()} == {0}


def test_cells_that_are_still_needed_keep_their_pods_and_addresses(
    context: Build, spec_document: dict[str, Any]
) -> None:
    stack = replace(context(spec_document), kept=2)
    children = build_children(stack)
    assert of_kind(children, "StatefulSet")["demo-env"]["spec"]["replicas"] == 2
    assert "demo-env-1" in of_kind(children, "Service")
    assert of_kind(children, "ConfigMap")["demo-config"]["data"]["cells"] == "1 2\n"


def test_cells_that_nobody_needs_are_told_of_for_as_long_as_they_may_do_something(
    context: Build, spec_document: dict[str, Any]
) -> None:
    children = build_children(replace(context(spec_document), kept=1, at_work=2))
    assert of_kind(children, "StatefulSet")["demo-env"]["spec"]["replicas"] == 1
    assert "demo-env-1" not in of_kind(children, "Service")
    assert of_kind(children, "ConfigMap")["demo-config"]["data"]["cells"] == "1 2\n"


@pytest.mark.parametrize("driver", ["collection", "env"])
def test_the_number_of_cells_is_a_file_of_who_drives_or_answers_a_driver_and_no_reason_to_replace_a_pod(
    context: Build, spec_document: dict[str, Any], driver: str
) -> None:
    if driver == "env":  # its driver is outside, and asks it
        del spec_document["collection"]
    servers = [server for server in SERVERS if server != "collection" or driver == "collection"]
    one = build_children(context(spec_document))
    spec_document["cells"] = 2
    two = build_children(context(spec_document))
    for server in servers:
        assert pod_of(one, server) == pod_of(two, server)
        (settings,) = [v for v in pod_of(one, server)["spec"]["volumes"] if v["name"] == "settings"]
        assert ({"key": "cells", "path": "cells"} in settings["configMap"]["items"]) == (server == driver)
        text = of_kind(one, "ConfigMap")["demo-config"]["data"][f"{server}.json"]
        assert json.loads(text).get("cells_file") == ("/etc/gym/cells" if server == driver else None)


def test_the_network_policy_keeps_control_to_the_operator(children: tuple[Manifest, ...]) -> None:
    (policy,) = of_kind(children, "NetworkPolicy").values()
    spec = policy["spec"]
    for server in SERVERS:
        assert selects(spec["podSelector"]["matchLabels"], pod_of(children, server)["metadata"]["labels"])
    sources = {rule["ports"][0]["port"]: rule["from"] for rule in spec["ingress"]}
    assert set(sources) == {"control", "data"}
    (operator,) = sources["control"]
    assert operator["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "gym-system"}
    assert operator["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "gym-operator"}
    (members,) = sources["data"]
    assert "namespaceSelector" not in members
    assert selects(members["podSelector"]["matchLabels"], pod_of(children, "env")["metadata"]["labels"])


def test_the_driver_s_pods_may_call_data_and_nothing_else(context: Build, spec_document: dict[str, Any]) -> None:
    spec_document["access"] = {"driverSelector": {"matchLabels": {"app": "trainer"}}}
    (policy,) = of_kind(build_children(context(spec_document)), "NetworkPolicy").values()
    sources = {rule["ports"][0]["port"]: rule["from"] for rule in policy["spec"]["ingress"]}
    driver = {"podSelector": {"matchLabels": {"app": "trainer"}}}
    assert driver in sources["data"]
    assert len(sources["data"]) == 2
    assert driver not in sources["control"]
    assert len(sources["control"]) == 1


def test_building_twice_changes_nothing(context: Build, spec_document: dict[str, Any]) -> None:
    for first, second in zip(
        build_children(context(spec_document)), build_children(context(spec_document)), strict=True
    ):
        assert not needs_update(first, second)


def test_what_the_api_server_adds_is_no_drift(children: tuple[Manifest, ...]) -> None:
    for child in children:
        existing = {**child, "status": {"x": 1}, "spec": {**child.get("spec", {}), "defaulted": True}}
        assert not needs_update(existing, child)
        assert needs_update({"metadata": {"name": "by hand"}}, child)


def test_a_changed_config_touches_only_the_pods_that_read_it(context: Build, spec_document: dict[str, Any]) -> None:
    before = build_children(context(spec_document))
    spec_document["servers"][1]["config"]["temperature"] = 1
    after = build_children(context(spec_document))
    changed = {
        (new["kind"], new["metadata"]["name"])
        for old, new in zip(before, after, strict=True)
        if needs_update(old, new)
    }
    assert changed == {("ConfigMap", "demo-config"), ("StatefulSet", "demo-policy")}


@pytest.mark.parametrize("server", SERVERS)
def test_names_and_labels_fit_kubernetes(context: Build, spec_document: dict[str, Any], server: str) -> None:
    stack = context(spec_document)
    longest = stack.identity.model_copy(update={"name": "a" * 41})
    for child in build_children(StackContext(longest, stack.spec, "gym-system")):
        assert len(child["metadata"]["name"]) <= 63
        assert all(len(value) <= 63 for value in child["metadata"]["labels"].values())
        if child["kind"] == "StatefulSet":
            assert len(child["metadata"]["name"]) <= 52


# ---- replacing pods on purpose ----------------------------------------------------------------------------


def test_a_pod_has_the_time_for_a_last_checkpoint_and_its_server_waits_for_it(
    context: Build, spec_document: dict[str, Any]
) -> None:
    spec_document["checkpoints"].update(prepareTimeout="90s", commitTimeout="3m")
    children = build_children(context(spec_document))
    for server in SERVERS:
        assert pod_of(children, server)["spec"]["terminationGracePeriodSeconds"] == 90 + 180 + 20
        assert {"name": AWAIT_FINAL, "value": "true"} in container_of(children, server)["env"]
        for probe in ("startupProbe", "livenessProbe"):
            grace = container_of(children, server)[probe]["terminationGracePeriodSeconds"]
            assert grace == 10, "what is stuck is not waited for"


def test_without_checkpoints_a_server_ends_at_once(context: Build, spec_document: dict[str, Any]) -> None:
    spec_document["checkpoints"]["enabled"] = False
    children = build_children(context(spec_document))
    for server in SERVERS:
        assert pod_of(children, server)["spec"]["terminationGracePeriodSeconds"] == 10
        assert AWAIT_FINAL not in {each["name"] for each in container_of(children, server)["env"]}


def changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    copied: dict[str, Any] = json.loads(json.dumps(document))
    *parents, last = path.split(".")
    place: Any = copied
    for name in parents:
        place = place[int(name)] if name.isdecimal() else place.setdefault(name, {})
    place[last] = value
    return copied


@pytest.mark.parametrize(
    ("path", "value", "servers"),
    [
        ("image", "another:2", SERVERS),
        ("serviceAccountName", "another", SERVERS),
        ("servers.2.config", {"max_steps": 7}, ["agent"]),
        ("servers.0.resources", {"limits": {"memory": "1Gi"}}, ["env"]),
        ("collection.concurrency", 3, ["collection"]),
        ("checkpoints.prepareTimeout", "90s", []),
        ("recovery.backoffLimit", 9, []),
        ("cells", 4, []),
        ("scaleDown.drainTimeout", "0s", []),
    ],
)
def test_pods_are_outdated_by_what_a_process_would_notice_and_by_nothing_else(
    context: Build, spec_document: dict[str, Any], path: str, value: Any, servers: list[str]
) -> None:
    before = templates(context(spec_document))
    after = templates(context(changed(spec_document, path, value)))
    assert sorted(server for server in SERVERS if before[server] != after[server]) == sorted(servers)
    carried = {s: pod_of(build_children(context(spec_document)), s)["metadata"]["annotations"] for s in SERVERS}
    assert {s: annotations[names.TEMPLATE_DIGEST] for s, annotations in carried.items()} == before


def test_evictions_are_refused_where_the_operator_moves_cells_itself(
    context: Build, spec_document: dict[str, Any]
) -> None:
    assert not of_kind(build_children(context(spec_document)), "PodDisruptionBudget")
    children = build_children(replace(context(spec_document), guarded=True))
    (budget,) = of_kind(children, "PodDisruptionBudget").values()
    assert budget["spec"]["maxUnavailable"] == 0
    for server in SERVERS:
        assert selects(budget["spec"]["selector"]["matchLabels"], pod_of(children, server)["metadata"]["labels"])


def test_evictions_are_let_through_of_cells_that_yield_and_of_no_other(
    context: Build, spec_document: dict[str, Any]
) -> None:
    children = build_children(replace(context(spec_document), guarded=True, yielding=frozenset({11, 2})))
    (budget,) = of_kind(children, "PodDisruptionBudget").values()
    assert budget["spec"]["maxUnavailable"] == 0
    expressions = budget["spec"]["selector"]["matchExpressions"]
    assert {"key": names.POD_INDEX_LABEL, "operator": "NotIn", "values": ["2", "11"]} in expressions
    assert len(expressions) == 2, "and an engine"


def test_nothing_refuses_the_eviction_of_what_nobody_moves(context: Build, spec_document: dict[str, Any]) -> None:
    """An engine belongs to no cell."""
    (budget,) = of_kind(build_children(replace(context(spec_document), guarded=True)), "PodDisruptionBudget").values()
    (expression,) = budget["spec"]["selector"]["matchExpressions"]
    assert expression == {"key": names.COMPONENT_LABEL, "operator": "NotIn", "values": [names.ENGINE_COMPONENT]}
