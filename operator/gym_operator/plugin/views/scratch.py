"""The stack that a drill restores into: a copy of another one, made so that nothing of it reaches that one's run."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Final

from gym_operator.api import names
from gym_operator.plugin.exits import Unusable
from gym_operator.plugin.views.requests import Body
from gym_operator.plugin.views.text import some_of
from gym_operator.rules.restores import Place
from gym_servers.registry import is_own_class
from gym_servers.stack.settings import StackIdentity
from gym_servers.stack.spec import SpecError, StackSpec, StorageSpec, check_stack_name, parse_spec

NO_NODE: Final = {f"{names.GROUP}/drill": "has-no-engine"}
"""Labels that no node has: restoring calls no engine, so its pod is never placed and takes no device."""


def scratch_stack(
    stack: Mapping[str, Any], name: str, places: Sequence[Place], drill_id: str, *, own_classes: bool
) -> Body:
    """A GymStack that is restored into, for a checkpoint whose parts are at these places. `own_classes`: servers that
    are classes of the user's image may run too. Raises Unusable.

    It has no driver and lets no other reach it: what is restored waits for a call that does not come, so no tool is
    called, no token generated and no row written. It takes nothing over of the stack's labels, annotations and
    owners: whatever looks after the stack must not take this one for its own.
    """
    whose, spec = stack["metadata"]["name"], copy.deepcopy(dict(stack.get("spec") or {}))
    spec.pop("collection", None)
    access = spec.get("access") or {}
    access.pop("driverSelector", None)
    spec |= {"suspend": False, "cells": _cells_for(places), "access": access}
    if spec.get("inference"):
        _without_devices(spec["inference"].get("vllm") or {})
    read = _read(spec, name, whose)
    theirs = sorted(server.name for server in read.servers if is_own_class(server.server))
    if theirs and not own_classes:
        raise Unusable(
            f"the servers {some_of(theirs)} are classes of your own: a drill lets them restore sessions in other "
            "pods while the run works on with the same ones; give --own-classes if all that they restore is in their "
            "records, and nothing outside that both would share"
        )
    return {"metadata": _metadata(name, whose, drill_id), "spec": spec}


def scratch_restore(scratch: Mapping[str, Any], checkpoint: str, drill_id: str) -> Body:
    """The GymRestore that belongs to it, and goes with it whoever deletes it."""
    metadata, whose = scratch["metadata"], scratch["metadata"]["labels"][names.DRILL_LABEL]
    owner = {
        "apiVersion": names.API_VERSION,
        "kind": names.STACK_KIND,
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    return {
        "metadata": {**_metadata(metadata["name"], whose, drill_id), "ownerReferences": [owner]},
        "spec": {"stackRef": {"name": metadata["name"]}, "checkpointRef": {"name": checkpoint}},
    }


def is_of(body: Mapping[str, Any] | None, drill_id: str) -> bool:
    """Whether an object was made by this drill."""
    annotations = ((body or {}).get("metadata") or {}).get("annotations") or {}
    return bool(annotations.get(names.DRILL_ID) == drill_id)


def taken_by(body: Mapping[str, Any], namespace: str) -> str:
    """What to do about an object that has the name a drill needs."""
    name = body["metadata"]["name"]
    whose = (body["metadata"].get("labels") or {}).get(names.DRILL_LABEL)
    if whose is None:
        return f"GymStack {name} is there, and no drill has made it: give another name with --name"
    return (
        f"GymStack {name} is there, of another drill of stack {whose}: wait until that is over, or, where it was "
        f"killed, kubectl delete gymstack {name} -n {namespace}"
    )


def place_of(scratch: Mapping[str, Any]) -> tuple[StorageSpec, StackIdentity]:
    """How the scratch stack's storage is reached, and as whose its folder is named."""
    metadata = scratch["metadata"]
    identity = StackIdentity(namespace=metadata["namespace"], name=metadata["name"], uid=metadata["uid"])
    return StorageSpec.parse(scratch["spec"]["checkpoints"]["storage"]), identity


def _cells_for(places: Sequence[Place]) -> int:
    """As many as the parts need: a part belongs to the cell of its number, a single one to a single cell."""
    return 1 if len(places) == 1 else max(place.cell or 0 for place in places) + 1


def _without_devices(vllm: dict[str, Any]) -> None:
    for part in ("resources", "tolerations"):
        vllm.pop(part, None)
    vllm |= {"nodeSelector": dict(NO_NODE), "replicas": 1}


def _read(spec: Mapping[str, Any], name: str, whose: str) -> StackSpec:
    try:
        read = parse_spec(spec)
        check_stack_name(name, read)
    except SpecError as error:
        raise Unusable(
            f"stack {whose} cannot be copied as {name}: {error}; another name is given with --name"
        ) from error
    if not read.checkpoints.enabled:
        raise Unusable(f"checkpoints are turned off in stack {whose}: set spec.checkpoints.enabled to restore any")
    return read


def _metadata(name: str, whose: str, drill_id: str) -> Body:
    return {"name": name, "labels": {names.DRILL_LABEL: whose}, "annotations": {names.DRILL_ID: drill_id}}
