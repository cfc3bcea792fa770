"""Moves one cell to other pods on purpose: a last checkpoint that stops it, and fresh pods that continue from it.

What to do is decided by `rules.rollouts`; once the checkpoint is published the cell's record says that it is to be
replaced and why, so whoever looks after the cell next goes on with that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from gym_operator.effects.checkpoints import Checkpoints
from gym_operator.effects.kube_host import KubeCellHost
from gym_operator.effects.last_checkpoint import FAILURES, take_last
from gym_operator.rules import rollouts as rules
from gym_operator.rules.unasked import ROLL_OUT
from gym_servers.coordination.checkpoint import CheckpointFailed
from gym_servers.coordination.controller import CellController
from gym_servers.coordination.terms import NOT_BEGUN

RETRY_SECONDS: Final = 5.0
"""Between last checkpoints of a cell that can wait."""


class Rollout:
    """Of one cell. `failed` counts the last checkpoints that did for the attempt it runs under; `trouble` is why the
    last one did, for people."""

    def __init__(
        self,
        index: int,
        host: KubeCellHost,
        checkpoints: Checkpoints,
        monotonic: Callable[[], float],
        wake: Callable[[], None],
    ) -> None:
        self._index, self._host, self._checkpoints = index, host, checkpoints
        self._monotonic, self._wake = monotonic, wake
        self._task: asyncio.Task[None] | None = None
        self._attempt = -1
        self._due = float("-inf")
        self.failed = 0
        self.trouble = ""

    @property
    def under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    async def step(self, controller: CellController, situation: rules.Situation) -> None:
        """Do what is next. Raises StorageError, and what saving the record or deleting a pod raises."""
        attempt = controller.record.attempt
        if attempt != self._attempt or rules.cause_of(situation) is None:
            self._attempt, self.failed, self._due, self.trouble = attempt, 0, float("-inf"), ""
        match rules.next_move(situation):
            case rules.Take(reason) if not self.under_way and self._monotonic() >= self._due:
                await self._host.announce(
                    "Normal", "RollingOut", f"{reason}; a last checkpoint is taken, then its pods are replaced"
                )
                self._task = asyncio.create_task(self._take(controller, reason))
            case rules.Replace(reason):
                await controller.replace(reason)
            case rules.Discard(servers):
                await self._host.discard(servers)
            case _:
                pass

    async def _take(self, controller: CellController, reason: str) -> None:
        try:
            await take_last(controller, self._checkpoints, self._index, ROLL_OUT, replacing=reason)
        except FAILURES as error:
            if isinstance(error, CheckpointFailed) and error.reason in NOT_BEGUN:
                return  # another one came first, and is let end
            self.failed += 1
            self.trouble = str(error)
            self._due = self._monotonic() + RETRY_SECONDS
            await self._host.announce(
                "Warning", "LastCheckpointFailed", f"before its pods are replaced because {reason}: {error}"
            )
        self._wake()
