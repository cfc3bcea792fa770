"""Calls from one server to another of its cell.

Every call made here may be repeated: seeds replace, activations and tool calls carry an index or id, closes are
idempotent. So a lost connection is tried again for a bounded time, and closed admission is waited out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from typing import Any

import httpx

from gym_servers.http.episode_path import episode_path
from gym_servers.http.sessions import Jar, sign, unsign
from gym_servers.protocol.errors import ProtocolError, refusal_of
from gym_servers.protocol.identity import Episode
from gym_servers.stack.settings import Peer, SettingsError

ADMISSION_RETRY_SECONDS = 0.2  # protocol: at most 1 s
CONNECT_RETRY_SECONDS = 0.5
PATIENCE_SECONDS = 60.0  # how long a peer that cannot be reached is tried: longer than a pod's replacement


class PeerUnreachable(Exception):
    """No answer from a peer, after repeated tries."""


class PeerFailed(Exception):
    """A peer answered with an error that is not one of the protocol's refusals."""

    def __init__(self, reason: str, status: int = 0) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Reply:
    """A peer's answer: JSON body, headers, and the session contents of the cookies it set."""

    body: Any
    headers: Mapping[str, str]
    jar: Jar


class Peers:
    """Posts to the peers of this cell by name. `secret` signs and reads session cookies. Without `extended` no call
    carries a header of the checkpoint protocol, whatever its caller gives."""

    def __init__(self, peers: Mapping[str, Peer], secret: str, *, extended: bool = True) -> None:
        self._peers, self._secret, self._extended = peers, secret, extended
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=5.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=128),
            trust_env=False,
        )
        # Jars are the caller's: the client keeps no cookie, or one episode's session would leak into another's call.
        self._client.cookies.jar.set_policy(DefaultCookiePolicy(allowed_domains=[]))

    async def aclose(self) -> None:
        await self._client.aclose()

    def only(self, kind: str, name: str | None = None) -> str:
        """The name of the peer of a kind: the named one, or the only one. Raises SettingsError."""
        names = [n for n, peer in self._peers.items() if peer.kind == kind]
        if name is not None:
            if name not in names:
                raise SettingsError(f"no {kind} server is named {name!r}; there are {', '.join(names) or 'none'}")
            return name
        if len(names) != 1:
            raise SettingsError(f"name one {kind} server in `config`: there are {', '.join(names) or 'none'}")
        return names[0]

    def url(self, name: str) -> str:
        return self._peers[name].url

    def name_of(self, url: str) -> str:
        """The peer behind an address. Raises ProtocolError: records name peers, so others cannot be kept."""
        for name, peer in self._peers.items():
            if peer.url.rstrip("/") == url.rstrip("/"):
                return name
        raise ProtocolError("invalid_request", "base_url is not the address of a server of this cell")

    async def post(
        self,
        name: str,
        path: str,
        body: Any,
        *,
        episode: Episode | None = None,
        jar: Jar | None = None,
        headers: Mapping[str, str] | None = None,
        wait_admission: bool = True,
        closed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Reply:
        """POST JSON. Raises ProtocolError for refusals, PeerFailed, or PeerUnreachable after repeated tries.

        `wait_admission=False` hands `admission_closed` to the caller; else it is waited out, inside of `closed`.
        """
        url = self._peers[name].url.rstrip("/") + episode_path(episode, path)
        # As a header: the client would take per-request cookies for a jar of its own.
        cookie = "; ".join(f"{key}={value}" for key, value in sign(jar or {}, self._secret).items())
        sent = {name: value for name, value in (headers or {}).items() if self._extended or not protocols_own(name)}
        if cookie:
            sent["cookie"] = cookie
        give_up: float | None = None
        while True:
            began = time.monotonic()
            try:
                response = await self._client.post(url, json=body, headers=sent)
            except httpx.TransportError as error:
                failed = time.monotonic()
                # Counted from the first of a row of failures; a try that was at work for a while begins another row.
                if give_up is None or failed - began >= PATIENCE_SECONDS:
                    give_up = failed + PATIENCE_SECONDS
                if failed >= give_up:
                    raise PeerUnreachable(f"{name} does not answer: {type(error).__name__}") from error
                await asyncio.sleep(CONNECT_RETRY_SECONDS)
                continue
            if response.is_success:
                return Reply(_json(response), response.headers, unsign(dict(response.cookies), self._secret))
            refusal = refusal_of(response.status_code, _json(response))
            if refusal is None:
                raise PeerFailed(f"{name}{path} answered {response.status_code}", response.status_code)
            if refusal.code != "admission_closed" or not wait_admission:
                raise refusal
            give_up = None
            with closed():
                await asyncio.sleep(ADMISSION_RETRY_SECONDS)


def protocols_own(header: str) -> bool:
    return header.lower().startswith("x-ng-")


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None
