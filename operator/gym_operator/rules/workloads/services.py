"""Two kinds of Services per server.

Control traffic goes to a pinned pod and must reach processes that are not ready yet: a restored process is
told to resume while closed. Data traffic goes to a server of a cell by an address that outlives its pods, and
only to a process that has resumed.
"""

from __future__ import annotations

from typing import Any

from gym_operator.api import names
from gym_operator.rules.workloads.common import (
    Manifest,
    StackContext,
    child,
    server_labels,
    server_selector,
)


def headless_service(context: StackContext, server: str) -> Manifest:
    """`<stack>-<server>`: gives the pods their names, ready or not."""
    return child(
        context,
        "v1",
        "Service",
        names.workload(context.name, server),
        server_labels(context, server),
        spec={
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": server_selector(context, server),
            "ports": [_port(names.CONTROL_PORT_NAME, names.CONTROL_PORT)],
        },
    )


def data_service(context: StackContext, server: str, cell: int) -> Manifest:
    """`<stack>-<server>-<cell>`: what peers call."""
    pod = names.pod(context.name, server, cell)
    return child(
        context,
        "v1",
        "Service",
        names.data_service(context.name, server, cell),
        {**server_labels(context, server), names.CELL_LABEL: str(cell)},
        spec={
            "selector": {**server_selector(context, server), names.POD_NAME_LABEL: pod},
            "ports": [_port(names.DATA_PORT_NAME, names.DATA_PORT)],
        },
    )


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "port": number, "targetPort": name, "protocol": "TCP", "appProtocol": "http"}
