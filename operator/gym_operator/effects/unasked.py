"""Removes last checkpoints that the operator took of its own accord (`rules.unasked`), once their cell has had a
newer one for an hour.

What is removed is claimed first, as a GymCheckpoint claims its own (`storage.removal`), and goes at the next sweep if
nobody needs it then either. Whoever dies between any two writes, the next operator finds it by its claim and goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from gym_operator.api.event_reasons import Afterwards
from gym_operator.effects.cache import Key
from gym_operator.effects.events import Subject
from gym_operator.effects.kube import STACKS, Body, NotFound
from gym_operator.effects.services import Services
from gym_operator.rules import unasked as rules
from gym_operator.rules.unasked import Successor
from gym_servers.coordination.record import CellRecord
from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.cells import CHECKPOINTS, PROPOSAL, publication_of, verify
from gym_servers.storage.locate import join
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.removal import HOLDER, Claim, hold, remove
from gym_servers.storage.store import ObjectConflict, ObjectMissing, ObjectStore

log = logging.getLogger(__name__)


@dataclass
class _Found:
    """One that was taken. `since`: Unix seconds from when on its cell had a newer one; `claimed`: by this operator,
    in a sweep before."""

    since: float | None = None
    claimed: bool = False


@dataclass
class _Cell:
    """`place` is where its checkpoints are, `open` the directory of the one being taken, `listed`: what operators
    before this one took is known."""

    place: str
    open: str = ""
    listed: bool = False
    found: dict[str, _Found] = field(default_factory=dict)


class Unasked:
    """Of one stack. `open_store` opens a storage URI."""

    def __init__(self, services: Services, stack: Subject, open_store: Callable[[str], ObjectStore]) -> None:
        self._kube, self._cache, self._events, self._wall = (
            services.kube,
            services.cache,
            services.events,
            services.wall,
        )
        self._stack, self._open_store = stack, open_store
        self._cells: dict[int, _Cell] = {}

    @property
    def _holder(self) -> str:
        """In whose name it is claimed: the same for each operator, and no GymCheckpoint's UID."""
        return f"stack-{self._stack.uid}"

    def follow(self, index: int, record: CellRecord, root: str) -> None:
        """Note what a cell, whose folder is `root`, has open."""
        cell, place = self._cells.get(index), join(root, CHECKPOINTS)
        if cell is None or cell.place != place:
            cell = self._cells[index] = _Cell(place)
        cell.open = record.open.uri.rsplit("/", 1)[-1] if record.open is not None else ""
        if rules.may_be_unasked(cell.open):
            cell.found.setdefault(cell.open, _Found())

    async def sweep(self) -> int:
        """Claim and remove what may go; how many objects went. Raises KubeError, StorageError, NotOurs, and
        ValueError where it is not known what somebody needs."""
        removed = 0
        for index, cell in list(self._cells.items()):
            if not cell.listed:
                keys = await asyncio.to_thread(self._open_store(cell.place).list, "")
                for directory in {key.partition("/")[0] for key in keys}:
                    if rules.may_be_unasked(directory):
                        cell.found.setdefault(directory, _Found())
                cell.listed = True
            for directory in list(cell.found):
                removed += await self._see_to(index, cell, directory)
        return removed

    async def _see_to(self, index: int, cell: _Cell, directory: str) -> int:
        found, uri, now = cell.found[directory], join(cell.place, directory), self._wall()
        body = await self._asked()
        successor = rules.successor(body, index, uri) if body is not None else None
        if body is None or successor is None or directory == cell.open:
            cell.found[directory] = _Found()
            return 0
        found.since = min(successor.since, now if found.since is None else found.since)
        if now - found.since < rules.SUPERSEDED_SECONDS:
            return 0
        if uri in self._needed(body):
            found.claimed = False
            return 0
        claim = await asyncio.to_thread(self._proof, index, cell.place, directory)
        if claim is None:
            del cell.found[directory]  # gone, or none of those, or somebody else's
            return 0
        if not await asyncio.to_thread(self._is_whole, successor):
            found.since, found.claimed = now, False
            return 0
        if not found.claimed:
            found.claimed = await asyncio.to_thread(self._claim, uri)
            return 0  # whoever began to need it meanwhile has said so by the next sweep
        # A thread cannot be called back: an operator that ends leaves it, and the next one finds what it has done.
        removed = await asyncio.to_thread(remove, self._open_store(cell.place), directory, claim)
        del cell.found[directory]
        self._say(uri, removed.objects)
        return removed.objects

    async def _asked(self) -> Body | None:
        """The stack as the API server has it: whoever lags behind must not remove anything. None where it is not
        there, or where not all that there is in the cluster is known."""
        if not self._cache.sees_all:
            return None
        with suppress(NotFound):
            body = await self._kube.get(STACKS, self._stack.namespace, self._stack.name)
            if body["metadata"]["uid"] == self._stack.uid and not body["metadata"].get("deletionTimestamp"):
                return body
        return None

    def _needed(self, body: Body) -> set[str]:
        cache, ours = self._cache, Key(self._stack.namespace, self._stack.name)
        others = [each for key, each in cache.stacks.items() if key != ours]
        restores, checkpoints = cache.restores.values(), list(cache.checkpoints.values())
        return rules.needed(body, others, cache.entries(), checkpoints, restores)

    def _proof(self, index: int, place: str, directory: str) -> Claim | None:
        """What proves that it is such a checkpoint, and nobody else's; None where it is not. Blocks. Raises
        StorageError."""
        store = self._open_store(join(place, directory))
        present = {key.removeprefix(f"{directory}/") for key in self._open_store(place).list(directory)}
        holder = self._holder_of(store)
        if not present or holder not in (None, self._holder):
            return None
        begun = CHECKPOINT not in present  # to be removed, by whoever claimed it
        if begun and holder is None:
            return None
        if begun and present == {HOLDER}:
            return Claim(self._stack.uid, directory.split("-", 2)[2], "", self._holder)
        try:
            data = store.get(PROPOSAL if begun else CHECKPOINT)
            publication = read_publication(data)
        except (ObjectMissing, ProtocolError):
            return None
        if not rules.is_unasked(publication, directory, self._stack.uid, index):
            return None
        return Claim(self._stack.uid, publication.checkpoint_id, sha256(data), self._holder)

    def _holder_of(self, store: ObjectStore) -> str | None:
        """Who has claimed it; None where nobody has. Blocks. Raises StorageError."""
        try:
            return str(json.loads(store.get(HOLDER))["holder"])
        except ObjectMissing:
            return None
        except (ValueError, KeyError, TypeError):
            return "somebody"

    def _is_whole(self, successor: Successor) -> bool:
        """Whether the cell could continue from what it is said to. Blocks. Raises StorageError."""
        store = self._open_store(successor.uri)
        try:
            publication = publication_of(store, successor.digest)
            verify(store, publication.members, publication.checkpoint_id)
        except ProtocolError as error:
            log.warning("older checkpoints stay: %s: %s", successor.uri, error.detail)
            return False
        return True

    def _claim(self, uri: str) -> bool:
        """Whether it is claimed now. Blocks. Raises StorageError."""
        try:
            hold(self._open_store(uri), self._holder)
        except ObjectConflict:
            return False
        return True

    def _say(self, uri: str, objects: int) -> None:
        message = (
            f"{objects} objects of a last checkpoint at {uri} were removed: its cell has had a newer one for long"
        )
        self._events.say(self._stack, "Normal", Afterwards.DATA_REMOVED, message)
