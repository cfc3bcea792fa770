"""What the operator makes for a stack: it is written again where it differs, and what is another's is left alone."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any

import pytest

from gym_operator.api.conditions import ConditionReason
from gym_operator.effects.children import ChildProblem, ForeignChild, ensure_children, ensure_secret
from gym_operator.effects.kube import CHILDREN, SECRETS
from gym_operator.rules.workloads import StackContext
from gym_rig.edges import NS
from gym_rig.fake_kube import FakeKube


async def test_children_are_made_once_and_written_again_on_drift(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any]
) -> None:
    stack_context = context(spec_document)
    tokens = await ensure_secret(kube, stack_context)
    assert tokens.current and not tokens.previous
    assert await ensure_secret(kube, stack_context) == tokens
    await ensure_children(kube, stack_context, running=True)
    made = len(kube.writes)
    await ensure_children(kube, stack_context, running=True)
    assert len(kube.writes) == made, "nothing differs"
    await ensure_children(kube, stack_context, running=False)
    changed = {(verb, resource.plural) for verb, resource, _ in kube.writes[made:]}
    assert changed == {("replace", "statefulsets")}
    del spec_document["collection"]
    await ensure_children(kube, context(spec_document), running=True)
    left = {name for resource, _, name in kube.objects if resource == CHILDREN["StatefulSet"]}
    assert left == {"demo-env", "demo-policy", "demo-agent", "demo-counter"}
    assert (CHILDREN["Service"], "team", "demo-collection-0") not in kube.objects


async def test_a_rotated_control_token_is_read_with_the_one_before(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any]
) -> None:
    stack_context = context(spec_document)
    old = (await ensure_secret(kube, stack_context)).current
    data = kube.objects[SECRETS, NS, "demo-control"]["data"]
    rotated = {"control-token": base64.b64encode(b"new").decode(), "control-token-previous": data["control-token"]}
    kube.set(SECRETS, NS, "demo-control", data={**data, **rotated})
    assert await ensure_secret(kube, stack_context) == ("new", old)


@pytest.mark.parametrize("data", [{}, {"control-token": ""}, {"control-token": "/w=="}, None])
async def test_a_control_secret_without_a_token_is_named(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any], data: Any
) -> None:
    stack_context = context(spec_document)
    await ensure_secret(kube, stack_context)
    kube.set(SECRETS, NS, "demo-control", data=data)
    with pytest.raises(ChildProblem, match="Secret demo-control has no control-token that is a text") as refused:
        await ensure_secret(kube, stack_context)
    assert refused.value.problem.reason is ConditionReason.CONTROL_SECRET_INVALID


async def test_what_belongs_to_somebody_else_is_not_touched(
    kube: FakeKube, context: Callable[[dict[str, Any]], StackContext], spec_document: dict[str, Any]
) -> None:
    kube.put(CHILDREN["StatefulSet"], NS, {"metadata": {"name": "demo-env"}, "spec": {}})
    with pytest.raises(ForeignChild, match="StatefulSet demo-env exists and belongs to something else"):
        await ensure_children(kube, context(spec_document), running=True)
    assert kube.objects[CHILDREN["StatefulSet"], NS, "demo-env"]["spec"] == {}
