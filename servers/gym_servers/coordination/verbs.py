"""Verbs over several participants: resume in order, retire in order, renew all."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from gym_servers.coordination.client import ParticipantClient, Unreachable
from gym_servers.coordination.order import OWNER, RESUME, RETIRE, staged
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError

T = TypeVar("T")
DISMISS_SECONDS = 0.5  # a recovery waits for the end of processes, not for what they are told before


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
    clients: Sequence[ParticipantClient], verb_id: str, rollouts: list[str], deadline_ts: float, asker: str = ""
) -> None:
    """Forget finished rollouts everywhere, whoever asks for it last: until then it asks again. That is the driver, or
    the environment for one outside of the stack. Raises as retire_all."""
    request = m.ForgetRequest(checkpoint_id=verb_id, deadline_ts=deadline_ts, rollout_ids=rollouts)
    others = staged([client for client in clients if client.name != asker], RETIRE)
    for stage in (*others, [client for client in clients if client.name == asker]):
        await asyncio.gather(*(client.call("forget", request, m.ForgetReply) for client in stage))


async def pass_on(clients: Sequence[ParticipantClient], statuses: Iterable[m.Status], deadline_ts: float) -> None:
    """Carry out what the driver asks for in its status. What gets no answer now its next one asks for again."""
    said = list(statuses)
    # Again after a restore: its driver may only now know what its output held already.
    ahead = [key for status in said for key in status.to_retire]
    if ahead:
        with suppress(ProtocolError, Unreachable):
            await retire_all(clients, f"retire-{secrets.token_hex(4)}", ahead, deadline_ts)
    for status in said:
        if status.to_forget:
            verb_id = f"forget-{secrets.token_hex(4)}"
            with suppress(ProtocolError, Unreachable):
                await forget_all(clients, verb_id, status.to_forget, deadline_ts, status.instance)


async def dismiss(client: ParticipantClient, session: str) -> None:
    """Tell a process that no checkpoint of it comes any more. Whether it hears that only decides how soon it ends."""
    request = m.EndRequest(checkpoint_id="end", deadline_ts=client.wall() + DISMISS_SECONDS, session=session)
    with suppress(ProtocolError, Unreachable, TimeoutError):
        async with asyncio.timeout(DISMISS_SECONDS):
            await client.call("end", request, m.PhaseReply)
