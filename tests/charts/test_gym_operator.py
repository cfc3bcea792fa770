"""The operator's chart: one careful process with no right it does not need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from gym_operator import crds

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]
CHART = "gym-operator"


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
    assert rights["/pods"] == {"get", "list", "watch", "delete"}
    assert rights["/events"] == {"create"}
    assert {"create", "delete"}.isdisjoint(rights["gymops.dev/gymstacks"])
    assert rights["gymops.dev/gymstacks/status"] == {"get", "patch", "update"}
    assert rights["gymops.dev/gymstacks/finalizers"] == {"update"}
    assert all("*" not in resource and "*" not in verbs for resource, verbs in rights.items())
    cluster_only = {"apiextensions.k8s.io/customresourcedefinitions", "/namespaces"}
    assert all(rights[resource] == {"list", "watch"} for resource in cluster_only)


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
    assert "create" in allowed(edit)["gymops.dev/gymcheckpoints"]


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
    ],
)
def test_wrong_values_are_named(
    refuse: Callable[[str, dict[str, Any]], str], values: dict[str, Any], names: str
) -> None:
    assert names in refuse(CHART, values)
