"""Answers an inventory: freezes the tokens of its calls, stages them durably, and gives the receipt."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from gym_servers.capture.inventory import Inventory, Receipt, ReceiptCall
from gym_servers.capture.staging import digest, pack
from gym_servers.capture.tokens import Frozen
from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.leftovers import CUTS
from gym_servers.storage.store import ObjectStore, StorageError
from gym_servers.unattended import unattended
from gym_servers.worker.streams import Streams

log = logging.getLogger("gym_servers")

REMEMBERED = 64  # receipts, for inventories that are sent again


class Cutter:
    """Cuts the streams of one engine process. `worker` names it; `store` is where checkpoints are."""

    def __init__(self, streams: Streams, store: ObjectStore, worker: str) -> None:
        self._streams, self._store, self._worker = streams, store, worker
        self._receipts: OrderedDict[str, asyncio.Task[Receipt]] = OrderedDict()
        self._digests: OrderedDict[tuple[str, str], str] = OrderedDict()

    async def cut(self, inventory: Inventory) -> Receipt:
        """The receipt; the same inventory gets the same one again.

        Raises `checkpoint_conflict` for another inventory of a cell under a checkpoint that was cut already, and
        `checkpoint_error` where the tokens cannot be made durable."""
        # The cells of a stack take one checkpoint under one id, each with its own calls.
        checkpoint = inventory.folder, inventory.checkpoint_id
        known = self._digests.get(checkpoint)
        if known is not None and known != inventory.digest:
            raise ProtocolError("checkpoint_conflict", "this checkpoint was cut by another inventory")
        task = self._receipts.get(inventory.digest)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            # Frozen before anything is awaited: the cut is one moment for all calls.
            frozen, calls = self._frozen(inventory)
            task = unattended(self._stage(inventory, frozen, calls))
            self._receipts[inventory.digest] = task
            self._digests[checkpoint] = inventory.digest
            while len(self._receipts) > REMEMBERED:
                self._receipts.popitem(last=False)
                self._digests.popitem(last=False)
        return await asyncio.shield(task)

    def _frozen(self, inventory: Inventory) -> tuple[dict[str, Frozen], list[ReceiptCall]]:
        kept: dict[str, Frozen] = {}
        calls = []
        for call in inventory.calls:
            stream = self._streams.find(call.ticket)
            if stream is None:
                calls.append(ReceiptCall(ticket=call.ticket, state="unknown"))
                continue
            try:
                tokens = stream.frozen()
            except ValueError:
                calls.append(ReceiptCall(ticket=call.ticket, state="failed"))
                continue
            if tokens.ids or tokens.finish is not None:
                kept[call.ticket] = tokens
                calls.append(ReceiptCall(ticket=call.ticket, state="kept", tokens=len(tokens.ids)))
            else:
                calls.append(ReceiptCall(ticket=call.ticket, state="empty"))
        return kept, calls

    async def _stage(self, inventory: Inventory, kept: dict[str, Frozen], calls: list[ReceiptCall]) -> Receipt:
        def write() -> Receipt:
            data = pack(kept, {call.ticket: call.state for call in calls if call.ticket not in kept})
            key = f"{inventory.folder}/{CUTS}/{inventory.checkpoint_id}/{sha256(data)}"
            self._store.create(key, data)
            digests = {ticket: digest(tokens) for ticket, tokens in kept.items()}
            return Receipt(
                checkpoint_id=inventory.checkpoint_id,
                inventory_digest=inventory.digest,
                worker=self._worker,
                key=key,
                calls=[call.model_copy(update={"sha256": digests.get(call.ticket, "")}) for call in calls],
            )

        try:
            return await asyncio.to_thread(write)  # the engine's own loop goes on meanwhile
        except StorageError as error:
            log.warning("a generation cut could not be staged: %s", error)
            raise ProtocolError("checkpoint_error", f"the tokens cannot be staged: {error}") from error
