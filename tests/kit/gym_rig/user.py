"""Somebody with `kubectl gym` before a stack with an operator at work."""

from __future__ import annotations

import io
from typing import Any, cast

from gym_operator.plugin.cluster import Cluster, UserKube
from gym_operator.plugin.screen import Screen
from gym_rig import collecting
from gym_rig.cell import IDENTITY
from gym_rig.operated import OperatedRig
from gym_rig.virtual import now

STACK = IDENTITY.name


def cluster_of(rig: OperatedRig, namespace: str = IDENTITY.namespace) -> Cluster:
    return Cluster(cast("UserKube", rig.kube), namespace, now)


class Page(Screen):
    """A screen whose text can be read."""

    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        super().__init__(self.out, self.err)

    @property
    def lines(self) -> list[list[str]]:
        return [line.split() for line in self.out.getvalue().splitlines()]

    @property
    def told(self) -> str:
        return self.err.getvalue()


async def at_work(rig: OperatedRig) -> None:
    await rig.until(rig.all_in_service, "in service")
    await rig.until(lambda: rig.cell.effects() >= 2, "tools were called")


async def taken(rig: OperatedRig, name: str, **spec: Any) -> dict[str, Any]:
    """The status of a checkpoint that succeeded."""
    status = await collecting.taken(rig, name, **spec)
    assert status["phase"] == "Succeeded", status
    return status
