"""Putting a fresh cell into service: restore everything or nothing, then resume under the cell's attempt."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from gym_servers.coordination.client import ParticipantClient, Unreachable
from gym_servers.coordination.verbs import leased, resume_all, retire_all
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.manifest import Publication

log = logging.getLogger("gym_servers")

INSTALL_SECONDS = 120.0  # for opening a cell; a restore has it at least
MOST_DOUBLINGS = 5


class RecordsRefused(Exception):
    """A participant does not take the records: this checkpoint cannot be restored here."""


class InstallFailed(Exception):
    """A death, timeout or expiry: the same checkpoint can be tried again with fresh processes."""


class InstallRefused(InstallFailed):
    """A participant answered that it could not build what its records describe: once may be chance."""


def restore_seconds(commit_timeout: float, failures: int) -> float:
    """How long a restore may take: more than its records could take to be written. Again twice as long for each
    recovery in a row, since a checkpoint may have been given more time than its stack gives."""
    doublings = min(max(failures - 1, 0), MOST_DOUBLINGS)
    return max(INSTALL_SECONDS, 2 * commit_timeout) * float(2**doublings)


async def restore_all(
    clients: Sequence[ParticipantClient],
    publication: Publication,
    uri: str,
    restore_id: str,
    cell_attempt: int,
    grace: float,
    wall: Callable[[], float],
    sessions: Mapping[str, str],
    seconds: float,
    *,
    any_code: bool = False,
) -> None:
    """Restore all participants at once, in so many `seconds`, then retire what the driver's output is ahead of.
    `sessions`: name -> the process that is meant; `any_code`: it is to try records of other code too.

    Raises RecordsRefused, InstallRefused, or InstallFailed.
    """
    digests = {(member.kind, member.instance): member.manifest_digest for member in publication.members}
    missing = [c.name for c in clients if (c.kind, c.name) not in digests]
    if missing:
        raise RecordsRefused(f"the checkpoint has no records of {', '.join(missing)}")
    deadline = wall() + seconds
    # Those that are done early wait for the last one: their leases must not run out meanwhile.
    async with leased(lambda: clients, restore_id, grace):
        await _restore(clients, publication, uri, restore_id, cell_attempt, digests, sessions, deadline, any_code)
        await _retire_ahead(clients, restore_id, deadline)


async def _restore(
    clients: Sequence[ParticipantClient],
    publication: Publication,
    uri: str,
    restore_id: str,
    cell_attempt: int,
    digests: Mapping[tuple[str, str], str],
    sessions: Mapping[str, str],
    deadline: float,
    any_code: bool,
) -> None:
    origin = m.Origin(
        checkpoint_id=publication.checkpoint_id,
        name=publication.name,
        labels=publication.labels,
        driver_state=publication.driver_state,
    )
    results = await asyncio.gather(
        *(
            client.call(
                "restore",
                m.RestoreRequest(
                    checkpoint_id=restore_id,
                    deadline_ts=deadline,
                    checkpoint_dir=uri,
                    episode_ids=publication.episodes,
                    cell_attempt=cell_attempt,
                    restarts=publication.discontinued,
                    manifest_digest=digests[client.kind, client.name],
                    session=sessions.get(client.name),
                    origin=origin if client.kind == "environment" else None,
                    any_code=any_code,
                ),
                m.RestoreReply,
            )
            for client in clients
        ),
        return_exceptions=True,
    )
    refused = [e for e in results if isinstance(e, ProtocolError) and e.code == "invalid_checkpoint_state"]
    if refused:
        raise RecordsRefused("; ".join(e.detail for e in refused))
    unable = [e for e in results if isinstance(e, ProtocolError) and e.code == "install_failed"]
    if unable:
        raise InstallRefused("; ".join(e.detail for e in unable))
    for error in results:
        if isinstance(error, ProtocolError | Unreachable):
            raise InstallFailed(str(error)) from error
        if isinstance(error, BaseException):
            raise error


async def _retire_ahead(clients: Sequence[ParticipantClient], restore_id: str, deadline: float) -> None:
    """The output may be ahead of the checkpoint: a durable row stands, its restored episode is retired."""
    try:
        drivers = [client for client in clients if client.kind == "collection"]
        statuses = await asyncio.gather(*(driver.status_by(deadline) for driver in drivers))
        keys = [key for status in statuses for key in status.to_retire]
        if keys:
            await retire_all(clients, restore_id, keys, deadline)
    except ProtocolError as error:
        # They are fenced off in any case, and what could not be freed is asked for again in service: a recovery more
        # would meet the same.
        log.warning("what the output is ahead of is still to be retired: %s", error)
    except Unreachable as error:
        raise InstallFailed(str(error)) from error


async def open_all(
    clients: Sequence[ParticipantClient],
    verb_id: str,
    cell_attempt: int,
    grace: float,
    wall: Callable[[], float],
    sessions: Mapping[str, str],
) -> None:
    """Resume every participant under the cell's attempt. Raises InstallFailed."""
    # Whoever is resumed last waits for the others with its lease running; who is open already refuses a renewal.
    async with leased(lambda: clients, verb_id, grace):
        problems = await resume_all(clients, verb_id, wall() + INSTALL_SECONDS, cell_attempt, sessions)
    if problems:
        raise InstallFailed("; ".join(problems.values()))


async def check_source(clients: Sequence[ParticipantClient], restore_id: str, deadline_ts: float) -> None:
    """Every participant in service comes from this restore. Raises InstallFailed naming one that does not."""
    try:
        statuses = await asyncio.gather(*(client.status_by(deadline_ts) for client in clients))
    except (ProtocolError, Unreachable) as error:
        raise InstallFailed(str(error)) from error
    others = [status.instance for status in statuses if status.restored_from != restore_id]
    if others:
        raise InstallFailed(f"{', '.join(others)} did not keep what was restored")
