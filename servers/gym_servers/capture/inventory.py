"""What a model server and the engine's side say to each other, most of it about a generation cut.

An inventory names every call in progress, and a digest over all of it. A receipt answers one inventory: it says of
each of its calls, once, what became of it. Anything else is no receipt for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from gym_servers.protocol.digests import digest_of
from gym_servers.protocol.messages import CaptureKey, CheckpointId

PATH = "/ng-control/v1/generation-cut"
ATTEMPT_PATH = "/ng-control/v1/engine-attempt"
VERSION_PATH = "/ng-control/v1/weight-version"
MOST_CALLS = 100_000

MODEL_CALL_ID = r"^[ -~]{0,240}$"
"""Where a call is in its episode: it goes along in headers, and in inventories, of which a wrong one spoils all."""

Ticket = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9-]{1,64}$")]


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


Folder = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}/cell-[0-9]{1,6}$")]


class EngineAttempt(_Message):
    """From now on only this attempt of a cell, or a later one, generates."""

    folder: Folder
    attempt: int = Field(ge=0, le=999_999_999)


class WeightVersion(_Message):
    """The version of the engine's weights, from now on."""

    version: Annotated[str, StringConstraints(min_length=1, max_length=256)]


class InventoryCall(_Message):
    """A call in progress. `ticket` names its stream at the engine; `model_call_id` is for people."""

    ticket: Ticket
    episode: CaptureKey
    model_call_id: Annotated[str, StringConstraints(pattern=MODEL_CALL_ID)]


class Inventory(_Message):
    """Every call that a cut is to cover. `folder`: of the cell, below the storage that both sides know. `digest` is
    over all the rest."""

    checkpoint_id: CheckpointId
    folder: Folder
    calls: list[InventoryCall] = Field(max_length=MOST_CALLS)
    digest: str

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.digest != _digest(self.checkpoint_id, self.folder, self.calls):
            raise ValueError("the digest is of another inventory")
        if len({call.ticket for call in self.calls}) != len(self.calls):
            raise ValueError("a ticket is named twice")
        return self


def inventory_of(checkpoint_id: str, folder: str, calls: Iterable[InventoryCall]) -> Inventory:
    """Raises ValidationError where a ticket is named twice."""
    listed = sorted(calls, key=lambda call: call.ticket)
    digest = _digest(checkpoint_id, folder, listed)
    return Inventory(checkpoint_id=checkpoint_id, folder=folder, calls=listed, digest=digest)


def _digest(checkpoint_id: str, folder: str, calls: list[InventoryCall]) -> str:
    return digest_of([checkpoint_id, folder, [[call.ticket, call.episode, call.model_call_id] for call in calls]])


class ReceiptCall(_Message):
    """kept: its tokens are staged, `tokens` of them; `sha256` is of all that is staged of it. empty: it has generated
    nothing. unknown: the engine has no such stream. failed: its tokens could not be frozen."""

    ticket: str
    state: Literal["kept", "empty", "unknown", "failed"]
    tokens: int = 0
    sha256: str = ""


class Receipt(_Message):
    """`key`: where the tokens of the kept calls are staged, with what became of the others, below the storage that
    both sides know."""

    checkpoint_id: str
    inventory_digest: str
    worker: str
    key: str
    calls: list[ReceiptCall]


class ReceiptRefused(ValueError):
    """A receipt that does not answer the inventory it was given for."""


def check_receipt(inventory: Inventory, receipt: Receipt) -> None:
    """Raises ReceiptRefused for a receipt of another inventory, or one that leaves a call out or names one twice."""
    if (receipt.checkpoint_id, receipt.inventory_digest) != (inventory.checkpoint_id, inventory.digest):
        raise ReceiptRefused("the receipt is for another inventory")
    named = Counter(call.ticket for call in receipt.calls)
    wanted = Counter(call.ticket for call in inventory.calls)
    if named != wanted:
        missing, extra = sorted(wanted - named), sorted(named - wanted)
        raise ReceiptRefused(f"the receipt does not cover each call once: {len(missing)} missing, {len(extra)} extra")
