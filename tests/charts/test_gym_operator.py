"""The operator's chart: one careful process with no right it does not need."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gym_kit.chart_values import assert_documented
from gym_operator import crds
from gym_operator.effects.cache import Key
from gym_operator.effects.metrics import Metrics
from gym_operator.rules.generations import counts_of
from gym_servers.storage.store import StorageProblem

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]
CHART = "gym-operator"
CHARTS = Path(__file__).parents[2] / "charts"
RUNBOOKS = CHARTS.parent / "docs" / "runbooks.md"


def operator_container(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    (container,) = objects["Deployment", "rel"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def allowed(role: dict[str, Any]) -> dict[str, set[str]]:
    """What a role allows: "group/resource" -> verbs."""
    rights: dict[str, set[str]] = {}
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                rights.setdefault(f"{group}/{resource}", set()).update(rule["verbs"])
    return rights


def test_lints(helm: Callable[..., Any]) -> None:
    done = helm("lint", "--strict", CHART)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rendering_again_causes_no_drift(render: Render) -> None:
    assert render(CHART, WATCHED) == render(CHART, WATCHED)


def test_there_is_never_a_second_operator(render: Render) -> None:
    spec = render(CHART)["Deployment", "rel"]["spec"]
    assert spec["replicas"] == 1
    assert spec["strategy"] == {"type": "Recreate"}


def test_pods_are_restricted(render: Render, assert_restricted: Callable[..., None]) -> None:
    assert_restricted(render(CHART))


def test_it_watches_all_namespaces_or_the_given_ones(render: Render) -> None:
    assert operator_container(render(CHART))["args"] == ["--health-port=8080"]
    some = operator_container(render(CHART, {"watchNamespaces": ["a", "b"]}))
    assert some["args"] == ["--health-port=8080", "--namespace=a", "--namespace=b"]
    assert some["command"] == ["gym-operator", "run"]


def test_probes_ask_healthz_on_the_health_port(render: Render) -> None:
    container = operator_container(render(CHART))
    assert container["ports"] == [{"name": "health", "containerPort": 8080, "protocol": "TCP"}]
    for probe in ("livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "health"}


def test_it_knows_its_namespace_and_has_the_label_stacks_let_in(render: Render) -> None:
    objects = render(CHART)
    env = {entry["name"]: entry for entry in operator_container(objects)["env"]}
    assert env["GYM_OPERATOR_NAMESPACE"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.namespace"
    labels = objects["Deployment", "rel"]["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "gym-operator"


def test_rights_are_the_least_that_work(render: Render) -> None:
    rights = allowed(render(CHART)["ClusterRole", "rel"])
    assert rights["/secrets"] == {"get", "create"}
    assert rights["/pods"] == {"list", "watch", "delete"}
    assert rights["/events"] == {"create"}
    assert {"create", "delete"}.isdisjoint(rights["gymops.dev/gymstacks"])
    assert rights["gymops.dev/gymcheckpointschedules"] == {"get", "list", "watch"}
    assert rights["gymops.dev/gymcheckpoints"] == {"get", "list", "watch", "create", "update", "delete"}
    for kind in crds.KINDS:
        assert rights[f"gymops.dev/{kind.plural}"] >= {"get", "list", "watch"}
        assert rights[f"gymops.dev/{kind.plural}/status"] == {"update"}
    assert not [resource for resource, verbs in rights.items() if "patch" in verbs], "it replaces, on a version"
    assert rights["gymops.dev/gymstacks/finalizers"] == {"update"}
    assert all("*" not in resource and "*" not in verbs for resource, verbs in rights.items())
    cluster_only = {"apiextensions.k8s.io/customresourcedefinitions", "/namespaces"}
    assert all(rights[resource] >= {"list", "watch"} for resource in cluster_only)
    named = [rule for rule in render(CHART)["ClusterRole", "rel"]["rules"] if "resourceNames" in rule]
    assert [(rule["resources"], rule["verbs"], rule["resourceNames"]) for rule in named] == [
        (["namespaces"], ["get"], ["kube-system"])
    ]
    assert rights["/namespaces"] == {"get", "list", "watch"}
    assert rights["apiextensions.k8s.io/customresourcedefinitions"] == {"list", "watch"}


def test_given_namespaces_need_no_cluster_wide_right(render: Render) -> None:
    objects = render(CHART, {"watchNamespaces": ["a", "b"], "rbac.aggregateClusterRoles": False})
    assert not {kind for kind, _ in objects} & {"ClusterRole", "ClusterRoleBinding"}
    everywhere = allowed(render(CHART)["ClusterRole", "rel"])
    for namespace in ("a", "b"):
        rights = allowed(objects["Role", f"{namespace}/rel"])
        assert rights.items() <= everywhere.items()
        (subject,) = objects["RoleBinding", f"{namespace}/rel"]["subjects"]
        assert subject == {"kind": "ServiceAccount", "name": "rel", "namespace": "team"}


def test_users_rights_join_the_standard_roles(render: Render) -> None:
    objects = render(CHART)
    view, edit = objects["ClusterRole", "rel-view"], objects["ClusterRole", "rel-edit"]
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert "rbac.authorization.k8s.io/aggregate-to-view" not in edit["metadata"]["labels"]
    for kind in crds.KINDS:
        assert allowed(view)[f"gymops.dev/{kind.plural}"] == {"get", "list", "watch"}
        assert "create" in allowed(edit)[f"gymops.dev/{kind.plural}"]


def test_crds_can_be_left_out_and_are_kept_unless_told_otherwise(render: Render) -> None:
    names = [kind.crd_name for kind in crds.KINDS]
    kept = render(CHART)
    for name in names:
        annotations = kept["CustomResourceDefinition", name]["metadata"]["annotations"]
        assert annotations == {"helm.sh/resource-policy": "keep"}
    given_up = render(CHART, {"crds.keep": False})
    assert "annotations" not in given_up["CustomResourceDefinition", names[0]]["metadata"]
    assert not {kind for kind, _ in render(CHART, {"crds.create": False})} & {"CustomResourceDefinition"}


def test_rendered_crds_equal_the_plain_ones(render: Render) -> None:
    objects = render(CHART)
    for kind in crds.KINDS:
        rendered = objects["CustomResourceDefinition", kind.crd_name]
        assert rendered["spec"] == yaml.safe_load(yaml.safe_dump(crds.crd(kind)["spec"]))


def test_a_digest_wins_over_the_tag(render: Render) -> None:
    digest = "sha256:" + "a" * 64
    tagged = render(CHART, {"image.repository": "r.example/g", "image.tag": "v2"})
    pinned = render(CHART, {"image.repository": "r.example/g", "image.tag": "v2", "image.digest": digest})
    assert operator_container(tagged)["image"] == "r.example/g:v2"
    assert operator_container(pinned)["image"] == f"r.example/g@{digest}"


def test_an_existing_service_account_can_be_used(render: Render) -> None:
    objects = render(CHART, {"serviceAccount": {"create": False, "name": "mine"}})
    assert ("ServiceAccount", "rel") not in objects
    assert objects["Deployment", "rel"]["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    assert objects["ClusterRoleBinding", "rel"]["subjects"][0]["name"] == "mine"


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({"replicas": 2}, "replicas"),
        ({"watchNamespaces": "a"}, "watchNamespaces"),
        ({"image.digest": "latest"}, "digest"),
        ({"crds.keep": "yes"}, "keep"),
        ({"logLevel": "LOUD"}, "logLevel"),
        ({"metrics.serviceMonitor.interval": "30"}, "interval"),
        ({"priorityClass.value": 2000000000}, "value"),
    ],
)
def test_wrong_values_are_named(
    refuse: Callable[[str, dict[str, Any]], str], values: dict[str, Any], names: str
) -> None:
    assert names in refuse(CHART, values)


# ---- what looks at the operator ---------------------------------------------------------------------------

WATCHED = {
    "metrics.serviceMonitor.enabled": True,
    "metrics.prometheusRule.enabled": True,
    "metrics.dashboard.enabled": True,
}


def test_nothing_needs_the_prometheus_operator_unless_asked_for(render: Render) -> None:
    kinds = {kind for kind, _ in render(CHART)}
    assert not kinds & {"ServiceMonitor", "PrometheusRule", "PriorityClass", "ConfigMap"}


def test_the_service_and_the_monitor_reach_the_operator_and_nobody_else(render: Render) -> None:
    objects = render(CHART, WATCHED)
    service, monitor = objects["Service", "rel"], objects["ServiceMonitor", "rel"]
    operator = objects["Deployment", "rel"]["spec"]["template"]["metadata"]["labels"]
    test = objects["Pod", "rel-test"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= operator.items()
    assert not service["spec"]["selector"].items() <= test.items()
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["path"] == "/metrics"
    assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    assert service["spec"]["ports"][0]["targetPort"] in [
        port["name"] for port in operator_container(objects)["ports"]
    ]
    assert endpoint["honorLabels"] is True, "a number's namespace is its stack's"


def alerts(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, dict[str, Any]]:
    groups = objects["PrometheusRule", "rel"]["spec"]["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_alerts_stand_on_numbers_that_the_operator_has(render: Render) -> None:
    metrics, counts = Metrics(), [(Key("team", "demo"), counts_of({}))]
    metrics.watch(lambda: iter([STACK]), lambda: {"stuck": [], "silentWatches": []}, lambda: iter(counts))
    metrics.passed(1.0)
    metrics.refused("GET", 500)
    metrics.said("GymStack", "team", "Warning", "Recovering")
    metrics.said("GymCheckpoint", "team", "Normal", "Published")
    there = {re.split(r"[{ ]", line)[0] for line in metrics.text().decode().splitlines() if line[:1] != "#"}
    dashboard = json.loads(render(CHART, WATCHED)["ConfigMap", "rel-dashboard"]["data"]["gym.json"])
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = [rule["expr"] for rule in alerts(render(CHART, WATCHED)).values()]
    names = {name for text in (*shown, *asked) for name in re.findall(r"\bgym_[a-z_]+", text)}
    assert names - there == set()
    assert len(names) >= 8


STACK: dict[str, Any] = {
    "metadata": {"namespace": "team", "name": "demo"},
    "status": {
        "phase": "Running",
        "attempt": 1,
        "lastCheckpoint": {"time": "2027-01-15T08:00:00Z"},
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}


def test_every_alert_links_to_its_runbook(render: Render) -> None:
    headings = {line[3:].lower() for line in RUNBOOKS.read_text().splitlines() if line.startswith("## ")}
    for name, rule in alerts(render(CHART, WATCHED)).items():
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{name.lower()}"
        assert name.lower() in headings
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
    assert len(alerts(render(CHART, WATCHED))) == len(headings), "a runbook without its alert"
    elsewhere = {**WATCHED, "metrics.prometheusRule.runbookUrl": "https://runbooks.example/gym/"}
    for rule in alerts(render(CHART, elsewhere)).values():
        assert rule["annotations"]["runbook_url"].startswith("https://runbooks.example/gym#")


def test_the_runbooks_name_every_reason_of_a_storage() -> None:
    text = RUNBOOKS.read_text()
    assert [problem for problem in StorageProblem if f"`{problem.value}`" not in text] == []


def test_alerts_have_the_limits_that_were_set(render: Render) -> None:
    limits = {"metrics.prometheusRule.checkpointMaxAgeSeconds": 60, "metrics.prometheusRule.recoveriesPerHour": 9}
    found = alerts(render(CHART, {**WATCHED, **limits}))
    assert found["GymCheckpointTooOld"]["expr"].endswith("> 60")
    assert found["GymStackRecoversOften"]["expr"].endswith("> 9")
    assert "{{ $labels.stack }}" in found["GymStackStalled"]["annotations"]["summary"]


def test_labels_by_which_others_find_them_can_be_set(render: Render) -> None:
    values = {
        f"metrics.{part}.labels": {"found-by": "me"} for part in ("serviceMonitor", "prometheusRule", "dashboard")
    }
    objects = render(CHART, {**WATCHED, **values})
    for key in (("ServiceMonitor", "rel"), ("PrometheusRule", "rel"), ("ConfigMap", "rel-dashboard")):
        assert objects[key]["metadata"]["labels"]["found-by"] == "me"


def test_only_the_health_port_can_be_reached(render: Render) -> None:
    policy = render(CHART)["NetworkPolicy", "rel"]["spec"]
    operator = render(CHART)["Deployment", "rel"]["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= operator.items()
    assert (policy["policyTypes"], policy["ingress"]) == (
        ["Ingress"],
        [{"ports": [{"protocol": "TCP", "port": "health"}]}],
    )
    assert ("NetworkPolicy", "rel") not in render(CHART, {"networkPolicy.enabled": False})


def test_who_may_reach_it_can_be_limited_and_helm_s_test_still_can(render: Render) -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    objects = render(CHART, {"networkPolicy.from": [peer]})
    (rule,) = objects["NetworkPolicy", "rel"]["spec"]["ingress"]
    assert rule["from"][0] == peer
    labels = objects["Pod", "rel-test"]["metadata"]["labels"]
    assert rule["from"][1]["podSelector"]["matchLabels"].items() <= labels.items()


def test_helm_s_test_is_no_operator_to_anybody(render: Render) -> None:
    """The network policies of stacks let pods through to control ports by one label."""
    pod = render(CHART)["Pod", "rel-test"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] != "gym-operator"
    (container,) = pod["spec"]["containers"]
    assert container["env"] == [{"name": "URL", "value": "http://rel:8080"}]
    compile(container["args"][0], "test", "exec")


def test_a_priority_class_is_made_or_named(render: Render, refuse: Callable[[str, dict[str, Any]], str]) -> None:
    made = render(CHART, {"priorityClass": {"create": True, "value": 7}})
    assert made["PriorityClass", "rel"]["value"] == 7
    assert made["Deployment", "rel"]["spec"]["template"]["spec"]["priorityClassName"] == "rel"
    named = render(CHART, {"priorityClassName": "mine"})
    assert named["Deployment", "rel"]["spec"]["template"]["spec"]["priorityClassName"] == "mine"
    both = refuse(CHART, {"priorityClassName": "mine", "priorityClass.create": True})
    assert "set either priorityClassName" in both


def test_the_log_s_level_reaches_the_operator(render: Render) -> None:
    env = {entry["name"]: entry for entry in operator_container(render(CHART, {"logLevel": "DEBUG"}))["env"]}
    assert env["GYM_LOG_LEVEL"]["value"] == "DEBUG"


def test_every_value_is_documented_and_in_the_schema() -> None:
    assert_documented(CHARTS / CHART)
