"""How many tokens the engine has room for.

An engine may be another one whenever it is asked, with another length, and nobody has to see the change: it may have
been restarted while nothing was generated. So what it has said before is enough only for a call that fits. One that
does not is asked about anew, and so is one that the engine refuses. There may be several behind one address, of
different lengths while they are replaced one after the other: who refuses a call for its length says it best itself.
"""

from __future__ import annotations

import asyncio

from gym_servers.http.peers import CONNECT_RETRY_SECONDS
from gym_servers.model.engine_client import EngineBroke, EngineClient, NoRoom
from gym_servers.model.generation import Outages
from gym_servers.protocol.errors import ProtocolError

UNKNOWN = 2**31 - 1  # of an engine that does not say: more than any has


class Context:
    """Of prompt and generation together. `given`: so many tokens whatever the engine says, None to ask it. It is not
    `bounded` where the engine takes any number."""

    def __init__(self, engine: EngineClient, outages: Outages, given: int | None, *, bounded: bool) -> None:
        self._engine, self._outages = engine, outages
        self._given, self._bounded = given, bounded
        self._said = 0  # tokens, when the engine was last asked

    async def budget(self, prompt: int, wanted: int, refused: ProtocolError | None = None) -> int:
        """Of the tokens `wanted` behind a prompt as many as there is room for. `refused`: why an engine did not take
        as many as were known to fit; without a length in it the engine is asked in any case, and waited for while it
        is away.

        Raises `invalid_request` where there is no room."""
        if not self._bounded:
            return wanted
        length = self._given
        if length is None:
            if isinstance(refused, NoRoom):
                self._said = refused.length
            elif refused is not None or prompt + wanted > self._said:
                self._said = await self._asked()
            length = self._said
        if prompt >= length:
            raise ProtocolError(
                "invalid_request",
                f"the conversation has {prompt} tokens, the model's context is {length}: send less of it",
            )
        return min(wanted, length - prompt)

    async def _asked(self) -> int:
        while True:
            try:
                found = await self._engine.context_length()
                self._outages.answered()
                return found if found is not None else UNKNOWN
            except EngineBroke as broke:
                self._outages.failed(str(broke))
                await asyncio.sleep(CONNECT_RETRY_SECONDS)
