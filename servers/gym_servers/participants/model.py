"""The model participant: calls to the policy, held replies, and the ledger of delivered calls.

While a checkpoint is open new calls are refused; an accepted one goes on, and its reply is held until resume. A
call enters the ledger when its reply is about to be sent, so an undelivered one is not exported and is issued
again by the restored agent. One that was delivered, though the agent had not yet recorded it, is found by its
position and request and answered from the restored ledger: nothing is generated twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from gym_servers.capture.ledger import CallRecord, Ledger, decode, encode
from gym_servers.participants.base import Participant, RestorePlan, Scope, Survey
from gym_servers.participants.gate import Gate
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, highest, parse_key


@dataclass(eq=False)
class Call:
    """A call in progress."""

    episode: Episode
    position: str
    digest: str
    task: asyncio.Task[CallRecord]


class ModelParticipant(Participant):
    """The calls and ledgers of one policy model server."""

    kind = "model"

    def __init__(self, gate: Gate) -> None:
        super().__init__(gate)
        self._calls: set[Call] = set()
        self._ledgers: dict[str, Ledger] = {}

    async def call(
        self,
        episode: Episode,
        position: str,
        digest: str,
        generate: Callable[[], Awaitable[CallRecord]],
    ) -> CallRecord:
        """Generate once for each position of an episode; a repeat joins the call or gets its reply again.

        Raises `admission_closed` while closed, `stale_attempt`, and `checkpoint_conflict` for another request at a
        position that is taken. A call without a position waits while a checkpoint is open.
        """
        if self.gate.enabled:
            self.gate.fence.check(episode)
        ledger = self._ledgers.get(episode.key)
        if ledger is not None and (known := ledger.at(position)) is not None:
            _same_request(episode, position, digest, known.digest)
            await self.gate.wait_checkpoint_closed()
            return known
        for running in self._calls:
            if position and running.episode == episode and running.position == position:
                _same_request(episode, position, digest, running.digest)
                return await self._join(running)
        if position:
            self.gate.require_open()
        else:
            # Its agent does not speak the protocol: it would take a refusal for the end of its work.
            await self.gate.enter()
        self.gate.admit(episode)
        call = Call(episode, position, digest, asyncio.ensure_future(self._deliver(episode, generate)))
        self._calls.add(call)
        call.task.add_done_callback(lambda _: self._done(call))
        return await self._join(call)

    async def _deliver(self, episode: Episode, generate: Callable[[], Awaitable[CallRecord]]) -> CallRecord:
        record = await generate()
        await self.gate.wait_checkpoint_closed()
        if self.gate.enabled:
            self.gate.fence.check(episode)  # it may have been retired while its reply was held
        self._ledgers.setdefault(episode.key, Ledger()).calls.append(record)
        return record

    def _done(self, call: Call) -> None:
        self._calls.discard(call)
        if not call.task.cancelled():
            call.task.exception()  # every waiter may be gone: an error nobody awaits is not a fault of ours
        self.gate.touch()

    async def _join(self, call: Call) -> CallRecord:
        try:
            return await asyncio.shield(call.task)
        except asyncio.CancelledError:
            if call.task.cancelled():
                raise ProtocolError("stale_attempt", f"{call.episode.key} was retired") from None
            raise

    def ledger(self, key: str) -> Ledger | None:
        return self._ledgers.get(key)

    # ---- participant --------------------------------------------------------------------------------------

    def survey(self) -> Survey:
        return Survey((), {"calls": len(self._calls), "ledgers": len(self._ledgers)})

    async def export(self, scope: Scope) -> dict[str, bytes]:
        return {key: encode(key, ledger) for key, ledger in self._ledgers.items() if scope.covers(key)}

    def read(self, records: Mapping[str, bytes], plan: RestorePlan) -> dict[str, Ledger]:
        staged = {}
        for name, data in records.items():
            key, ledger = decode(name, data)
            episode = plan.restored(key)
            if episode is not None:
                staged[episode.key] = ledger
        return staged

    def install(self, staged: dict[str, Ledger]) -> list[str]:
        self._ledgers.update(staged)
        return list(staged)

    def uninstall(self) -> None:
        self._ledgers.clear()

    async def retire(self, episodes: Sequence[Episode]) -> None:
        wanted = highest(episodes)
        ending = []
        for call in list(self._calls):
            if call.episode.attempt <= wanted.get(call.episode.rollout_id, -1):
                call.task.cancel()
                ending.append(call.task)
        if ending:
            await asyncio.wait(ending)
        self._drop(lambda episode: episode.attempt <= wanted.get(episode.rollout_id, -1))

    def forget(self, rollout_ids: Collection[str]) -> None:
        gone = set(rollout_ids)
        self._drop(lambda episode: episode.rollout_id in gone)

    def _drop(self, which: Callable[[Episode], bool]) -> None:
        for key in [key for key in self._ledgers if which(parse_key(key))]:
            del self._ledgers[key]


def _same_request(episode: Episode, position: str, digest: str, known: str) -> None:
    if digest != known:
        raise ProtocolError("checkpoint_conflict", f"call {position} of {episode.key} was made with another request")
