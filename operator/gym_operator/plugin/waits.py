"""Waits until an object that was made is final, and says how far it is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final

from gym_operator.effects.kube import Body, Resource
from gym_operator.plugin.cluster import Cluster
from gym_operator.plugin.exits import NoAnswer, TookTooLong, Unusable
from gym_operator.plugin.screen import Screen

LOOK_SECONDS: Final = 1.0


async def until_final(
    cluster: Cluster,
    screen: Screen,
    made: Body,
    resource: Resource,
    finals: Collection[str],
    progress: Callable[[Body], str],
    seconds: float,
    after: str = "it goes on",
) -> Body:
    """The object once its phase is one of `finals`. An API server that is away meanwhile is waited for. `after`: what
    becomes of it when it is not waited for any longer.

    Raises TookTooLong after `seconds`, Unusable where the object is gone, and OutOfReach.
    """
    name, uid, kind = made["metadata"]["name"], made["metadata"]["uid"], made["kind"]
    clock = asyncio.get_running_loop().time
    until = clock() + seconds
    try:
        while True:
            try:
                found = await cluster.find(resource, name)
            except NoAnswer as error:
                screen.tell(f"{name}: {error}; it is asked again")
            else:
                if found is None or found["metadata"]["uid"] != uid:
                    raise Unusable(f"{kind} {name} was deleted before it was done")
                if (found.get("status") or {}).get("phase") in finals:
                    return found
                screen.tell(f"{name}: {progress(found)}")
            if clock() >= until:
                raise TookTooLong(f"{kind} {name} is not done after {seconds:.0f} s: {after}")
            await asyncio.sleep(LOOK_SECONDS)
    except asyncio.CancelledError:
        screen.tell(f"{name}: not waited for any longer: {after}")
        raise
