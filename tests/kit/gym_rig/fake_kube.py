"""The API server's part that the operator stands on, in memory: versions, conflicts, UIDs, finalizers, watches.

`before_write` is called before each write and may raise, as a network does; so a test can lose any of them.
`permitted` is asked before each request, as an API server asks its roles.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from gym_operator.api.objects import format_time
from gym_operator.effects.kube import (
    EVENTS,
    PAGE,
    PODS,
    Body,
    Changes,
    Conflict,
    Expired,
    KubeError,
    Listing,
    NotFound,
    Resource,
)

WRITES = frozenset({"create", "replace", "replace_status", "delete"})
Watcher = Callable[[Resource, bool, Body], None]


class FakeKube:
    """Implements gym_operator.plugin.cluster.UserKube. `watch` is told of every change: resource, deleted, object."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._versions = itertools.count(1)
        self.objects: dict[tuple[Resource, str | None, str], Body] = {}
        self.writes: list[tuple[str, Resource, str]] = []
        self.watch: Watcher = lambda resource, deleted, body: None
        self.before_write: Callable[[str, Resource, str], None] = lambda verb, resource, name: None
        self.permitted: Callable[[str, Resource, str], bool] = lambda verb, resource, name: True
        self._history: list[tuple[Resource, bool, Body]] = []
        self._compacted = 0
        self.logs: dict[str, list[bytes]] = {}  # by pod: the lines of its container
        self.silent_nodes: set[str] = set()  # of which nobody hears: their pods go by force alone
        self.dead = False

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Body:
        self._alive()
        self._permit("get", resource, name)
        return _copied(self._found(resource, namespace, name))

    async def list_all(self, resource: Resource, namespace: str | None, selector: str = "") -> Listing:
        self._alive()
        self._permit("list", resource, "")
        items = [
            _copied(body)
            for (kind, place, _), body in self.objects.items()
            if kind == resource and namespace in (None, place) and _is_selected(body, selector)
        ]
        return Listing(items, next(self._versions))

    async def pages(self, resource: Resource, namespace: str | None, selector: str = "") -> AsyncIterator[Listing]:
        for page in _pages(await self.list_all(resource, namespace, selector)):
            yield page

    async def changes(self, resource: Resource, namespace: str | None, since: int, selector: str = "") -> Changes:
        self._alive()
        self._permit("watch", resource, "")
        if since < self._compacted:
            raise Expired(410, f"too old resource version: {since} ({self._compacted})")
        told = [
            (deleted, _copied(body))
            for kind, deleted, body in self._history
            if kind == resource and namespace in (None, body["metadata"].get("namespace"))
            if _is_selected(body, selector) and int(body["metadata"]["resourceVersion"]) > since
        ]
        return Changes(told, max([since, *(int(body["metadata"]["resourceVersion"]) for _, body in told)]))

    def compact(self) -> None:
        """What has happened until now is not known any more, but for what came of it."""
        self._compacted = next(self._versions)
        self._history.clear()

    async def log(
        self, namespace: str, pod: str, container: str, options: Mapping[str, str], *, follow: bool = False
    ) -> AsyncIterator[bytes]:
        """What is in `logs`; followed, what is added to it, until the pod is gone."""
        self._alive()
        self._permit("get", PODS._replace(plural="pods/log"), pod)
        uid = self._found(PODS, namespace, pod)["metadata"]["uid"]
        lines = self.logs.get(pod)
        if lines is None:
            raise KubeError(400, f'container "{container}" in pod "{pod}" is waiting to start: ContainerCreating')
        at = len(lines) - int(options["tailLines"]) if "tailLines" in options else 0
        for line in lines[max(at, 0) :]:
            yield line
        at = len(lines)
        while follow and self.objects.get((PODS, namespace, pod), {}).get("metadata", {}).get("uid") == uid:
            for line in lines[at:]:
                yield line
            at = len(lines)
            await asyncio.sleep(0.1)

    async def create(self, resource: Resource, namespace: str, body: Body) -> Body:
        self._writing("create", resource, body["metadata"].get("name", ""))
        return self.put(resource, namespace, body)

    def put(self, resource: Resource, namespace: str, body: Body) -> Body:
        """Create, as somebody else than the operator."""
        key = (resource, namespace, body["metadata"]["name"])
        if key in self.objects:
            raise Conflict(409, f"{key[2]} exists already")
        body = _copied(body)
        for field, value in (body.pop("stringData", None) or {}).items():
            body.setdefault("data", {})[field] = base64.b64encode(value.encode()).decode()
        body["metadata"] = {
            "uid": str(uuid.uuid4()),
            "creationTimestamp": format_time(self._wall()),
            "generation": 1,
            "namespace": namespace,
            **body["metadata"],
        }
        return self._stored(key, body)

    async def replace(self, resource: Resource, namespace: str, body: Body) -> Body:
        self._writing("replace", resource, body["metadata"]["name"])
        found = self._current(resource, namespace, body)
        changed = body.get("spec") != found.get("spec")
        generation = found["metadata"]["generation"] + changed
        metadata = {**found["metadata"], **body["metadata"], "generation": generation}
        status = {"status": found["status"]} if "status" in found else {}
        if metadata.get("deletionTimestamp") and not metadata.get("finalizers"):
            self.remove(resource, namespace, metadata["name"])
            return {**body, "metadata": metadata}
        return self._stored((resource, namespace, metadata["name"]), {**body, "metadata": metadata, **status})

    async def replace_status(self, resource: Resource, namespace: str, body: Body) -> Body:
        self._writing("status", resource, body["metadata"]["name"])
        found = self._current(resource, namespace, body)
        return self._stored(
            (resource, namespace, body["metadata"]["name"]), {**found, "status": _copied(body["status"])}
        )

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str | None = None, grace_seconds: int | None = None
    ) -> None:
        self._writing("delete", resource, name)
        found = self._found(resource, namespace, name)
        if uid is not None and found["metadata"]["uid"] != uid:
            raise Conflict(409, f"{name} has another UID")
        if grace_seconds and found.get("spec", {}).get("nodeName") in self.silent_nodes:
            until = {
                "deletionTimestamp": format_time(self._wall() + grace_seconds),
                "deletionGracePeriodSeconds": grace_seconds,
            }
            self.set(resource, namespace, name, metadata={**found["metadata"], **until})
            return
        self.let_go(resource, namespace, name)

    def let_go(self, resource: Resource, namespace: str, name: str) -> None:
        """Delete, as somebody else than the operator: an object with finalizers stays until they are gone."""
        found = self._found(resource, namespace, name)
        if not found["metadata"].get("finalizers"):
            self.remove(resource, namespace, name)
        elif not found["metadata"].get("deletionTimestamp"):
            metadata = {**found["metadata"], "deletionTimestamp": format_time(self._wall())}
            self._stored((resource, namespace, name), {**found, "metadata": metadata})

    def remove(self, resource: Resource, namespace: str, name: str) -> None:
        body = self.objects.pop((resource, namespace, name))
        body["metadata"]["resourceVersion"] = str(next(self._versions))
        self._happened(resource, True, body)

    def set(self, resource: Resource, namespace: str, name: str, **fields: Any) -> None:
        """Change an object, as somebody else than the operator."""
        found = self._found(resource, namespace, name)
        self._stored((resource, namespace, name), {**found, **_copied(fields)})

    def _stored(self, key: tuple[Resource, str | None, str], body: Body) -> Body:
        body = _copied(body)
        body["metadata"]["resourceVersion"] = str(next(self._versions))
        self.objects[key] = body
        self._happened(key[0], False, body)
        return _copied(body)

    def _happened(self, resource: Resource, deleted: bool, body: Body) -> None:
        self._history.append((resource, deleted, _copied(body)))
        self.watch(resource, deleted, _copied(body))

    def _found(self, resource: Resource, namespace: str | None, name: str) -> Body:
        try:
            return self.objects[resource, namespace, name]
        except KeyError:
            raise NotFound(404, f"there is no {resource.plural} {name}") from None

    def _current(self, resource: Resource, namespace: str, body: Body) -> Body:
        found = self._found(resource, namespace, body["metadata"]["name"])
        for field in ("resourceVersion", "uid"):
            if body["metadata"].get(field, found["metadata"][field]) != found["metadata"][field]:
                raise Conflict(409, f"{body['metadata']['name']} has another {field}")
        return found

    def _writing(self, verb: str, resource: Resource, name: str) -> None:
        self._alive()
        if verb == "status":
            self._permit("update", resource._replace(plural=f"{resource.plural}/status"), name)
        else:
            self._permit("update" if verb == "replace" else verb, resource, name)
        self.before_write(verb, resource, name)
        self.writes.append((verb, resource, name))

    def _permit(self, verb: str, resource: Resource, name: str) -> None:
        if not self.permitted(verb, resource, name):
            raise KubeError(403, f"the API server refused (403): may not {verb} {resource.plural}")

    def _alive(self) -> None:
        if self.dead:
            raise KubeError(0, "the API server does not answer")


