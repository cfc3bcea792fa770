"""How a model server turns a conversation into token ids and generated ids into a message.

One implementation per engine. The model participant and the routes know only this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gym_servers.capture.ledger import CallRecord
from gym_servers.model.conversation import Conversation, Message


class Piece(NamedTuple):
    """Text of a message that is certain: no later token takes it back. `field` is `content` or `reasoning`."""

    field: str
    text: str


class Reading(Protocol):
    """Reads one reply while it grows."""

    def feed(self, ids: Sequence[int]) -> list[Piece]:
        """What is certain with these tokens, which follow those before. All pieces of a field together are the
        beginning of what `Dialect.parse` says of the whole."""
        ...


class Dialect(Protocol):
    def render(self, conversation: Conversation, parent: CallRecord | None) -> list[int]:
        """Prompt token ids. `parent` is the call whose reply the conversation goes on from: its tokens are taken over
        as they were, where the model's own form of a conversation allows it.

        Raises ValueError for a conversation this model cannot be given."""
        ...

    def parse(self, ids: Sequence[int], prompt: Sequence[int], conversation: Conversation, stem: str) -> Message:
        """The message of a generation. `stem` names its tool calls, so that equal trajectories have equal ids. What
        cannot be read as a tool call is text."""
        ...

    def reading(self, prompt: Sequence[int], conversation: Conversation) -> Reading | None:
        """To read a reply while it is generated; None where it can only be read as a whole."""
        ...


def call_id(stem: str, number: int) -> str:
    """The id of a message's tool call, counted from 0."""
    return f"call_{stem}" if number == 0 else f"call_{stem}_{number}"
