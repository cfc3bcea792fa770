"""Beside the watches: asks the API server what has happened, so that what a watch has missed is mended, and a watch
that tells nothing any more is noticed.

Everything is listed once. From then on only what happened since is asked for, which costs nothing where nothing did:
thousands of finished checkpoints are not read again and again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from gym_operator.api import names
from gym_operator.effects.cache import Cache, Key, key_of, version_of
from gym_operator.effects.kube import (
    CHECKPOINTS,
    NODES,
    PODS,
    RESTORES,
    SCHEDULES,
    STACKS,
    Expired,
    Kube,
    KubeError,
    Resource,
)
from gym_operator.rules.watch_health import Watches

log = logging.getLogger(__name__)

WATCHED: Final[Mapping[Resource, str]] = {
    STACKS: "",
    CHECKPOINTS: "",
    SCHEDULES: "",
    RESTORES: "",
    PODS: names.STACK_LABEL,
}


def watched(*, nodes: bool) -> Mapping[Resource, str]:
    """The kinds of objects that are watched, each with the label that those have which count; `nodes`: those too."""
    return {**WATCHED, NODES: ""} if nodes else WATCHED


Tell = Callable[[Resource, bool, Mapping[str, Any]], None]


class Resync:
    """`tell` is told of what has happened: kind, whether the object is gone, the object. `see_to` is told of a stack
    that is not as it was known. `complete` is set once everything that there is has been told. `nodes`: they may be
    watched, by who watches all namespaces."""

    def __init__(
        self,
        kube: Kube,
        cache: Cache,
        namespaces: Sequence[str | None],
        tell: Tell,
        see_to: Callable[[Key], None],
        monotonic: Callable[[], float],
        *,
        nodes: bool = False,
    ) -> None:
        self._kube, self._cache, self._namespaces = kube, cache, namespaces
        self._tell, self._see_to, self._monotonic = tell, see_to, monotonic
        self._labels = watched(nodes=nodes)
        self._since: dict[tuple[Resource, str | None], int] = {}
        self.watches = Watches()
        self.complete = asyncio.Event()

    async def step(self) -> None:
        """Ask once. Raises KubeError."""
        places = [(resource, namespace) for resource in self._labels for namespace in self._namespaces]
        results = await asyncio.gather(*(self._ask(*place) for place in places), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self.complete.set()
        self._cache.sees_all = None in self._namespaces

    async def _ask(self, resource: Resource, namespace: str | None) -> None:
        place = (resource, namespace)
        if (since := self._since.get(place)) is None:
            await self._list(resource, namespace)
            return
        try:
            changes = await self._kube.changes(resource, namespace, since, self._labels[resource])
        except Expired:
            await self._list(resource, namespace)
            return
        except KubeError as error:
            if error.status:  # it answers, and not to this: begin anew
                del self._since[place]
            raise
        self._since[place] = changes.version
        # What was between is over: an object that was changed and then deleted must not come back for a moment.
        last = {body["metadata"]["uid"]: (deleted, body) for deleted, body in changes.told}
        present = {uid: version_of(body) for uid, (deleted, body) in last.items() if not deleted}
        self.watches.found((resource.plural, namespace), present, last.keys() - present.keys(), self._monotonic())
        for deleted, body in last.values():
            self._tell(resource, deleted, body)

    async def _list(self, resource: Resource, namespace: str | None) -> None:
        present, version = {}, 0
        async for page in self._kube.pages(resource, namespace, self._labels[resource]):
            version = page.version
            for body in page.items:
                present[body["metadata"]["uid"]] = version_of(body)
                self._tell(resource, False, body)
        self._since[resource, namespace] = version
        self.watches.listed((resource.plural, namespace), present, self._monotonic())
        self._forget(resource, namespace, present, version)

    def _forget(self, resource: Resource, namespace: str | None, present: Collection[str], as_of: int) -> None:
        """Let go of what is known and was not there at a resource version."""

        def vanished(version: int, uid: str, place: str) -> bool:
            return uid not in present and version <= as_of and namespace in (None, place)

        match resource:
            case r if r == PODS:
                for pod in self._cache.all_pods():
                    if vanished(pod.version, pod.uid, pod.namespace):
                        self._cache.drop_pod(pod.stack_uid, pod.uid)
                        self._see_to(Key(pod.namespace, pod.stack))
            case r if r == NODES:
                for name, node in list(self._cache.nodes.items()):
                    if node.uid not in present and node.version <= as_of:
                        self._tell(NODES, True, {"metadata": {"name": name, "uid": node.uid}})
            case r if r == CHECKPOINTS:
                for entry in self._cache.entries():
                    if vanished(entry.version, entry.uid, entry.namespace):
                        self._cache.drop_checkpoint(Key(entry.namespace, entry.name), entry.uid)
                        self._see_to(Key(entry.namespace, entry.stack))
            case _:
                known = {
                    STACKS: list(self._cache.stacks.values()),
                    SCHEDULES: self._cache.schedules.values(),
                    RESTORES: self._cache.restores.values(),
                }[resource]
                for body in known:
                    if vanished(version_of(body), body["metadata"]["uid"], key_of(body).namespace):
                        self._tell(resource, True, body)