def _pages(whole: Listing) -> list[Listing]:
    starts = range(0, max(1, len(whole.items)), PAGE)
    return [Listing(whole.items[start : start + PAGE], whole.version) for start in starts]


def _copied(body: Body) -> Body:
    """As it comes out at the other end of a wire: nobody has the same object, and all of it is plain JSON."""
    copied: Body = json.loads(json.dumps(body))
    return copied


def _is_selected(body: Body, selector: str) -> bool:
    key, _, value = selector.partition("=")
    labels = body["metadata"].get("labels") or {}
    return not key or (labels.get(key) == value if value else key in labels)


class Session:
    """One operator's way to the API server. Cut off, nothing of this operator has any effect any more, as after
    SIGKILL: its calls neither go out nor return. `cut_at` cuts it at its n-th write from now, before or after that
    has happened; Events do not count."""

    def __init__(self, kube: FakeKube) -> None:
        self._kube = kube
        self._left: int | None = None
        self._after = False
        self.cut = False
        self.on_cut: Callable[[], None] = lambda: None

    def cut_at(self, write: int, *, after: bool) -> None:
        self._left, self._after = write, after

    async def pages(self, *arguments: Any) -> AsyncIterator[Listing]:
        for page in _pages(await self.list_all(*arguments)):
            yield page

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._kube, name)

        async def through(*arguments: Any, **options: Any) -> Any:
            due = False
            if name in WRITES and arguments[0] != EVENTS and self._left is not None:
                self._left -= 1
                due = self._left == 0
            if due and not self._after:
                self._die()
            if self.cut:
                await asyncio.get_running_loop().create_future()
            answer = await call(*arguments, **options)
            if due:
                self._die()
            if self.cut:
                await asyncio.get_running_loop().create_future()
            return answer

        return through

    def _die(self) -> None:
        self.cut = True
        self.on_cut()
