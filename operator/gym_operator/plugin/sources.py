"""Opens the storage of a checkpoint: with the Secrets of its stack, read with the user's own rights, or with the
user's own keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from gym_operator.effects.kube import STACKS, Body, Kube, NotFound, Resource
from gym_operator.effects.storage import StackStorage
from gym_operator.plugin.cluster import Cluster
from gym_operator.plugin.exits import OutOfReach
from gym_operator.plugin.views.places import folder_of, places_of, storage_of
from gym_servers.stack.settings import S3Settings
from gym_servers.stack.spec import StorageSpec
from gym_servers.storage.locate import open_store
from gym_servers.storage.store import ObjectStore


@dataclass(frozen=True)
class Source:
    """A part of a checkpoint. `digest` None: whatever is there. `open` blocks, and raises StorageError."""

    uri: str
    digest: str | None
    open: Callable[[], ObjectStore]


def by_place(uri: str, digest: str | None, s3: S3Settings | None) -> Sequence[Source]:
    """What is at a place, with the keys of this process's environment."""
    folder = folder_of(uri)
    return [Source(folder, digest, lambda: open_store(folder, s3))]


async def by_name(cluster: Cluster, name: str) -> Sequence[Source]:
    """What a GymCheckpoint stands for. Raises PluginError."""
    body = await cluster.checkpoint(name)
    places = places_of(body)
    stack = await cluster.find(STACKS, body["spec"]["stackRef"]["name"])
    storage = await opened(cluster, storage_of(body, stack))
    return [Source(place.uri, place.digest, lambda uri=place.uri: storage.open(uri)) for place in places]  # type: ignore[misc]


async def opened(cluster: Cluster, spec: StorageSpec) -> StackStorage:
    """A storage as a stack reaches it. Raises OutOfReach where the user may not read its Secrets."""
    storage = StackStorage(cast("Kube", _AsUser(cluster)), cluster.namespace)
    try:
        await storage.read(spec)
    except OutOfReach as error:
        raise OutOfReach(
            f"{error}; or give the checkpoint's URI in place of its name, and keys of your own in AWS_ACCESS_KEY_ID "
            "and AWS_SECRET_ACCESS_KEY"
        ) from error
    return storage


@dataclass(frozen=True)
class _AsUser:
    """What StackStorage reads, with errors that speak of the user's rights and not of the operator's."""

    cluster: Cluster

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Body:
        found = await self.cluster.find(resource, name)
        if found is None:
            raise NotFound(404, f"there is no {resource.plural} {name}")
        return found
