"""The PodDisruptionBudget of a stack: where the operator sees that a node is drained, it moves the cells itself."""

from __future__ import annotations

from gym_operator.api import names
from gym_operator.rules.workloads.common import Manifest, StackContext, child, stack_labels


def disruption_budget(context: StackContext) -> Manifest:
    """`<stack>-servers`: nobody evicts a server. A drain waits until its cell has had its last checkpoint; then that
    cell's pods are left out, and no others. An engine may be evicted: its Deployment brings another one up, and calls
    go on behind what they had."""
    evictable = [{"key": names.COMPONENT_LABEL, "operator": "NotIn", "values": [names.ENGINE_COMPONENT]}]
    if context.yielding:
        cells = [str(cell) for cell in sorted(context.yielding)]
        evictable.append({"key": names.POD_INDEX_LABEL, "operator": "NotIn", "values": cells})
    return child(
        context,
        "policy/v1",
        "PodDisruptionBudget",
        names.disruption_budget(context.name),
        stack_labels(context),
        spec={
            "maxUnavailable": 0,
            "selector": {
                "matchLabels": {names.STACK_UID_LABEL: context.identity.uid},
                "matchExpressions": evictable,
            },
        },
    )
