"""What an environment server is written against: subclass `EnvironmentServer` and lead one episode to its row.

The base takes a slot for each episode, spends its budget, and turns what goes wrong into a failure. Cleanup is the
subclass's: it runs before `episode` returns or raises, on every path.
"""

from __future__ import annotations

import abc
import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, TypeVar

from gym_servers.http.peers import PeerFailed, Peers, PeerUnreachable, Reply
from gym_servers.http.sessions import Jar
from gym_servers.participants.environment import EnvironmentParticipant, Live, Unclaimed
from gym_servers.participants.limits import OverLimit
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

log = logging.getLogger("gym_servers")

T = TypeVar("T")
State = dict[str, Any]

_CLEANUP = "cleanup"  # holds an episode's budget for good


class EpisodeFailed(Exception):
    """An episode has no row; `failure` says why, as its caller gets it. Another attempt may be tried."""

    def __init__(self, stage: str, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.failure: dict[str, Any] = {
            "failure_kind": kind,
            "failure_reason": reason,
            "stage": stage,
            "terminal": False,
        }


class EnvironmentServer(abc.ABC):
    """Base of environment servers.

    `checkpoint_boundaries`: whether its stages record boundaries from which another process can continue. Without it
    (the default: it fails closed) every episode starts over after a death.
    """

    checkpoint_boundaries: ClassVar[bool] = False

    def __init__(self, participant: EnvironmentParticipant, peers: Peers) -> None:
        self._participant, self._peers = participant, peers

    @abc.abstractmethod
    async def episode(self, live: Live, restored: Unclaimed | None, task: dict[str, Any]) -> dict[str, Any]:
        """Lead one episode from its boundary to its row."""

    async def run(self, live: Live, restored: Unclaimed | None, task: dict[str, Any]) -> dict[str, Any]:
        """One episode: its row. Raises EpisodeFailed, and ProtocolError where the attempt was replaced."""
        try:
            async with self._participant.slot(live):
                return await self.episode(live, restored, task)
        except OverLimit as error:
            limits = self._participant.limits
            if live.where == "queue":
                reason = f"no free place within {limits.queue_timeout_seconds:g} s"
                raise EpisodeFailed(live.where, "transport_local_resource", reason) from error
            reason = f"over its limit of {limits.episode_timeout_seconds:g} s"
            raise EpisodeFailed(live.where, "agent_timeout", reason) from error
        except ProtocolError as refusal:
            if refusal.code == "stale_attempt":
                raise
            kind = "session_lost" if refusal.code == "session_lost" else "agent_request_failed"
            raise EpisodeFailed(live.where, kind, str(refusal)) from refusal
        except PeerUnreachable as error:
            raise EpisodeFailed(live.where, "transport_unreachable", str(error)) from error
        except PeerFailed as error:
            kind = "verifier_error" if live.where == "verify" else "agent_run_error"
            raise EpisodeFailed(live.where, kind, str(error)) from error

    async def stage(
        self, live: Live, name: str, *, replay: bool, state: State, step: Callable[[], Awaitable[T]]
    ) -> T:
        """One stage of an episode: its boundary is `name` and `state`."""
        return await self._participant.stage(live, name, replay=replay, snapshot=lambda: state, step=step)

    async def finish(self, live: Live, *cleanups: Callable[[], Awaitable[None]]) -> None:
        """End what an episode holds at its peers, one after another. Neither a retire nor the episode's limit cuts it
        short: they wait for its end. What fails is logged: the episode's answer does not depend on it, nor do the
        others. One that takes longer than its share of the time goes on beside the next."""
        live.cleaning = True
        live.budget.hold(_CLEANUP)
        ending = asyncio.ensure_future(self._within_limit(live, cleanups))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise

    async def _within_limit(self, live: Live, cleanups: Sequence[Callable[[], Awaitable[None]]]) -> None:
        limit = self._participant.limits.cleanup_timeout_seconds
        begun: list[asyncio.Task[None]] = []

        async def each() -> None:
            for cleanup in cleanups:
                begun.append(asyncio.create_task(_logged(live, cleanup)))
                share = self._participant.cleanup_budget(live, limit / len(cleanups))
                with suppress(OverLimit):
                    await share.spend(partial(asyncio.wait, begun[-1:]))
            await asyncio.gather(*begun)

        try:
            await self._participant.cleanup_budget(live, limit).spend(each)
        except OverLimit:
            for task in begun:
                task.cancel()
            log.warning("cleanup of %s: not done in %g s", live.episode.key, limit)

    async def post(
        self,
        live: Live,
        peer: str,
        path: str,
        body: Any,
        *,
        jar: Jar | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        """A call of the episode to a peer. Time in which the peer admits nothing does not count as its work."""
        return await self._peers.post(
            peer, path, body, episode=named(live), jar=jar, headers=headers, closed=live.budget.held
        )


async def _logged(live: Live, cleanup: Callable[[], Awaitable[None]]) -> None:
    try:
        await cleanup()
    except (ProtocolError, PeerUnreachable, PeerFailed) as error:
        log.warning("cleanup of %s: %s", live.episode.key, error)


def named(live: Live) -> Episode | None:
    """The episode as calls carry it."""
    return None if live.anonymous else live.episode
