"""Which checkpoint a cell's next attempt continues from."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from gym_servers.coordination.cell_host import CellSettings
from gym_servers.coordination.record import CellRecord, Choice, Stage
from gym_servers.coordination.settle import choose
from gym_servers.storage.manifest import Publication
from gym_servers.storage.store import ObjectStore


async def choice_of(
    record: CellRecord,
    settings: CellSettings,
    open_store: Callable[[str], ObjectStore],
    passed_over: Callable[[str], Awaitable[None]],
    now: float,
    *,
    planned: bool,
) -> Choice | None:
    """The next attempt of a recovery that is under way continues from the same; else from the newest that verifies,
    unless it is too old `now` (Unix seconds); None for the input. `passed_over` is told of those that are not taken.
    Raises StorageError."""
    chosen = record.chosen
    again = record.stage not in (Stage.RUNNING, Stage.STOPPED)
    at_the_wish = again and chosen is not None and record.restore == chosen.choice
    # The policy is about deaths: a cell that was stopped to go on does go on, and so does one with a wish.
    asked_for = planned or record.stage is Stage.STOPPED or at_the_wish or (again and record.asked_for)
    oldest = settings.max_checkpoint_age
    if settings.policy == "Restart" and not asked_for:
        return None
    if again and (record.restore is None or record.restore.uri not in record.refused):
        return record.restore
    said: list[str] = []
    outlived: list[str] = []

    def too_old(publication: Publication) -> bool:
        if oldest is None or asked_for or (age := now - publication.created) <= oldest:
            return False
        outlived.append(
            f"checkpoint {publication.name} is {age:.0f} s old, spec.recovery.maxCheckpointAge {oldest:.0f} s"
        )
        return True

    newest = await asyncio.to_thread(
        choose,
        open_store(settings.root),
        open_store,
        settings.stack_uid,
        record.refused,
        said.append,
        chosen.attempt if chosen is not None else 0,
        too_old,
    )
    for message in (*said, *outlived):
        await passed_over(message)
    if outlived:
        return None
    # Until the cell has one of its own again, it continues from what was asked for and from nothing newer.
    return newest or (chosen.choice if chosen is not None else None)


def people_decide(record: CellRecord, settings: CellSettings, planned: bool) -> bool:
    """Whether the cell is to wait, with fresh processes, for somebody who says what comes of a death."""
    if settings.policy != "Manual" or planned or record.failures < 0:  # a suspension has just ended
        return False
    return record.stage in (Stage.RUNNING, Stage.STOPPED) or not record.asked_for
