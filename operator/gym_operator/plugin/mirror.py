"""The objects of a kind in a namespace, kept up to date: listed once, and asked what has changed since."""

from __future__ import annotations

from collections.abc import Sequence

from gym_operator.effects.kube import Body, Expired, KubeError, Resource
from gym_operator.plugin.cluster import Cluster, refusal


class Mirror:
    """Of thousands of checkpoints only those that change are sent again."""

    def __init__(self, cluster: Cluster, resource: Resource) -> None:
        self._cluster, self._resource = cluster, resource
        self._known: dict[str, Body] = {}
        self._version: int | None = None

    async def look(self) -> Sequence[Body]:
        """All objects as they are now. Raises OutOfReach, Unusable."""
        kube, resource, namespace = self._cluster.kube, self._resource, self._cluster.namespace
        verb = "list" if self._version is None else "watch"
        try:
            if self._version is not None:
                try:
                    told, self._version = await kube.changes(resource, namespace, self._version)
                except Expired:
                    self._version = None
                else:
                    for gone, body in told:
                        self._known.pop(body["metadata"]["name"], None)
                        if not gone:
                            self._known[body["metadata"]["name"]] = body
            if self._version is None:
                listing = await kube.list_all(resource, namespace)
                self._known = {body["metadata"]["name"]: body for body in listing.items}
                self._version = listing.version
        except KubeError as error:
            raise refusal(error, verb, resource, namespace) from error
        return list(self._known.values())
