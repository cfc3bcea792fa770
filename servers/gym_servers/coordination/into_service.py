"""Putting a cell into service: what its record says to restore is restored by all of its fresh processes, or by
none; then they are resumed under the cell's attempt."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from gym_servers.coordination.cell_host import CellSettings
from gym_servers.coordination.client import ParticipantClient
from gym_servers.coordination.code import code_mismatch
from gym_servers.coordination.continuation import Continuation, continuation
from gym_servers.coordination.install import RecordsRefused, check_source, open_all, restore_all, restore_seconds
from gym_servers.coordination.record import CellRecord, Choice
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.messages import Status
from gym_servers.storage.cells import publication_of
from gym_servers.storage.manifest import Publication
from gym_servers.storage.store import ObjectStore, StorageError

TEND_SECONDS = 30.0

OpenStore = Callable[[str], ObjectStore]


class CodeMismatch(Exception):
    """The checkpoint was written by other code than runs now, and nobody has allowed that."""


async def put_into_service(
    record: CellRecord,
    settings: CellSettings,
    clients: Sequence[ParticipantClient],
    statuses: Mapping[str, Status],
    open_store: OpenStore,
    wall: Callable[[], float],
    *,
    restore: bool,
) -> Continuation | None:
    """What the cell continues, None where nobody can tell. `clients` are the pinned processes, `statuses` what they
    said last; without `restore` they were restored before, or are to begin from the input.

    Raises CodeMismatch, RecordsRefused, InstallRefused, InstallFailed, Unreachable, ProtocolError, StorageError.
    """
    verb_id = f"cell{settings.cell}-attempt{record.attempt}-{secrets.token_hex(4)}"
    sessions = {name: pin.session for name, pin in record.pins.items()}
    grace = settings.lease_grace
    if restore and record.restore is not None:
        publication = await asyncio.to_thread(_publication, open_store, record.restore)
        kinds = {client.name: client.kind for client in clients}
        if not settings.any_code and (wrong := code_mismatch(publication, kinds, statuses)):
            raise CodeMismatch(wrong)
        await restore_all(
            clients,
            publication,
            record.restore.uri,
            verb_id,
            record.attempt,
            grace,
            wall,
            sessions,
            restore_seconds(settings.commit_timeout, record.failures),
            any_code=settings.any_code,
        )
        await open_all(clients, verb_id, record.attempt, grace, wall, sessions)
        await check_source(clients, verb_id, wall() + TEND_SECONDS)
        return continuation(publication, record.attempt)
    if not restore:
        asked_until = wall() + TEND_SECONDS
        now = await asyncio.gather(*(client.status_by(asked_until) for client in clients))
        verb_id = next((s.checkpoint_id for s in now if s.checkpoint_id is not None), verb_id)
    await open_all(clients, verb_id, record.attempt, grace, wall, sessions)
    return await _continued(record, open_store)


async def _continued(record: CellRecord, open_store: OpenStore) -> Continuation | None:
    """What a cell continues that was started from the input, or restored by a coordinator before this one; it is in
    service, whether storage still tells or not."""
    if record.restore is None:
        return continuation(None, record.attempt) if record.recoveries else None
    with suppress(RecordsRefused, StorageError, ProtocolError):
        publication = await asyncio.to_thread(_publication, open_store, record.restore)
        return continuation(publication, record.attempt)
    return None


def _publication(open_store: OpenStore, choice: Choice) -> Publication:
    """The chosen publication. Raises RecordsRefused where it is gone, or is another one by now."""
    try:
        return publication_of(open_store(choice.uri), choice.digest)
    except ProtocolError as error:
        raise RecordsRefused(error.detail) from error
