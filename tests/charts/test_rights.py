"""The operator's role, as the chart renders it, is enough for its work and holds nothing that it does not need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gym_operator.api import names
from gym_operator.effects.cluster import cluster_id
from gym_operator.effects.kube import CHECKPOINTS, CHILDREN, NAMESPACES, PODS, SECRETS
from gym_operator.effects.storage import StackStorage
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig, operated
from gym_rig.rights import Right, Rights
from gym_servers.engine.rows import counter_rows
from gym_servers.stack.spec import StorageSpec

Render = Callable[..., dict[tuple[str, str], dict[str, Any]]]
CHART = "gym-operator"
ROWS = 6
EVERYWHERE: tuple[dict[str, Any], tuple[str, str]] = ({}, ("ClusterRole", "rel"))
SOME: tuple[dict[str, Any], tuple[str, str]] = ({"watchNamespaces": ["local"]}, ("Role", "local/rel"))

BY_WATCHES: dict[Right, str] = {
    ("list", "/nodes"): "the framework looks which nodes there are",
    ("watch", "/nodes"): "and is told when one is cordoned",
    ("list", "apiextensions.k8s.io/customresourcedefinitions"): "the framework looks which kinds there are",
    ("watch", "apiextensions.k8s.io/customresourcedefinitions"): "and is told of new ones",
    ("list", "/namespaces"): "the framework looks which namespaces there are",
    ("watch", "/namespaces"): "and is told of new ones",
}
"""What a real cluster is asked for and the fake one is not."""


def rights_of(render: Render, values: dict[str, Any], place: tuple[str, str]) -> Rights:
    return Rights(render(CHART, values)[place]["rules"])


async def whole_life(rig: OperatedRig) -> None:
    """All that the operator does for a stack: make, checkpoint, recover, mend, shrink, suspend, let go."""
    namespace = IDENTITY.namespace
    await rig.until(rig.in_service, "in service")
    await rig.until(lambda: rig.cell.effects() >= 2, "tools were called")
    rig.checkpoint("one")
    await rig.reaches("one", "Preparing")
    labelled = rig.kube.objects[CHECKPOINTS, namespace, "one"]["metadata"]
    rig.kube.set(CHECKPOINTS, namespace, "one", metadata={**labelled, "labels": {"by": "somebody"}})
    await rig.until(lambda: rig.final("one"), "final")
    assert rig.status(CHECKPOINTS, "one")["phase"] == "Succeeded"
    rig.kube.remove(PODS, namespace, "rig-agent-0")
    await rig.until(lambda: rig.in_service(1), "recovered")
    await rig.until(rig.complete, "complete")
    scripted = rig.spec["servers"]
    served = [{**one, "server": "vllm", "config": {}} if one["kind"] == "model" else one for one in scripted]
    rig.change(inference={"vllm": {"image": "vllm:1", "model": "tiny"}}, servers=served)
    await rig.until(rig.engines, "an engine")
    for kind in (
        "Service",
        "ConfigMap",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "StatefulSet",
        "Deployment",
    ):  # as another version's children would be
        for (resource, _, name), body in list(rig.kube.objects.items()):
            if resource == CHILDREN[kind]:
                metadata = {**body["metadata"], "annotations": {names.APPLIED_DIGEST: "another"}}
                if name in ("rig-agent", "rig-agent-0", "rig-servers", "rig-vllm"):
                    metadata["labels"] = {}  # so that no list by label shows it
                rig.kube.set(resource, namespace, name, metadata=metadata)
    del rig.spec["collection"]
    rig.change()
    await rig.until(lambda: (CHILDREN["Service"], namespace, "rig-collection-0") not in rig.kube.objects, "pruned")
    del rig.spec["inference"]
    rig.change(servers=scripted)
    await rig.until(lambda: not rig.engines(), "the engine is pruned")
    rig.change(suspend=True)
    await rig.until(lambda: rig.status()["phase"] == "Suspended", "suspended")
    rig.nodes_are_watched = False
    rig.kill_operator()
    rig.start_operator()
    budget = (CHILDREN["PodDisruptionBudget"], namespace, names.disruption_budget(IDENTITY.name))
    await rig.until(lambda: budget not in rig.kube.objects, "evictions are let through")
    rig.checkpoint("astray", stackRef={"name": "nobody"})
    await rig.until(lambda: rig.final("astray"), "given up")


@pytest.mark.parametrize(("values", "place"), [EVERYWHERE, SOME], ids=["everywhere", "some namespaces"])
async def test_the_role_is_enough_for_all_that_the_operator_does(
    render: Render, tmp_path: Path, values: dict[str, Any], place: tuple[str, str]
) -> None:
    rights = rights_of(render, values, place)
    async with operated(tmp_path, counter_rows(ROWS, 1), nodes=values == {}) as rig:
        rig.kube.permitted = rights
        await whole_life(rig)
    lacking = rights.refused - {("get", "/nodes")}  # it goes on without, where it works in some namespaces only
    assert lacking == set()


async def test_nothing_is_granted_that_is_not_used(render: Render, tmp_path: Path) -> None:
    rights = rights_of(render, *EVERYWHERE)
    async with operated(tmp_path, counter_rows(ROWS, 1), nodes=True) as rig:
        rig.kube.permitted = rights
        rig.kube.put(NAMESPACES, None, {"metadata": {"name": "kube-system"}})  # type: ignore[arg-type]
        assert await cluster_id(rig.kube) is not None
        rig.kube.put(SECRETS, IDENTITY.namespace, {"metadata": {"name": "keys"}, "data": {}})
        storage = StackStorage(rig.kube, IDENTITY.namespace)
        s3 = {"bucket": "bucket", "credentialsSecret": "keys"}
        await storage.tend(StorageSpec.model_validate({"s3": s3}), "s3://bucket/x")
        await whole_life(rig)
        rig.kube.remove(SECRETS, IDENTITY.namespace, names.control_secret(IDENTITY.name))
        rig.change(suspend=True, imagePullPolicy="Always")
        await rig.until(lambda: ("create", "/secrets") in rights.used, "the token is made again")
    ours = {right for right in rights.granted if not right[1].startswith(names.GROUP)}
    unused = ours - rights.used - BY_WATCHES.keys() - {("get", "/nodes")}
    assert unused == set()
    assert ("get", "/nodes") in rights.granted, "asked for where a server is silent"


async def test_a_cluster_wide_operator_may_look_at_one_namespace_only(render: Render, tmp_path: Path) -> None:
    rights = rights_of(render, *EVERYWHERE)
    assert rights("get", NAMESPACES, "kube-system")
    assert not rights("get", NAMESPACES, "team")
    assert not rights_of(render, *SOME)("get", NAMESPACES, "kube-system")


@pytest.mark.parametrize(
    "taken", [("delete", "/pods"), ("update", "gymops.dev/gymstacks/status"), ("create", "apps/statefulsets")]
)
async def test_a_right_that_is_missing_shows(render: Render, tmp_path: Path, taken: Right) -> None:
    """The proof above can fail."""
    verb, place = taken
    rules = [
        {**rule, "verbs": [each for each in rule["verbs"] if each != verb]}
        if place.partition("/")[2] in rule["resources"]
        else rule
        for rule in render(CHART)["ClusterRole", "rel"]["rules"]
    ]
    rights = Rights(rules)
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        rig.kube.permitted = rights
        rig.checkpoint("any")
        deleted = False

        def refused() -> bool:
            nonlocal deleted
            if rig.in_service() and not deleted:
                deleted = True
                rig.kube.remove(PODS, IDENTITY.namespace, "rig-agent-0")
            return taken in rights.refused

        await rig.until(refused, "refused")


async def test_an_operator_that_may_not_look_at_budgets_does_without_one(render: Render, tmp_path: Path) -> None:
    rules = [rule for rule in render(CHART)["ClusterRole", "rel"]["rules"] if rule["apiGroups"] != ["policy"]]
    async with operated(tmp_path, counter_rows(ROWS, 1)) as rig:
        rig.kube.permitted = Rights(rules)
        rig.change(image="rig:2")
        await rig.until(lambda: rig.in_service() and rig.images() == {"rig:2"}, "in service")


@pytest.mark.parametrize(
    ("values", "may"), [({}, True), ({"nodes": {"watch": False}}, False), ({"watchNamespaces": ["local"]}, False)]
)
def test_nodes_are_watched_only_where_that_is_wanted_and_the_operator_works_everywhere(
    render: Render, values: dict[str, Any], may: bool
) -> None:
    objects = render(CHART, values)
    granted = {
        right
        for (kind, _), body in objects.items()
        if kind in ("Role", "ClusterRole") and "rules" in body
        for right in Rights(body["rules"]).granted
    }
    assert {("list", "/nodes"), ("watch", "/nodes")} <= granted if may else ("list", "/nodes") not in granted
    assert ("delete", "policy/poddisruptionbudgets") in granted, "what one made that watched them goes again"
