"""Calls that belong to an episode and to no session: joined by repeats, ended by a retire, kept by rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from gym_servers.participants.answered import same_request
from gym_servers.participants.gate import Gate
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

T = TypeVar("T")

ROW = "row"  # the name of the call that serves its episode as a whole


async def outcome(task: asyncio.Task[T], ended: ProtocolError) -> T:
    """What a task that others may end comes to; a caller that leaves does not end it. Raises `ended` where somebody
    did."""
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        waiting = asyncio.current_task()
        if task.cancelled() and not (waiting is not None and waiting.cancelling()):
            raise ended from None
        raise


@dataclass(eq=False)
class Call:
    """A running call. A repeat of it is known by its `name` within its episode - without one no other joins it - and
    bound to its request by `digest`. `restart`: nothing of it can be continued."""

    episode: Episode
    name: str
    digest: str
    restart: bool
    task: asyncio.Task[Any]


class Calls:
    """What runs now. A caller that leaves does not end its call."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._by_rollout: dict[str, set[Call]] = {}

    def __len__(self) -> int:
        return sum(len(calls) for calls in self._by_rollout.values())

    def begin(
        self, episode: Episode, name: str, digest: str, work: Callable[[], Awaitable[Any]], *, restart: bool
    ) -> Call:
        async def run() -> Any:
            return await work()

        call = Call(episode, name, digest, restart, asyncio.ensure_future(run()))
        self._by_rollout.setdefault(episode.rollout_id, set()).add(call)
        call.task.add_done_callback(lambda _: self._ended(call))
        return call

    def find(self, episode: Episode, name: str, digest: str) -> Call | None:
        """The running call that a repeat joins. Raises `checkpoint_conflict` for another request under its name."""
        calls = self._by_rollout.get(episode.rollout_id, ())
        found = next((call for call in calls if name and call.episode == episode and call.name == name), None)
        if found is not None:
            same_request(episode, digest, found.digest)
        return found

    def restarts(self) -> set[str]:
        """Capture keys of what cannot be continued."""
        return {
            call.episode.key
            for calls in self._by_rollout.values()
            for call in calls
            if call.restart and not call.task.done()  # one that is done is forgotten a moment later
        }

    async def join(self, call: Call) -> Any:
        """The call's result. Raises `stale_attempt` where it was retired."""
        return await outcome(call.task, ProtocolError("stale_attempt", f"{call.episode.key} was retired"))

    async def end(self, attempts: Mapping[str, int]) -> None:
        """Stop the calls of these rollouts at or below their attempts, and wait for them."""
        ending = [
            call.task
            for rollout, attempt in attempts.items()
            for call in self._by_rollout.get(rollout, ())
            if call.episode.attempt <= attempt
        ]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    async def end_within(self, episode: Episode) -> None:
        """Stop the calls that were made inside of an episode's session; not the one that serves it as a whole."""
        calls = self._by_rollout.get(episode.rollout_id, ())
        ending = [call.task for call in calls if call.episode == episode and call.name != ROW]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending)

    def _ended(self, call: Call) -> None:
        if not call.task.cancelled():
            call.task.exception()  # every caller may be gone: an error nobody awaits is not a fault of ours
        calls = self._by_rollout[call.episode.rollout_id]
        calls.discard(call)
        if not calls:
            del self._by_rollout[call.episode.rollout_id]
        self._gate.touch()
