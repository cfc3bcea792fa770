"""A reply sent while it is generated, piece by piece.

From the moment in which a checkpoint closes admission until it is over nothing is sent, so that all that a client has
is in what the checkpoint froze: a restored call goes on behind it. What may have to be generated anew, because its
prefix cannot be continued, is sent once it is whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

from gym_servers.capture.ledger import CallRecord
from gym_servers.model.conversation import Conversation
from gym_servers.model.dialect import Dialect, Piece, Reading
from gym_servers.model.reply import Event, Writer, server_sent
from gym_servers.participants.gate import Gate
from gym_servers.participants.model_call import Call
from gym_servers.protocol.errors import ProtocolError
from gym_servers.unattended import unattended


class Growing:
    """What is certain of a call's reply so far; `joined` says which call it is."""

    def __init__(self, dialect: Dialect, conversation: Conversation) -> None:
        self._dialect, self._conversation = dialect, conversation
        self._joined: asyncio.Future[Call] = asyncio.get_running_loop().create_future()
        self._reading: Reading | None = None
        self._read = 0

    def joined(self, call: Call) -> None:
        self._joined.set_result(call)

    @property
    def call(self) -> Call | None:
        return self._joined.result() if self._joined.done() else None

    def change(self) -> Awaitable[Any]:
        """Ends when there may be something new, from now on."""
        call = self.call
        return call.growth.wait() if call is not None else asyncio.shield(self._joined)

    def pieces(self) -> list[Piece]:
        """What is new since the last time."""
        call = self.call
        if call is None or call.unfaithful or call.prompt is None or len(call.tokens) == self._read:
            return []
        if self._reading is None:
            self._reading = self._dialect.reading(call.prompt, self._conversation)
        new, self._read = call.tokens.ids[self._read :], len(call.tokens)
        return self._reading.feed(new) if self._reading is not None else []


async def streamed(
    work: Callable[[Callable[[Call], None]], Coroutine[Any, Any, CallRecord]],
    growing: Growing,
    gate: Gate,
    writer_of: Callable[[Call], Writer],
    writer_of_body: Callable[[Mapping[str, Any]], Writer],
) -> AsyncGenerator[bytes, None]:
    """Parts of the stream's body. `work` makes the call, and says by `growing.joined` which it is. Closed early, it
    lets go of the call. A reply that was there already is written from its body alone.

    Raises the call's ProtocolError as long as nothing was sent; later the stream itself says it."""
    task = unattended(work(growing.joined))
    writer: Writer | None = None
    try:
        while not task.done():
            if not gate.checkpoint_open and growing.call is not None and (pieces := growing.pieces()):
                events: list[Event] = []
                if writer is None:
                    writer = writer_of(growing.call)
                    events += writer.begin()
                for piece in pieces:
                    events += writer.piece(piece)
                yield server_sent(events)
            elif gate.checkpoint_open:
                await _either(task, gate.wait_checkpoint_closed())
            else:
                await _either(task, growing.change())
        if writer is None:
            body = task.result().response
            writer = writer_of_body(body)
            yield server_sent([*writer.begin(), *writer.end(body)])
            return
        try:
            yield server_sent(writer.end(task.result().response))
        except ProtocolError as error:
            yield server_sent(writer.failed(error))
    finally:
        task.cancel()


async def _either(task: asyncio.Future[Any], other: Awaitable[Any]) -> None:
    """Until one of them has ended."""
    beside = asyncio.ensure_future(other)
    try:
        await asyncio.wait({task, beside}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        beside.cancel()
