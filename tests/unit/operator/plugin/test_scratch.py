"""The stack that a drill restores into: nothing of it reaches the run."""

from __future__ import annotations

from typing import Any

import pytest

from gym_operator.api import names
from gym_operator.plugin.exits import Unusable
from gym_operator.plugin.views.scratch import (
    NO_NODE,
    is_of,
    place_of,
    scratch_restore,
    scratch_stack,
    taken_by,
)
from gym_operator.rules.restores import Place
from gym_servers.stack.spec import parse_spec

WHOLE = [Place("s3://bucket/one", "d", 0)]


def stack(spec: dict[str, Any], **changes: Any) -> dict[str, Any]:
    metadata = {
        "name": "demo",
        "namespace": "team",
        "uid": "demo-uid",
        "labels": {"app.kubernetes.io/instance": "demo", "argocd": "tracks-it"},
        "annotations": {"argocd": "tracks-it"},
        "ownerReferences": [{"uid": "chart"}],
        "resourceVersion": "7",
    }
    return {"metadata": metadata, "spec": {**spec, **changes}}


def copied(spec: dict[str, Any], places: list[Place] = WHOLE, **changes: Any) -> dict[str, Any]:
    return scratch_stack(stack(spec, **changes), "demo-drill", places, "drill-1", own_classes=False)


def test_it_has_no_driver_and_lets_no_other_reach_it(spec_document: dict[str, Any]) -> None:
    access = {"driverSelector": {"matchLabels": {"app": "trainer"}}, "attemptFloor": False}
    spec = copied(spec_document, access=access, suspend=True)["spec"]
    assert "collection" not in spec
    assert spec["access"] == {"attemptFloor": False}
    assert spec["suspend"] is False
    assert not [each for each in parse_spec(spec).participants() if each.kind == "collection"]


def test_its_servers_and_storage_are_the_stacks_own_and_that_one_is_not_changed(
    spec_document: dict[str, Any],
) -> None:
    original = stack(spec_document, access={"driverSelector": {"matchLabels": {"app": "trainer"}}})
    before = str(original)
    spec = scratch_stack(original, "demo-drill", WHOLE, "drill-1", own_classes=False)["spec"]
    assert (spec["servers"], spec["checkpoints"]) == (spec_document["servers"], spec_document["checkpoints"])
    assert str(original) == before


def test_it_takes_nothing_over_by_which_others_know_the_stack(spec_document: dict[str, Any]) -> None:
    assert copied(spec_document)["metadata"] == {
        "name": "demo-drill",
        "labels": {names.DRILL_LABEL: "demo"},
        "annotations": {names.DRILL_ID: "drill-1"},
    }


@pytest.mark.parametrize(("parts", "cells"), [([0], 1), ([3], 1), ([0, 1], 2), ([0, 3], 4)])
def test_it_has_the_cells_that_the_parts_belong_to(
    spec_document: dict[str, Any], parts: list[int], cells: int
) -> None:
    places = [Place(f"s3://bucket/{index}", "d", index) for index in parts]
    assert copied(spec_document, places, cells=8)["spec"]["cells"] == cells


def test_its_engine_is_placed_nowhere_and_takes_no_device(spec_document: dict[str, Any]) -> None:
    vllm = {
        "image": "vllm:1",
        "model": "tiny",
        "claim": "models",
        "replicas": 2,
        "resources": {"limits": {"nvidia.com/gpu": 1}},
        "tolerations": [{"operator": "Exists"}],
        "nodeSelector": {"gpu": "yes"},
    }
    spec_document["servers"][1]["config"] = {}
    found = copied(spec_document, inference={"vllm": vllm})["spec"]["inference"]["vllm"]
    assert found == {"image": "vllm:1", "model": "tiny", "claim": "models", "replicas": 1, "nodeSelector": NO_NODE}


def test_classes_of_the_users_own_run_only_where_that_is_asked_for(spec_document: dict[str, Any]) -> None:
    spec_document["servers"][3]["server"] = "mine.tools:Browser"
    with pytest.raises(Unusable, match=r"the servers counter are classes of your own: .* --own-classes"):
        copied(spec_document)
    scratch_stack(stack(spec_document), "demo-drill", WHOLE, "drill-1", own_classes=True)


@pytest.mark.parametrize(
    ("changes", "name", "says"),
    [
        ({"checkpoints": {"enabled": False}}, "demo-drill", "checkpoints are turned off in stack demo"),
        ({}, "x" * 60, "cannot be copied as x+: .* another name is given with --name"),
        ({"servers": []}, "demo-drill", "spec is not valid"),
    ],
)
def test_what_cannot_be_copied_says_why(
    spec_document: dict[str, Any], changes: dict[str, Any], name: str, says: str
) -> None:
    with pytest.raises(Unusable, match=says):
        scratch_stack(stack(spec_document, **changes), name, WHOLE, "drill-1", own_classes=False)


def test_its_restore_belongs_to_it(spec_document: dict[str, Any]) -> None:
    made = copied(spec_document)
    made["metadata"] |= {"uid": "scratch-uid", "namespace": "team"}
    restore = scratch_restore(made, "one", "drill-1")
    assert restore["spec"] == {"stackRef": {"name": "demo-drill"}, "checkpointRef": {"name": "one"}}
    (owner,) = restore["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("GymStack", "demo-drill", "scratch-uid")
    storage, identity = place_of(made)
    assert storage.s3 is not None and (storage.s3.prefix, identity.uid) == ("team/run", "scratch-uid")


def test_a_drill_knows_its_own(spec_document: dict[str, Any]) -> None:
    made = copied(spec_document)
    assert is_of(made, "drill-1")
    assert not is_of(made, "drill-2") and not is_of(None, "drill-1") and not is_of(stack(spec_document), "drill-1")
    assert "kubectl delete gymstack demo-drill -n team" in taken_by(made, "team")
    assert "give another name with --name" in taken_by(stack(spec_document), "team")
