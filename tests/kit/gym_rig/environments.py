"""Environment participants alone, and an episode of two stages whose steps a test ends."""

from __future__ import annotations

import asyncio
from typing import Any

from gym_rig.alone import R0
from gym_rig.verbs import checkpoint, prepare, restore, resume, start
from gym_rig.virtual import now, settle
from gym_servers.participants.environment import EnvironmentParticipant, Live, Unclaimed
from gym_servers.participants.gate import Gate
from gym_servers.participants.limits import Limits
from gym_servers.protocol.identity import Episode


class Turn:
    """A body of two stages whose steps a test ends: `replay`, then `wait`."""

    def __init__(self, participant: EnvironmentParticipant) -> None:
        self.participant = participant
        self.log: list[str] = []
        self.ends = {"replay": asyncio.Event(), "wait": asyncio.Event()}
        self.error: Exception | None = None
        self.cleanup: asyncio.Event | None = None

    async def __call__(self, live: Live, restored: Unclaimed | None) -> Any:
        state = dict(restored.state) if restored else {}
        stages = ["replay", "wait"]
        try:
            async with self.participant.slot(live):
                return await self._stages(live, restored, stages, state)
        finally:
            if self.cleanup is not None:
                live.cleaning = True
                self.log.append("cleanup")
                await asyncio.shield(asyncio.ensure_future(self.cleanup.wait()))
                self.log.append("cleaned")

    async def _stages(
        self, live: Live, restored: Unclaimed | None, stages: list[str], state: dict[str, Any]
    ) -> dict[str, Any]:
        for stage in stages[stages.index(restored.stage) if restored else 0 :]:
            state = {**state, **await self._stage(live, stage, state)}
        return {"result": state}

    async def _stage(self, live: Live, stage: str, state: dict[str, Any]) -> dict[str, Any]:
        async def step() -> dict[str, Any]:
            self.log.append(stage)
            await self.ends[stage].wait()
            if self.error is not None:
                raise self.error
            return {stage: len(self.log)}

        return await self.participant.stage(
            live, stage, replay=stage == "replay", snapshot=lambda: dict(state), step=step
        )


def environment(*, started: bool = True, boundaries: bool = True, **limits: Any) -> EnvironmentParticipant:
    """In service, unless it is to be restored first; `limits` are those of `Limits`."""
    participant = EnvironmentParticipant(Gate(clock=now), boundaries=boundaries, limits=Limits(**limits))
    if started:
        start(participant)
    return participant


def run(participant: EnvironmentParticipant, episode: Episode, body: Any, digest: str = "d") -> asyncio.Task[Any]:
    """`digest` stands for the task of the episode."""
    return asyncio.create_task(participant.run(episode, digest, body))


async def at_stage(participant: EnvironmentParticipant, stage: str) -> tuple[Turn, asyncio.Task[Any]]:
    """The first attempt of `r`, in this stage."""
    turn = Turn(participant)
    running = run(participant, R0, turn)
    await settle()
    if stage == "wait":
        turn.ends["replay"].set()
        await settle()
    return turn, running


async def parked(stage: str = "replay") -> dict[str, bytes]:
    """The records of an environment with one episode at a stage."""
    participant = environment()
    turn, running = await at_stage(participant, "replay")
    if stage == "wait":
        prepare(participant)
        resume(participant)
    records = await checkpoint(participant)
    running.cancel()
    turn.log.clear()
    return records


def restored(records: dict[str, bytes], *keys: str, cell_attempt: int = 1) -> EnvironmentParticipant:
    participant = environment(started=False)
    restore(participant, records, *keys, cell_attempt=cell_attempt)
    return participant
