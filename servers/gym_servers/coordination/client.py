"""The coordinator's side of the control API.

Refused (ProtocolError)   the participant said no; asking again changes nothing
Unreachable               no answer by the deadline; every verb may be repeated
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from gym_servers.coordination.clocks import PeerClock
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError, refusal_of

RETRY_SECONDS = 0.2
REPLY_GRACE_SECONDS = 2.0  # a participant answers at its deadline; its answer needs a moment to come back
UNAUTHORIZED = 401

T = TypeVar("T", bound=BaseModel)


class Unreachable(Exception):
    """A participant gave no answer by the deadline."""


@dataclass(frozen=True)
class ParticipantClient:
    """One participant's control endpoint. `wall` gives Unix time; `clock` is the participant's own, shared by all
    clients of it."""

    name: str
    kind: str
    url: str
    token: str = field(repr=False)
    http: httpx.AsyncClient
    wall: Callable[[], float] = time.time
    previous_token: str = field(default="", repr=False)  # good where a rotation of the token has not arrived yet
    clock: PeerClock = field(default_factory=PeerClock, repr=False)

    async def status(self, timeout: float = 2.0) -> m.Status:
        """One try. Raises Unreachable, ProtocolError."""
        return await self._once("GET", "status", None, m.Status, timeout)

    async def status_by(self, deadline_ts: float) -> m.Status:
        """The status, asked for until the deadline. Raises Unreachable, ProtocolError."""
        while True:
            try:
                return await self.status()
            except Unreachable:
                if deadline_ts - self.wall() <= RETRY_SECONDS:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def call(self, verb: str, body: m.Verb, reply: type[T]) -> T:
        """POST a verb until it is answered or its deadline has passed. Raises ProtocolError, Unreachable."""
        while True:
            left = body.deadline_ts - self.wall()
            # Without what equals the default: a field of a later version means nothing to who does not know it.
            said = body.model_dump(mode="json", exclude_defaults=True)
            content = {**said, "deadline_ts": self.clock.of(body.deadline_ts)}
            try:
                return await self._once("POST", verb, content, reply, max(0.1, left) + REPLY_GRACE_SECONDS)
            except Unreachable:
                if body.deadline_ts - self.wall() <= RETRY_SECONDS:
                    raise
            await asyncio.sleep(RETRY_SECONDS)

    async def _once(
        self, method: str, verb: str, content: dict[str, object] | None, reply: type[T], timeout: float
    ) -> T:
        try:
            response = await self._ask(method, verb, content, self.token, timeout)
            if response.status_code == UNAUTHORIZED and self.previous_token:
                response = await self._ask(method, verb, content, self.previous_token, timeout)
            body = response.json()
        except (httpx.TransportError, ValueError) as error:
            raise Unreachable(f"{self.name} does not answer on control: {type(error).__name__}") from error
        if response.is_success:
            try:
                return reply.model_validate(body)
            except ValidationError as error:
                raise ProtocolError("checkpoint_error", f"{self.name} answered {verb} in another form") from error
        refusal = refusal_of(response.status_code, body)
        if refusal is not None:
            raise ProtocolError(refusal.code, f"{self.name}: {refusal.detail}")
        raise Unreachable(f"{self.name} answered {verb} with status {response.status_code}")

    async def _ask(
        self, method: str, verb: str, content: dict[str, object] | None, token: str, timeout: float
    ) -> httpx.Response:
        asked = self.wall()
        response = await self.http.request(
            method,
            f"{self.url}{m.PREFIX}/{verb}",
            json=content,
            headers={"authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout, connect=min(timeout, 2.0)),
        )
        self.clock.heard(response.headers.get("date"), asked, self.wall())
        return response
