"""The StatefulSet of a server: one pod per cell, with a name that says which server of which cell it is."""

from __future__ import annotations

from gym_operator.api import names
from gym_operator.rules.workloads.common import (
    Manifest,
    StackContext,
    child,
    server_labels,
    server_selector,
)
from gym_operator.rules.workloads.pods import pod_template
from gym_servers.stack.spec import Participant


def stateful_set(context: StackContext, participant: Participant, *, running: bool) -> Manifest:
    """`<stack>-<server>`. Without `running` it keeps no pods."""
    name = names.workload(context.name, participant.name)
    return child(
        context,
        "apps/v1",
        "StatefulSet",
        name,
        {**server_labels(context, participant.name), names.COMPONENT_LABEL: participant.kind},
        spec={
            "replicas": context.cells if running else 0,
            "serviceName": name,
            "podManagementPolicy": "Parallel",
            # A cell is replaced as a whole and from a checkpoint; a rolling update would break it up.
            "updateStrategy": {"type": "OnDelete"},
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": server_selector(context, participant.name)},
            "template": pod_template(context, participant),
        },
    )
