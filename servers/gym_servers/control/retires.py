"""Retires that outlast their verb: the work goes on behind it, holds checkpoints up, and is asked for again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from gym_servers.participants.gate import Gate
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, parse_key
from gym_servers.protocol.messages import Blocker
from gym_servers.unattended import unattended

log = logging.getLogger("gym_servers")


@dataclass(frozen=True)
class _Retire:
    task: asyncio.Task[None]
    since: float


class Retires:
    """The retires of one participant that are not done. `retire` stops and frees the work of episodes."""

    def __init__(self, gate: Gate, retire: Callable[[Sequence[Episode]], Awaitable[None]]) -> None:
        self._gate, self._retire = gate, retire
        self._unfinished: dict[str, _Retire] = {}
        self.done = 0

    def __len__(self) -> int:
        return len(self._unfinished)

    async def carry_out(self, episodes: Sequence[Episode]) -> None:
        """Retire, or join what was begun for these episodes before. Cut short, it goes on. Raises `checkpoint_error`
        where freeing their state failed: it is begun again when it is asked for again."""
        fresh = [one for one in episodes if one.key not in self._unfinished or self._failed(one.key)]
        if fresh:
            known = {one.key: self._unfinished[one.key].since for one in fresh if one.key in self._unfinished}
            task = unattended(self._one(fresh))
            for one in fresh:
                self._unfinished[one.key] = _Retire(task, known.get(one.key, self._gate.clock()))
        tasks = {retire.task for one in episodes if (retire := self._unfinished.get(one.key)) is not None}
        for task in tasks:
            await asyncio.shield(task)

    def _failed(self, key: str) -> bool:
        return self._unfinished[key].task.done()

    async def _one(self, episodes: Sequence[Episode]) -> None:
        try:
            await self._retire(episodes)
        except ProtocolError:
            raise
        except Exception as error:
            log.exception("a retire failed")
            raise ProtocolError("checkpoint_error", f"the retire failed: {type(error).__name__}") from error
        for episode in episodes:
            del self._unfinished[episode.key]
        self.done += len(episodes)
        self._gate.touch()

    def forget(self, rollout_ids: Collection[str]) -> None:
        """Nobody asks again for what failed of these rollouts: it holds nothing up from now on."""
        gone = set(rollout_ids)
        for key in [key for key in self._unfinished if parse_key(key).rollout_id in gone and self._failed(key)]:
            del self._unfinished[key]

    def blockers(self) -> list[Blocker]:
        now = self._gate.clock()
        return [
            Blocker(id=key, where="retire", age_seconds=round(now - retire.since, 3))
            for key, retire in self._unfinished.items()
        ]
