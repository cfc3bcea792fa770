"""The NetworkPolicy of a stack's pods: who may speak to which port."""

from __future__ import annotations

from typing import Any

from gym_operator.api import names
from gym_operator.rules.workloads.common import Manifest, StackContext, child, stack_labels

NAMESPACE_NAME_LABEL = "kubernetes.io/metadata.name"


def network_policy(context: StackContext) -> Manifest:
    """`<stack>-servers`: control only for the operator, data only for pods that carry the stack's label, and for
    those of its driver."""
    operator = {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME_LABEL: context.operator_namespace}},
        "podSelector": {"matchLabels": {names.NAME_LABEL: names.OPERATOR_NAME}},
    }
    servers: dict[str, Any] = {"matchLabels": {names.STACK_LABEL: context.name}}
    if context.spec.inference is not None:
        # An engine is called and calls nobody.
        engine = {"key": names.COMPONENT_LABEL, "operator": "NotIn", "values": [names.ENGINE_COMPONENT]}
        servers["matchExpressions"] = [engine]
    callers: list[dict[str, Any]] = [{"podSelector": servers}]
    driver = context.spec.access.driver_selector
    if driver is not None:
        callers.append({"podSelector": driver.document()})
    return child(
        context,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        names.network_policy(context.name),
        stack_labels(context),
        spec={
            "podSelector": {"matchLabels": {names.STACK_UID_LABEL: context.identity.uid}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [operator], "ports": [{"protocol": "TCP", "port": names.CONTROL_PORT_NAME}]},
                {"from": callers, "ports": [{"protocol": "TCP", "port": names.DATA_PORT_NAME}]},
            ],
        },
    )
