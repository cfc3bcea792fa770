"""Verbs over several participants: resume in order, retire in order, renew all."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gym_servers.coordination.client import ParticipantClient, Unreachable
from gym_servers.coordination.order import RESUME, RETIRE, staged
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError


async def resume_all(
    clients: Sequence[ParticipantClient], checkpoint_id: str, deadline_ts: float, cell_attempt: int | None = None
) -> dict[str, str]:
    """Resume every participant, whatever becomes of the others; name -> what went wrong."""
    problems: dict[str, str] = {}
    request = m.ResumeRequest(checkpoint_id=checkpoint_id, deadline_ts=deadline_ts, cell_attempt=cell_attempt)

    async def resume(client: ParticipantClient) -> None:
        try:
            await client.call("resume", request, m.PhaseReply)
        except (ProtocolError, Unreachable) as error:
            problems[client.name] = str(error)

    for stage in staged(clients, RESUME):
        await asyncio.gather(*(resume(client) for client in stage))
    return problems


async def retire_all(clients: Sequence[ParticipantClient], verb_id: str, keys: list[str], deadline_ts: float) -> None:
    """Retire episodes everywhere, owners first. Raises ProtocolError, Unreachable."""
    request = m.RetireRequest(checkpoint_id=verb_id, deadline_ts=deadline_ts, episode_ids=keys)
    for stage in staged(clients, RETIRE):
        await asyncio.gather(*(client.call("retire", request, m.RetireReply) for client in stage))


async def forget_all(
    clients: Sequence[ParticipantClient], verb_id: str, rollouts: list[str], deadline_ts: float
) -> None:
    """Forget finished rollouts everywhere, the driver last: until then it asks again. Raises as retire_all."""
    request = m.ForgetRequest(checkpoint_id=verb_id, deadline_ts=deadline_ts, rollout_ids=rollouts)
    for stage in staged(clients, RETIRE):
        await asyncio.gather(*(client.call("forget", request, m.ForgetReply) for client in stage))
