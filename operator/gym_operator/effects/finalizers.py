"""Our finalizer on a GymCheckpoint: it keeps the object for as long as its data is being removed."""

from __future__ import annotations

from typing import Final

from gym_operator.api.names import DATA_FINALIZER
from gym_operator.effects.kube import CHECKPOINTS, Conflict, Kube, KubeError, NotFound

TRIES: Final = 5


async def set_finalizer(kube: Kube, namespace: str, name: str, uid: str, *, present: bool) -> None:
    """Put it on or take it off; an object that is gone needs neither. Raises KubeError."""
    for _ in range(TRIES):
        try:
            body = await kube.get(CHECKPOINTS, namespace, name)
        except NotFound:
            return
        finalizers = body["metadata"].get("finalizers") or []
        # To an object that is being deleted none can be added.
        cannot = present and body["metadata"].get("deletionTimestamp")
        if body["metadata"]["uid"] != uid or (DATA_FINALIZER in finalizers) == present or cannot:
            return
        others = [each for each in finalizers if each != DATA_FINALIZER]
        body["metadata"]["finalizers"] = [*others, *([DATA_FINALIZER] if present else [])]
        try:
            await kube.replace(CHECKPOINTS, namespace, body)
            return
        except NotFound:
            return
        except Conflict:
            continue
    raise KubeError(409, f"GymCheckpoint {name} could not be changed: it changes all the time")
