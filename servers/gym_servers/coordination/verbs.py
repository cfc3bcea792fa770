"""Verbs over several participants: resume in order, retire in order, renew all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from gym_servers.coordination.client import ParticipantClient, Unreachable
from gym_servers.coordination.order import OWNER, RESUME, RETIRE, staged
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError

T = TypeVar("T")


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """All results, in order. Where one fails, the others are ended before its error comes out: nothing may go on
    behind a verb that was given up."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def renew(client: ParticipantClient, checkpoint_id: str, grace: float) -> None:
    """Extend one participant's lease. Raises ProtocolError where it is not open under this id any more."""
    deadline = client.wall() + min(5.0, grace / 3)
    await client.call("renew", m.RenewRequest(checkpoint_id=checkpoint_id, deadline_ts=deadline), m.RenewReply)


@asynccontextmanager
async def leased(
    clients: Callable[[], Sequence[ParticipantClient]], checkpoint_id: str, grace: float
) -> AsyncIterator[None]:
    """Renew the leases of `clients()` each third of `grace` seconds for as long as the block runs. A refusal shows
    in the verb that follows, not here."""

    async def keep() -> None:
        while True:
            await asyncio.sleep(grace / 3)
            await asyncio.gather(*(renew(c, checkpoint_id, grace) for c in clients()), return_exceptions=True)

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()


async def resume_all(
    clients: Sequence[ParticipantClient],
    checkpoint_id: str,
    deadline_ts: float,
    cell_attempt: int | None = None,
    sessions: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Resume every participant, whatever becomes of the others; name -> what went wrong. `sessions`: name -> the
    process that is meant."""
    problems: dict[str, str] = {}
    request = m.ResumeRequest(checkpoint_id=checkpoint_id, deadline_ts=deadline_ts, cell_attempt=cell_attempt)

    async def resume(client: ParticipantClient) -> None:
        try:
            meant = request.model_copy(update={"session": (sessions or {}).get(client.name)})
            await client.call("resume", meant, m.PhaseReply)
        except (ProtocolError, Unreachable) as error:
            problems[client.name] = str(error)

    for stage in staged(clients, RESUME):
        await asyncio.gather(*(resume(client) for client in stage))
    return problems


async def retire_all(clients: Sequence[ParticipantClient], verb_id: str, keys: list[str], deadline_ts: float) -> None:
    """Retire episodes everywhere, owners first. Raises ProtocolError, Unreachable."""
    for stage in staged(clients, RETIRE):
        await _retire(stage, verb_id, keys, deadline_ts)


async def retire_unclaimed(
    clients: Sequence[ParticipantClient], verb_id: str, keys: list[str], deadline_ts: float
) -> None:
    """Retire those of these restored episodes that nobody has claimed. Their owner says which they are, in the step
    in which it gives them up: a replacement comes before it and runs, or is refused. Raises as retire_all."""
    given_up: list[str] = []
    for stage in staged(clients, RETIRE):
        if stage[0].kind == OWNER:
            given_up = await _retire(stage, verb_id, keys, deadline_ts, unclaimed=True)
        elif given_up:
            await _retire(stage, verb_id, given_up, deadline_ts)


async def _retire(
    clients: Sequence[ParticipantClient],
    verb_id: str,
    keys: list[str],
    deadline_ts: float,
    *,
    unclaimed: bool = False,
) -> list[str]:
    """What was retired."""
    request = m.RetireRequest(checkpoint_id=verb_id, deadline_ts=deadline_ts, episode_ids=keys, unclaimed=unclaimed)
    replies = await asyncio.gather(*(client.call("retire", request, m.RetireReply) for client in clients))
    return sorted({key for reply in replies for key in reply.retired})


async def forget_all(
    clients: Sequence[ParticipantClient], verb_id: str, rollouts: list[str], deadline_ts: float
) -> None:
    """Forget finished rollouts everywhere, the driver last: until then it asks again. Raises as retire_all."""
    request = m.ForgetRequest(checkpoint_id=verb_id, deadline_ts=deadline_ts, rollout_ids=rollouts)
    for stage in staged(clients, RETIRE):
        await asyncio.gather(*(client.call("forget", request, m.ForgetReply) for client in stage))
