"""The generation cut of an open checkpoint: made in the step that closes admission, and kept until resume.

Where the engine's side can cut too, what it has generated and has not arrived here yet is added; a checkpoint waits
for that a few seconds at most, and whatever fails, what has arrived is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from gym_servers.capture.cuts import Cut, Standing, beyond, freeze, stand
from gym_servers.capture.inventory import InventoryCall
from gym_servers.capture.ledger import Prefix
from gym_servers.capture.reasons import What
from gym_servers.capture.tokens import Frozen
from gym_servers.participants.gate import Gate
from gym_servers.participants.model_call import Call
from gym_servers.protocol.messages import Blocker

log = logging.getLogger("gym_servers")

CUT_SECONDS = 5.0  # an engine that takes longer to cut is not waited for


class CutFailed(Exception):
    """The engine's side has not cut; the message says why."""


CutAtEngine = Callable[[str, Sequence[InventoryCall]], Awaitable[Mapping[str, Frozen | None]]]
"""Cuts the streams of these calls where their tokens are made: tokens by ticket, None where a call could not be cut,
and nothing where nothing was generated. Raises CutFailed."""


class Cutting:
    """`done` gets the counts of every cut."""

    def __init__(self, gate: Gate, at_engine: CutAtEngine | None, done: Callable[[Mapping[str, int]], None]) -> None:
        self._gate, self._at_engine, self._done = gate, at_engine, done
        self._cut: Cut | None = None
        self._task: asyncio.Task[None] | None = None
        self._since = 0.0

    @property
    def prefixes(self) -> Mapping[str, list[Prefix]]:
        """What is frozen, by capture key."""
        return self._cut.prefixes if self._cut is not None else {}

    @property
    def counts(self) -> Mapping[str, int]:
        return self._cut.counts if self._cut is not None else {}

    def blockers(self) -> list[Blocker]:
        if self._task is None or self._task.done():
            return []
        age = round(self._gate.clock() - self._since, 3)
        return [Blocker(id="generation-cut", where="engine", age_seconds=age)]

    def close(self, calls: Collection[Call]) -> None:
        """Freeze these calls, once for each checkpoint."""
        if self._cut is not None:
            return
        standing = {call: stand(call) for call in calls}
        self._cut = freeze(standing.values())
        streams = {call.stream.ticket: call for call in standing if call.stream and call.tokens.finish is None}
        checkpoint = self._gate.control.checkpoint_id
        if self._at_engine is None or checkpoint is None or not streams:
            self._done(self._cut.counts)
            return
        self._since = self._gate.clock()
        self._task = asyncio.ensure_future(self._further(self._at_engine, checkpoint, standing, streams))
        self._task.add_done_callback(lambda _: self._gate.touch())

    def open(self) -> None:
        """The checkpoint is over."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._cut = None

    async def _further(
        self, cut: CutAtEngine, checkpoint: str, standing: dict[Call, Standing], streams: Mapping[str, Call]
    ) -> None:
        named = [InventoryCall(ticket=t, episode=c.key, model_call_id=c.position) for t, c in streams.items()]
        starts = {call: call.stream.start for call in streams.values() if call.stream}
        try:
            async with asyncio.timeout(CUT_SECONDS):
                found = await cut(checkpoint, named)
        except (CutFailed, TimeoutError) as error:
            log.warning("the engine did not cut for %s: %s", checkpoint, str(error) or "no answer in time")
            failed = len(streams)
        else:
            failed = sum(not _put_on(standing, call, starts[call], ticket, found) for ticket, call in streams.items())
        frozen = freeze(standing.values())
        self._cut = Cut(frozen.prefixes, {**frozen.counts, What.CUT_ENGINE_FAILED: failed})
        self._done(self._cut.counts)


def _put_on(
    standing: dict[Call, Standing], call: Call, start: int, ticket: str, found: Mapping[str, Frozen | None]
) -> bool:
    """Put what the engine has behind what had arrived; whether the engine has cut this call."""
    if ticket not in found:
        # Nothing was generated there: the call is on its way, or the engine does not know of it any more.
        return len(standing[call].tokens) == start
    tokens = found[ticket]
    further = beyond(standing[call], start, tokens) if tokens is not None else None
    if further is not None:
        standing[call] = further
    return further is not None
