"""What each cell of a stack would continue from, for its status: also after a recovery, which may have led back to an
older checkpoint, and after a GymCheckpoint went with its data. Storage is asked once for each such change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from gym_operator.api.objects import format_time
from gym_operator.api.stack import LastCheckpoint
from gym_operator.effects.cache import Cache, Key
from gym_operator.effects.services import Services
from gym_servers.coordination.record import CellRecord
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.cells import newest_published, order_of, publication_of
from gym_servers.storage.locate import join
from gym_servers.storage.manifest import Publication
from gym_servers.storage.store import ObjectStore, StorageError

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 10.0
"""Between questions to a storage that does not answer."""


@dataclass(frozen=True)
class Cell:
    """`root` is where its checkpoints are, `published` its newest since the operator began, `told` what its status
    says."""

    record: CellRecord
    root: str
    published: LastCheckpoint | None = None
    told: LastCheckpoint | None = None

    @property
    def basis(self) -> tuple[int, str | None, str | None]:
        """What the answer rests on."""
        restore = self.record.restore
        return self.record.attempt, restore.uri if restore else None, self.published.uri if self.published else None

    def is_current(self, last: LastCheckpoint) -> bool:
        """Whether it was taken since the last recovery, or is what that continued from."""
        return last.uri is not None and (order_of(last.uri)[0] >= self.record.attempt or last.uri == self.basis[1])


@dataclass(frozen=True)
class _Known:
    """`sure`: it is so. `seen`: its GymCheckpoint is there, or should be."""

    basis: tuple[int, str | None, str | None]
    last: LastCheckpoint | None
    sure: bool
    seen: bool = True


class LastCheckpoints:
    """Of one stack. `open_store` opens a storage URI; `wake` is called when there is something new to say."""

    def __init__(
        self, services: Services, stack: Key, open_store: Callable[[str], ObjectStore], wake: Callable[[], None]
    ) -> None:
        self._cache: Cache = services.cache
        self._monotonic, self._stack, self._open_store, self._wake = services.monotonic, stack, open_store, wake
        self._known: dict[int, _Known] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._due: dict[int, float] = {}

    def close(self) -> None:
        for task in self._asking.values():
            task.cancel()

    @property
    def sure(self) -> dict[int, LastCheckpoint | None]:
        """By cell, None where it would begin from the input. A cell that is left out is as its status says."""
        return {index: known.last for index, known in self._known.items() if known.sure}

    def step(self, cells: Mapping[int, Cell], *, usable: bool) -> None:
        """Keep up with recoveries, publications, and GymCheckpoints that go. `usable`: the storage can be asked."""
        for index, cell in cells.items():
            known = self._known[index] = self._looked_after(_followed(self._known.get(index), cell))
            if (
                usable
                and not known.sure
                and index not in self._asking
                and self._monotonic() >= self._due.get(index, 0.0)
            ):
                self._asking[index] = asyncio.create_task(self._ask(index, cell))

    def _looked_after(self, known: _Known) -> _Known:
        """Where its GymCheckpoint went its data may have gone, too."""
        if known.last is None or not known.sure:
            return known
        entry = self._cache.entry(Key(self._stack.namespace, known.last.name))
        if entry is not None and any(part.uri == known.last.uri for part in entry.parts):
            return replace(known, seen=True)
        return replace(known, sure=False) if known.seen else known

    async def _ask(self, index: int, cell: Cell) -> None:
        try:
            last = await asyncio.to_thread(_in_storage, self._open_store, cell)
        except StorageError as error:
            log.info("stack %s/%s cell %d: what it would continue from: %s", *self._stack, index, error)
            self._due[index] = self._monotonic() + RETRY_SECONDS
        else:
            if self._known[index].basis == cell.basis:
                self._known[index] = _Known(cell.basis, last, sure=True, seen=False)
            self._wake()
        finally:
            del self._asking[index]


def _followed(known: _Known | None, cell: Cell) -> _Known:
    """What is known once the cell's record and its publications are taken into account."""
    if known is not None and known.basis == cell.basis:
        return known
    last = cell.published or (known.last if known is not None else cell.told)
    if last is not None and cell.is_current(last):
        return _Known(cell.basis, last, sure=True)
    nothing = cell.record.restore is None and (cell.record.attempt > 0 or last is None)
    return _Known(cell.basis, None if nothing else last, sure=nothing)


def _in_storage(open_store: Callable[[str], ObjectStore], cell: Cell) -> LastCheckpoint | None:
    """What the cell would continue from. Blocks. Raises StorageError."""
    store, attempt, restore = open_store(cell.root), cell.record.attempt, cell.record.restore
    if (own := newest_published(store, since=attempt)) is not None:
        return _last(own[1], join(cell.root, own[0]), own[2])
    if restore is None:
        return None
    try:
        return _last(publication_of(open_store(restore.uri), restore.digest), restore.uri, restore.digest)
    except ProtocolError:
        pass  # it was removed since
    # Newer ones than that were passed over, or are of a history that was left.
    older = newest_published(store, below=order_of(restore.uri) if restore.uri.startswith(cell.root) else None)
    return None if older is None else _last(older[1], join(cell.root, older[0]), older[2])


def _last(publication: Publication, uri: str, digest: str) -> LastCheckpoint:
    return LastCheckpoint(
        name=publication.name,
        id=publication.checkpoint_id,
        uri=uri,
        digest=digest,
        time=format_time(publication.created),
    )
