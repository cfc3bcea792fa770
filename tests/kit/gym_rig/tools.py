"""A tool server's participant alone, with a number as the state of each session."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rig.alone import R0
from gym_rig.verbs import start
from gym_rig.virtual import now
from gym_servers.participants.gate import Gate
from gym_servers.participants.resources import Hooks, ResourcesParticipant
from gym_servers.participants.tool_sessions import ToolSession
from gym_servers.protocol.identity import Episode


class Tools:
    """A server's own state: a number per session, and what was done to it."""

    def __init__(self, mode: str = "exported", *, started: bool = True) -> None:
        self.values: dict[str, int] = {}
        self.log: list[str] = []
        self.turnstile = asyncio.Semaphore(1000)
        self.parked: set[str] = set()
        self.failing: str | None = None
        self.freeing = asyncio.Semaphore(1000)
        hooks = Hooks(self.export, self.restore, self.retire, self.park, self.unpark)
        self.participant = ResourcesParticipant(Gate(clock=now), mode, hooks)
        if started:
            start(self.participant)

    async def export(self, ids: Sequence[str]) -> Mapping[str, Any]:
        return {one: self.values[one] for one in ids}

    async def restore(self, states: Mapping[str, Any]) -> None:
        valid = {one: int(value) for one, value in states.items()}
        for one, value in valid.items():
            await self.turnstile.acquire()
            if one == self.failing:
                raise OSError("no room")
            self.values[one] = value

    async def retire(self, session_id: str) -> None:
        self.log.append(f"retire {session_id}")
        await self.freeing.acquire()
        self.values.pop(session_id, None)

    async def park(self, ids: Sequence[str]) -> None:
        await self.turnstile.acquire()
        self.parked |= set(ids)

    async def unpark(self, ids: Sequence[str]) -> None:
        await self.turnstile.acquire()
        self.parked -= set(ids)

    async def seed(
        self, session: str | None = "s", episode: Episode | None = R0, row: str = "row", fresh: str = "fresh"
    ) -> ToolSession:
        async def begin(name: str) -> None:
            self.log.append(f"seed {name}")
            await self.turnstile.acquire()
            self.values[name] = 0

        return await self.participant.seed(session, episode, begin, digest=row, fresh_id=fresh)

    async def add(
        self, call: str | None = "c1", *, session: str = "s", episode: Episode | None = R0, by: int = 1
    ) -> Any:
        async def work(found: ToolSession) -> Any:
            assert found.id not in self.parked
            await self.turnstile.acquire()
            self.values[found.id] += by
            self.log.append(f"{call}")
            return self.values[found.id]

        return await self.participant.call(session, episode, "add", work, call_id=call, digest=str(by))

    @property
    def calls(self) -> list[str]:
        return [entry for entry in self.log if not entry.startswith(("seed", "retire"))]

    def hold(self) -> None:
        self.turnstile = asyncio.Semaphore(0)


def begun(tools: Tools) -> list[str]:
    """Its seeds that began, in their order."""
    return [entry for entry in tools.log if entry.startswith("seed")]
