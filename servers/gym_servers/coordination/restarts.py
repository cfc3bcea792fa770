"""Restarts what holds checkpoints up: said and persisted first, then asked for until it is gone, beside the looks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from gym_servers.coordination import blockers
from gym_servers.coordination.client import ParticipantClient, Unreachable
from gym_servers.coordination.record import Blocked, CellRecord
from gym_servers.coordination.verbs import retire_all
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.messages import Status

RETIRE_SECONDS = 30.0  # one try; what does not come to rest may take its time to be stopped, too

Change = Callable[[CellRecord], Mapping[str, Any]]
Announce = Callable[[Literal["Normal", "Warning"], str, str], Awaitable[None]]


class BlockerRestarts:
    """Of one cell. `update` makes a change of its record durable; `wall` gives Unix time."""

    def __init__(
        self, announce: Announce, update: Callable[[Change], Awaitable[None]], wall: Callable[[], float]
    ) -> None:
        self._announce, self._update, self._wall = announce, update, wall
        self._task: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """Give up what is under way; another look asks for it again."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])

    async def see_to(
        self, record: CellRecord, limit: int, statuses: Mapping[str, Status], clients: Sequence[ParticipantClient]
    ) -> None:
        """Restart what has held `limit` checkpoints up in a row, and go on with what was begun before."""
        live = blockers.live_keys(statuses)
        keys = [key for one in record.restarted if (key := blockers.key_of(one)) in live]
        if not keys:
            due = blockers.due(record.blocked, limit, live)
            if not due:
                return
            await self._say(due)
            keys = [blockers.key_of(one) for one in due]
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._retire(keys, clients))

    async def _say(self, due: Sequence[Blocked]) -> None:
        rollouts, now = {one.rollout for one in due}, self._wall()

        def change(record: CellRecord) -> Mapping[str, Any]:
            return {
                "blocked": [one for one in record.blocked if one.rollout not in rollouts],
                "restarted": blockers.restarted(due, record.restarted, now),
            }

        await self._update(change)
        text = f"restarted under their next attempt: {blockers.described(due)}"
        await self._announce("Warning", "BlockersRestarted", text)

    async def _retire(self, keys: list[str], clients: Sequence[ParticipantClient]) -> None:
        with suppress(ProtocolError, Unreachable):
            verb_id = f"restart-{secrets.token_hex(4)}"
            await retire_all(clients, verb_id, keys, self._wall() + RETIRE_SECONDS)
