"""One generation from where it stands to its end, whatever the engine does meanwhile.

A stream that breaks off is taken up again behind the tokens that have arrived; where that would not be faithful the
generation begins anew. An engine that is away is waited for: the episode's own limits bound the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from gym_servers.capture.chunks import add
from gym_servers.capture.tokens import Tokens, joined
from gym_servers.http.peers import CONNECT_RETRY_SECONDS
from gym_servers.model.conversation import Sampling
from gym_servers.model.engine_client import READ_SECONDS, EngineBroke, EngineClient
from gym_servers.model.sampling import continued
from gym_servers.protocol.errors import ProtocolError

LENGTH = "length"  # the finish reason of a generation that used its budget up
OPEN = ".."  # behind a version: of it or a later one, which is not known before the version is asked for again


class Budget(Protocol):
    """Says how many tokens a generation may have in all. `refused`: by an engine, since what was known is not so."""

    async def __call__(self, refused: ProtocolError | None = None) -> int: ...


class Outages:
    """Tells people when the engine has been away for long: `tell` gets the reason, and nothing once it is back."""

    PATIENCE_SECONDS = 30.0

    def __init__(self, tell: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._tell, self._clock = tell, clock
        self._since: float | None = None

    def failed(self, reason: str) -> None:
        now = self._clock()
        if self._since is None:
            self._since = now
        if now - self._since >= self.PATIENCE_SECONDS:
            self._tell(f"the engine has not answered for {now - self._since:.0f} s: {reason}")

    def answered(self) -> None:
        if self._since is not None:
            self._since = None
            self._tell("")


async def generate(
    engine: EngineClient,
    prompt: Sequence[int],
    sampling: Sampling,
    budget_of: Budget,
    tokens: Tokens,
    name: str,
    outages: Outages,
    begin: Callable[[int], str],
    grew: Callable[[], None] = lambda: None,
    anew: Callable[[str], None] = lambda reason: None,
) -> None:
    """Fill `tokens` up to the generation's end, at most the budget of them with those that are there.

    `budget_of` is asked before each stream: the engine may be another one than before. `name`: whose generation it
    is, for the engine's logs. `begin` is told before each stream how many tokens there are, and gives the stream's
    ticket; `grew` is told after each change of the tokens, `anew` why those that were there are dropped, and the
    generation begins anew. Raises ProtocolError for what the engine refuses, or sends and cannot be."""
    read_seconds, room = READ_SECONDS, None
    while tokens.finish is None:
        start, budget = len(tokens), room if room is not None else await budget_of()
        room = None
        if start >= budget:
            tokens.finish = LENGTH
            return
        options, ticket = continued(sampling.options, start), begin(start)
        request_id = f"{name}/{ticket[:8]}"
        stream = engine.stream([*prompt, *tokens.ids], budget - start, options, request_id, ticket, read_seconds)
        reason = "the engine ended a stream without its last token"
        version, told = await engine.weight_version(), False
        _known(tokens, version)
        try:
            async with aclosing(stream) as deltas:
                async for delta in deltas:
                    outages.answered()
                    told = told or bool(delta.version or delta.versions)
                    add(tokens, delta if told or not version else replace(delta, version=version + OPEN), start)
                    grew()
        except EngineBroke as broke:
            reason = str(broke)
            if broke.slow:
                read_seconds *= 2  # asked again in the same way it would never get to answer
        except ProtocolError as refused:
            room = await budget_of(refused)
            if room >= budget:
                raise
            continue  # it has less room than was known, whatever another one behind its address would say next
        except ValueError as error:
            raise ProtocolError("checkpoint_error", f"the engine sent {error}") from error
        if version and not told and len(tokens) > start:
            _known(tokens, await engine.weight_version())
        if tokens.finish is None:
            if sampling.unfaithful and len(tokens):
                anew(sampling.unfaithful)
                tokens.restart()
            outages.failed(reason)
            await asyncio.sleep(CONNECT_RETRY_SECONDS)


def _known(tokens: Tokens, now: str) -> None:
    """The weights are of this version now: the last tokens, where theirs is open, are of none beyond it. Weights that
    changed while a stream went on: which of its tokens are of which is not known, and is said so."""
    last = tokens.spans[-1] if tokens.spans else None
    if not now or last is None or not last.version.endswith(OPEN):
        return
    before = last.version.removesuffix(OPEN)
    version = before if before == now else f"{before}{OPEN}{now}"
    tokens.spans = joined(tokens.spans[:-1], version, last.start, last.end)
