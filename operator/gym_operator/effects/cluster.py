"""Which cluster this is: what marks a stack's data in a bucket as this cluster's own."""

from __future__ import annotations

from typing import Final

from gym_operator.effects.kube import NAMESPACES, Kube, KubeError

MARK: Final = "kube-system"
"""The namespace that every cluster has from its first moment to its last."""


async def cluster_id(kube: Kube) -> str | None:
    """The UID of that namespace; None for an operator that may not look at it. Raises KubeError."""
    try:
        body = await kube.get(NAMESPACES, None, MARK)
    except KubeError as error:
        if error.status in (403, 404):
            return None
        raise
    return str(body["metadata"]["uid"])
