"""What the watches have told: objects of our kinds, and pods. Small, in memory, and only ever a hint.

Whoever writes does so on a resource version, so acting on an old view costs a conflict and no more.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gym_operator.api.names import ENGINE
from gym_operator.effects.kube import Listing
from gym_operator.effects.transport import PodTransport
from gym_operator.rules.checkpoint_entries import Entry, entry_of
from gym_operator.rules.pod_state import NO_CELL, PodState, by_server, is_cordoned, observe

REMEMBERED: Final = 1000
"""Finished checkpoints whose end this operator wrote: their last events are on the way."""


class Key(NamedTuple):
    """An object's place: namespace and name."""

    namespace: str
    name: str


def key_of(body: Mapping[str, Any]) -> Key:
    return Key(sys.intern(body["metadata"]["namespace"]), body["metadata"]["name"])


def version_of(body: Mapping[str, Any]) -> int:
    return int(body["metadata"].get("resourceVersion") or 0)


def lean(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """An object without what only an API server reads, which may be more than all the rest."""
    metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
    return {**body, "metadata": metadata}


def stack_of(checkpoint: Mapping[str, Any]) -> Key:
    """The stack a GymCheckpoint refers to."""
    reference = (checkpoint.get("spec") or {}).get("stackRef") or {}
    return Key(checkpoint["metadata"]["namespace"], str(reference.get("name") or ""))


class NodeSeen(NamedTuple):
    """A node as it was told last; what is on it is another's to know."""

    uid: str
    version: int
    cordoned: bool


class Objects:
    """Objects of one kind as they were told last; what is older than what is known changes nothing. `changes` counts:
    who has seen all of them need not look again before it grows."""

    def __init__(self) -> None:
        self._bodies: dict[Key, Mapping[str, Any]] = {}
        self.changes = 0

    def put(self, body: Mapping[str, Any]) -> bool:
        """Whether that was news."""
        known = self._bodies.get(key_of(body))
        if known is not None and version_of(body) <= version_of(known):
            return False
        self._bodies[key_of(body)] = body
        self.changes += 1
        return True

    def drop(self, key: Key, uid: str) -> None:
        known = self._bodies.get(key)
        if known is not None and known["metadata"]["uid"] == uid:
            del self._bodies[key]
            self.changes += 1

    def get(self, key: Key) -> Mapping[str, Any] | None:
        return self._bodies.get(key)

    def values(self) -> list[Mapping[str, Any]]:
        return list(self._bodies.values())


class Cache:
    """The objects by key. `sees_all`: all there is in the whole cluster was told once. `transport` learns which
    addresses answer. `entry_changes` counts changes of what `entries` gives, as `Objects.changes` does."""

    def __init__(self, transport: PodTransport) -> None:
        self.stacks: dict[Key, Mapping[str, Any]] = {}
        self.checkpoints: dict[Key, Mapping[str, Any]] = {}
        self.schedules = Objects()
        self.restores = Objects()
        self.sees_all = False
        self.entry_changes = 0
        self._entries: dict[Key, Entry] = {}
        self._finished: dict[str, None] = {}
        self._pods: dict[str, dict[str, PodState]] = {}
        self.nodes: dict[str, NodeSeen] = {}
        self.cordoned: frozenset[str] = frozenset()
        self._transport = transport

    def put_stack(self, body: Mapping[str, Any]) -> bool:
        """Whether that was news."""
        key, known = key_of(body), self.stacks.get(key_of(body))
        if known is not None and version_of(body) <= version_of(known):
            return False
        self.stacks[key] = body
        return True

    def drop_stack(self, key: Key, uid: str) -> None:
        known = self.stacks.get(key)
        if known is not None and known["metadata"]["uid"] == uid:
            del self.stacks[key]

    def put_checkpoint(self, body: Mapping[str, Any]) -> bool:
        """Of finished ones only an entry is kept: there may be thousands, and little happens to them any more.
        Whether that was news to who takes checkpoints of its stack."""
        key, known, entry = key_of(body), self.checkpoints.get(key_of(body)), entry_of(body)
        before = self._entries.get(key)
        if before is not None and entry.version <= before.version:
            return False
        self._entries[key] = entry
        self.entry_changes += 1
        if entry.over or entry.uid in self._finished:
            self.checkpoints.pop(key, None)
            return known is not None
        self.checkpoints[key] = body
        return True

    def drop_checkpoint(self, key: Key, uid: str) -> None:
        """It is not there any more."""
        self._done_with(key, uid)
        entry = self._entries.get(key)
        if entry is not None and entry.uid == uid:
            del self._entries[key]
            self.entry_changes += 1

    def _done_with(self, key: Key, uid: str) -> None:
        known = self.checkpoints.get(key)
        if known is not None and known["metadata"]["uid"] == uid:
            del self.checkpoints[key]

    def finish_checkpoint(self, key: Key, uid: str) -> None:
        """It is final; an older view of it that comes late must not bring it back."""
        self._finished[uid] = None
        while len(self._finished) > REMEMBERED:
            del self._finished[next(iter(self._finished))]
        self._done_with(key, uid)

    def entry(self, key: Key) -> Entry | None:
        """The GymCheckpoint at this place, in short."""
        return self._entries.get(key)

    def entries(self) -> list[Entry]:
        """All GymCheckpoints there are, in short."""
        return list(self._entries.values())

    def checkpoints_of(self, stack: Key) -> list[Mapping[str, Any]]:
        return [body for body in self.checkpoints.values() if stack_of(body) == stack]

    def put_pod(self, body: Mapping[str, Any]) -> PodState:
        """Read a pod; what is older than what is known changes nothing."""
        pod = observe(body)
        pods = self._pods.setdefault(pod.stack_uid, {})
        known = pods.get(pod.uid)
        if known is not None and known.version > pod.version:
            return known
        pods[pod.uid] = pod
        if pod.address is not None and pod.incarnation is not None:
            if pod.alive:
                self._transport.alive(pod.address, pod.incarnation)
            else:
                self._transport.ended(pod.address, pod.incarnation)
        return pod

    def drop_pod(self, stack_uid: str, uid: str) -> None:
        pods = self._pods.get(stack_uid, {})
        pod = pods.pop(uid, None)
        if pod is not None and pod.address is not None and pod.incarnation is not None:
            self._transport.forget(pod.address, pod.incarnation)
        if not pods:
            self._pods.pop(stack_uid, None)

    def pods_of(self, stack_uid: str, cell: int) -> dict[str, PodState]:
        """The pod that counts for each server of a cell."""
        return by_server(pod for pod in self._pods.get(stack_uid, {}).values() if pod.cell == cell)

    def all_of(self, stack_uid: str) -> list[PodState]:
        """All pods of a stack, whatever they are for."""
        return list(self._pods.get(stack_uid, {}).values())

    def has_pods(self, stack_uid: str) -> bool:
        """Whether there is any pod of a stack."""
        return bool(self._pods.get(stack_uid))

    def engines_of(self, stack_uid: str) -> list[PodState]:
        """The pods of a stack's engine."""
        pods = self._pods.get(stack_uid, {}).values()
        return [pod for pod in pods if (pod.cell, pod.server) == (NO_CELL, ENGINE)]

    def nodes_of(self, stack_uid: str) -> set[str]:
        """The nodes that a stack's pods are on."""
        return {pod.node for pod in self._pods.get(stack_uid, {}).values() if pod.node}

    def put_node(self, body: Mapping[str, Any], *, deleted: bool = False) -> bool:
        """Whether it is new that something, or that nothing, is to come to a node; what is older than what is known
        changes nothing."""
        name, before = body["metadata"]["name"], self.cordoned
        known, found = self.nodes.get(name), NodeSeen(body["metadata"]["uid"], version_of(body), is_cordoned(body))
        if deleted and known is not None and known.uid == found.uid:
            del self.nodes[name]
        elif not deleted and (known is None or found.version > known.version):
            self.nodes[name] = found
        cordoned = name in self.nodes and self.nodes[name].cordoned
        self.cordoned = before | {name} if cordoned else before - {name}
        return self.cordoned != before

    def replace_pods(self, stack_uid: str, listing: Listing) -> None:
        """Take a list from the API server for the whole truth about one stack's pods, as of its version: a watch
        may have told of younger ones meanwhile."""
        present = {self.put_pod(body).uid for body in listing.items}
        for uid, pod in list(self._pods.get(stack_uid, {}).items()):
            if uid not in present and pod.version <= listing.version:
                self.drop_pod(stack_uid, uid)

    def all_pods(self) -> list[PodState]:
        return [pod for pods in self._pods.values() for pod in pods.values()]
