"""Asks the engine's side: to cut - an inventory goes out, a receipt and the staged tokens come back - and to stop
what an earlier attempt of this cell left behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import httpx
from pydantic import ValidationError

from gym_servers.capture.inventory import (
    ATTEMPT_PATH,
    PATH,
    InventoryCall,
    Receipt,
    ReceiptRefused,
    check_receipt,
    inventory_of,
)
from gym_servers.capture.staging import digest, unpack
from gym_servers.capture.tokens import Frozen
from gym_servers.model.engine_client import EngineClient
from gym_servers.participants.cutting import CutFailed
from gym_servers.storage.store import ObjectStore, StorageError

log = logging.getLogger("gym_servers")


class WorkerCut:
    """Cuts at an engine that runs `gym_servers.worker.middleware`. `open_store` opens the storage that both sides
    know, `folder` is the cell's below it; `bearer` gives the Authorization header."""

    def __init__(
        self, engine: EngineClient, open_store: Callable[[], ObjectStore], folder: str, bearer: Callable[[], str]
    ) -> None:
        self._engine, self._open_store, self._folder, self._bearer = engine, open_store, folder, bearer

    async def begins(self, attempt: int) -> None:
        """This attempt of the cell has begun: what is of a lower one is stopped. Where the engine is away it runs
        nothing, and each stream says the same."""
        try:
            response = await self._engine.http.post(
                self._engine.base_url + ATTEMPT_PATH,
                json={"folder": self._folder, "attempt": attempt},
                headers={"authorization": self._bearer()},
            )
            if not response.is_success:
                log.warning("the engine's side answered %s to the attempt's number", response.status_code)
        except httpx.RequestError as error:
            log.warning("the engine's side was not told of attempt %s: %s", attempt, type(error).__name__)

    async def __call__(self, checkpoint_id: str, calls: Sequence[InventoryCall]) -> Mapping[str, Frozen | None]:
        """What the engine has generated of each call, by ticket; None where it could not be cut, and nothing where it
        has generated nothing, or does not know the stream. Raises CutFailed."""
        try:
            inventory = inventory_of(checkpoint_id, self._folder, calls)
            response = await self._engine.http.post(
                self._engine.base_url + PATH,
                json=inventory.model_dump(mode="json"),
                headers={"authorization": self._bearer()},
            )
            if not response.is_success:
                raise CutFailed(f"the engine's side answered {response.status_code}")
            receipt = Receipt.model_validate_json(response.content)
            check_receipt(inventory, receipt)
            staged = await asyncio.to_thread(self._staged, receipt)
        except (httpx.RequestError, ValidationError, ReceiptRefused, StorageError, ValueError) as error:
            raise CutFailed(f"{type(error).__name__}: {error}"[:300]) from error
        found: dict[str, Frozen | None] = {}
        for call in receipt.calls:
            if call.state == "kept":
                found[call.ticket] = staged.get(call.ticket)
            elif call.state == "failed":
                found[call.ticket] = None
        return found

    def _staged(self, receipt: Receipt) -> dict[str, Frozen]:
        """Of what was staged all that is as the receipt says. Raises StorageError, ValueError."""
        receipts = {call.ticket: (call.tokens, call.sha256) for call in receipt.calls}
        staged = unpack(self._open_store().get(receipt.key))
        return {
            ticket: tokens
            for ticket, tokens in staged.items()
            if receipts.get(ticket) == (len(tokens.ids), digest(tokens))
        }
