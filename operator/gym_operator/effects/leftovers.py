"""Removes what a stack's checkpoints have left in its bucket and nobody can use any more: records of those that were
given up, tokens that were staged for a cut, and last checkpoints that the operator took of its own accord.

Nothing is looked for again and again. Whatever is begun shows in a cell's record and is looked after when it is over;
what operators before this one have left is listed once. Of staged tokens there are never many: they are listed anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from gym_operator.effects.kube import KubeError
from gym_operator.effects.unasked import Unasked
from gym_operator.rules.disposal import LONGEST_WRITE_SECONDS, SAFE_SECONDS
from gym_servers.coordination.record import CellRecord
from gym_servers.storage import leftovers
from gym_servers.storage.cells import CHECKPOINTS
from gym_servers.storage.locate import join
from gym_servers.storage.ownership import Owner, check_deletable
from gym_servers.storage.removal import NotOurs
from gym_servers.storage.store import ObjectStore, StorageError

log = logging.getLogger(__name__)

SWEEP_SECONDS: Final = 600.0
"""Between sweeps, and before the first: an operator that begins has better to do."""


@dataclass
class _Cell:
    """What is known of a cell's leftovers. `due`: from when on (Unix seconds) a folder below its checkpoints may be
    cleared; `staged`: since when tokens for a checkpoint were seen."""

    root: str
    open_folder: str = ""
    open_id: str = ""
    listed: bool = False
    due: dict[str, float] = field(default_factory=dict)
    staged: dict[str, float] = field(default_factory=dict)


class Leftovers:
    """Of one stack, whose folder `owner` has claimed. `open_store` opens a storage URI."""

    def __init__(
        self,
        open_store: Callable[[str], ObjectStore],
        owner: Owner,
        wall: Callable[[], float],
        unasked: Unasked,
    ) -> None:
        self._open_store, self._owner, self._wall = open_store, owner, wall
        self._unasked = unasked
        self._cells: dict[int, _Cell] = {}
        self._next = wall() + SWEEP_SECONDS
        self._sweep: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Leave what is under way to the next operator."""
        if self._sweep is not None:
            self._sweep.cancel()

    def step(self, cells: Mapping[int, tuple[CellRecord, str]], root: str, *, usable: bool) -> None:
        """Note what is open in each cell, given with the place of its checkpoints; sweep when that is due and the
        storage is `usable`. `root` is the stack's folder."""
        for index, (record, place) in cells.items():
            self._follow(index, record, place)
            self._unasked.follow(index, record, place)
        if usable and self._wall() >= self._next and (self._sweep is None or self._sweep.done()):
            self._next = self._wall() + SWEEP_SECONDS
            self._sweep = asyncio.create_task(self._run(root))

    def _follow(self, index: int, record: CellRecord, place: str) -> None:
        cell = self._cells.get(index)
        if cell is None or cell.root != place:
            cell = self._cells[index] = _Cell(place)
        folder = record.open.uri.rsplit("/", 1)[-1] if record.open is not None else ""
        if cell.open_folder and folder != cell.open_folder:
            cell.due[cell.open_folder] = self._wall() + LONGEST_WRITE_SECONDS
        cell.open_folder, cell.open_id = folder, record.open.checkpoint_id if record.open is not None else ""

    async def _run(self, root: str) -> None:
        removed = 0
        try:
            await asyncio.to_thread(lambda: check_deletable(self._open_store(root), self._owner))
            for cell in self._cells.values():
                removed += await self._staged(cell) + await self._given_up(cell)
            removed += await self._unasked.sweep()
        except (KubeError, StorageError, NotOurs, ValueError) as error:
            log.info("leftovers of stack %s/%s: %s", self._owner.namespace, self._owner.name, error)
        except Exception:
            log.exception("leftovers of stack %s/%s cannot be removed", self._owner.namespace, self._owner.name)
        if removed:
            log.info("leftovers of stack %s/%s: %d objects", self._owner.namespace, self._owner.name, removed)

    async def _staged(self, cell: _Cell) -> int:
        """Tokens are read while their checkpoint is prepared: once it is over nobody wants them."""
        store, now, removed = self._open_store(cell.root), self._wall(), 0
        over = await asyncio.to_thread(leftovers.staged, store) - {cell.open_id}
        cell.staged = {checkpoint_id: cell.staged.get(checkpoint_id, now) for checkpoint_id in over}
        for checkpoint_id, since in cell.staged.items():
            if now - since >= SAFE_SECONDS and checkpoint_id != cell.open_id:
                removed += await asyncio.to_thread(leftovers.remove_staged, store, checkpoint_id)
        return removed

    async def _given_up(self, cell: _Cell) -> int:
        checkpoints, stack_uid, removed = self._open_store(join(cell.root, CHECKPOINTS)), self._owner.stack_uid, 0
        if not cell.listed:
            for folder, grave in (await asyncio.to_thread(leftovers.given_up, checkpoints, stack_uid)).items():
                cell.due.setdefault(folder, grave.created + LONGEST_WRITE_SECONDS)
            cell.listed = True
        for folder in [folder for folder, due in cell.due.items() if self._wall() >= due]:
            removed += await asyncio.to_thread(leftovers.remove_given_up, checkpoints, folder, stack_uid)
            del cell.due[folder]
        return removed
