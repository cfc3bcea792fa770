"""Parts of a stack's spec that are as in any pod: names of objects, and compute resources."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints, WithJsonSchema

from gym_servers.stack.wire import WireModel, matches

Quantity = Annotated[
    str | int,
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$",
        }
    ),
]
ObjectName = Annotated[
    str,
    StringConstraints(max_length=253),
    matches(r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "use lower-case letters, digits, dashes and dots"),
]


class ContainerResources(WireModel):
    """Compute resources of a container, as in any pod. The local runner ignores them."""

    requests: Annotated[dict[str, Quantity], Field(max_length=16)] | None = None
    """What the scheduler sets aside, such as cpu, memory or nvidia.com/gpu."""
    limits: Annotated[dict[str, Quantity], Field(max_length=16)] | None = None
    """What the container may use at most."""
