"""The model participant: calls to the policy, held replies, and the ledger of delivered calls.

While a checkpoint is open new calls are refused; an accepted one goes on, and its reply is held until resume. A
call enters the ledger when its reply is about to be sent, so an undelivered one is issued again by the restored
agent; what it had generated when admission closed is part of the checkpoint, and it goes on behind that. One that was
delivered, though the agent had not yet recorded it, is answered from the restored ledger: nothing is generated twice.

A call is found again by its position where its caller names one. Where none is named it is matched by its parent and
its request, each restored entry once, so that a deliberate repeat is generated anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from gym_servers.capture.cuts import prefix_of
from gym_servers.capture.ledger import CallRecord, Ledger, Prefix, decode, encode
from gym_servers.capture.reasons import Reason, What, counted
from gym_servers.capture.segments import Damaged
from gym_servers.capture.store import Kept, LedgerStore, assembled, kept_of
from gym_servers.capture.tokens import Tokens
from gym_servers.participants.base import Participant, RestorePlan, Scope, Survey
from gym_servers.participants.cutting import CutAtEngine, Cutting
from gym_servers.participants.gate import Gate
from gym_servers.participants.model_call import Asked, Call, Failure, Generate, same_request
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode, highest, parse_key

log = logging.getLogger("gym_servers")

ABANDONED_SECONDS = 30.0  # a caller whose connection broke has come back by then; what nobody waits for is stopped
MOST_FAILURES = 100  # kept of each episode
MOST_NAMED = 10  # in one line of the log


class Restored(NamedTuple):
    """What a record holds of one episode, for `install`."""

    calls: list[Kept]
    prefixes: list[Prefix]


class ModelParticipant(Participant):
    """The calls and ledgers of one policy model server. `begins` tells the engine's side which attempt of the cell is
    in service now."""

    kind = "model"

    def __init__(
        self,
        gate: Gate,
        ledgers: LedgerStore | None = None,
        cut_at_engine: CutAtEngine | None = None,
        begins: Callable[[int], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(gate)
        self._calls: set[Call] = set()
        self._ledgers = ledgers if ledgers is not None else LedgerStore()
        self._prefixes: dict[str, list[Prefix]] = {}  # that nobody has claimed
        self._replays: dict[str, list[Kept]] = {}  # restored entries without a position, each to be given once more
        self._failures: dict[str, list[Failure]] = {}
        self._tally: Counter[str] = Counter()
        self._cutting = Cutting(gate, cut_at_engine, self._cut_made)
        self._begins, self._begun, self._telling = begins, -1, set[asyncio.Future[None]]()

    async def call(
        self, episode: Episode, asked: Asked, generate: Generate, joined: Callable[[Call], None] = lambda call: None
    ) -> CallRecord:
        """Generate once for each position of an episode; a repeat joins the call or gets its reply again. `joined` is
        given the call that is waited for; nothing where the reply is there already.

        Raises `admission_closed` while closed, `stale_attempt`, and `checkpoint_conflict` for another request at a
        position that is taken. A call without a position waits while a checkpoint is open.
        """
        self._check(episode)
        known = self._ledgers.at(episode.key, asked.position)
        if known is not None:
            same_request(episode, asked, known.digest)
            return await self._again(episode, known)
        for running in self._calls:
            if asked.position and running.stands_for(episode, asked):
                same_request(episode, asked, running.digest)
                joined(running)
                return await self._join(running)
        if asked.position:
            self.gate.require_open()
        else:
            # Its agent does not speak the protocol: it would take a refusal for the end of its work.
            await self.gate.enter()
        self.gate.admit(episode)
        parent = self._ledgers.parent(episode.key, asked.turns, asked.thoughts)
        chain = parent.chain if parent is not None else ""
        replay = self._replayed(episode.key, asked, chain)
        if replay is not None:
            self._tally[What.ANSWERED] += 1
            return await self._again(episode, replay)
        call = Call(episode, asked, chain, budget=asked.budget, begun_anew=self._begun_anew)
        call.repeat = self._repeats(call)
        self._claim(call)
        call._task = asyncio.ensure_future(self._deliver(call, parent, generate))
        self._calls.add(call)
        call.task.add_done_callback(lambda _: self._done(call))
        joined(call)
        return await self._join(call)

    def _check(self, episode: Episode) -> None:
        if self.gate.enabled:
            self.gate.fence.check(episode)

    async def _again(self, episode: Episode, kept: Kept) -> CallRecord:
        """A delivered reply once more; held like any other."""
        record = await self._ledgers.record(kept)
        await self.gate.wait_checkpoint_closed()
        self._check(episode)  # it may have been retired meanwhile
        return record

    def _replayed(self, key: str, asked: Asked, parent: str) -> Kept | None:
        """A restored reply to this very call, which nobody has got a second time yet."""
        if asked.position:
            return None
        waiting = self._replays.get(key, [])
        found = next((kept for kept in waiting if (kept.parent, kept.digest) == (parent, asked.digest)), None)
        if found is not None:
            waiting.remove(found)
        return found

    def _repeats(self, call: Call) -> int:
        same = (call.parent_chain, call.digest)
        running = sum((one.parent_chain, one.digest) == same for one in self._going() if one.episode == call.episode)
        return running + sum((kept.parent, kept.digest) == same for kept in self._ledgers.calls(call.key))

    def _claim(self, call: Call) -> None:
        """Go on where an earlier process, or a call that nobody waited for, stood."""
        waiting = self._prefixes.get(call.key, [])
        found = next((prefix for prefix in waiting if _meant(prefix, call)), None)
        if found is None:
            return
        waiting.remove(found)
        if not waiting:
            del self._prefixes[call.key]
        why = found.skipped or call.unfaithful or ("" if found.digest == call.digest else Reason.ANOTHER_REQUEST)
        if why:
            self._tally.update(counted(What.REGENERATED, why))
            return
        self._tally.update({What.CONTINUED: 1, What.CONTINUED_TOKENS: len(found.tokens.ids)})
        call.prompt, call.tokens = found.prompt_ids, Tokens.after(found.tokens)
        call.budget = min(call.budget, len(found.tokens.ids) + found.remaining)

    def _begun_anew(self, reason: str) -> None:
        """The engine broke off what cannot go on behind its tokens."""
        self._tally.update(counted(What.BEGUN_ANEW, reason))

    async def _deliver(self, call: Call, parent: Kept | None, generate: Generate) -> CallRecord:
        if parent is not None and self._ledgers.holds(call.key, parent):
            call.parent = await self._ledgers.record(parent)
        record = await generate(call)
        await self.gate.wait_checkpoint_closed()
        self._check(call.episode)  # it may have been retired while its reply was held
        self._ledgers.append(call.key, record)
        return record

    def _done(self, call: Call) -> None:
        self._calls.discard(call)
        if call.abandoned is not None:
            call.abandoned.cancel()
        # Every waiter may be gone: an error nobody awaits is not a fault of ours.
        if not call.task.cancelled() and (error := call.task.exception()) is not None:
            if len(call.tokens):
                self._tally.update(counted(What.DROPPED, Reason.ERROR))
            failures = self._failures.setdefault(call.key, [])
            failures.append(Failure(call.position, call.digest, str(error)[:500]))
            del failures[:-MOST_FAILURES]
        self.gate.touch()

    async def _join(self, call: Call) -> CallRecord:
        call.waiters += 1
        if call.abandoned is not None:
            call.abandoned.cancel()
            call.abandoned = None
        try:
            return await asyncio.shield(call.task)
        except asyncio.CancelledError:
            if call.task.cancelled():
                raise ProtocolError("stale_attempt", f"{call.key} was retired") from None
            raise
        finally:
            call.waiters -= 1
            if not call.waiters and not call.task.done():
                self._leave(call)

    def _leave(self, call: Call) -> None:
        loop = asyncio.get_running_loop()
        call.abandoned = loop.call_later(ABANDONED_SECONDS, self._abandon, call)

    def _abandon(self, call: Call) -> None:
        """Nobody waits any more: stop it in the engine too, and keep what it has for whoever asks again."""
        call.abandoned = None
        if self.gate.checkpoint_open:
            self._leave(call)  # what a checkpoint holds stays as it was reported
            return
        prefix = prefix_of(call)
        if prefix is not None and prefix.skipped:
            self._tally.update(counted(What.DROPPED, prefix.skipped))
        elif prefix is not None:
            self._prefixes.setdefault(call.key, []).append(prefix)
        self._tally[What.ABANDONED] += 1
        call.stopping = True  # asked for again it is another call
        call.task.cancel()

    def _going(self) -> list[Call]:
        """The calls in progress, without those that come to their end because nobody waited: what they had is kept
        already, and once more it would be somebody else's to go on from."""
        return [call for call in self._calls if not call.stopping]

    # ---- what is known --------------------------------------------------------------------------------------

    async def ledger(self, key: str) -> Ledger | None:
        """The calls of an episode, None where there are none."""
        return await self._ledgers.ledger(key) if key in self._ledgers else None

    def failures(self, key: str) -> list[Failure]:
        """The last calls of an episode that ended without a reply."""
        return list(self._failures.get(key, ()))

    def delete(self, key: str) -> bool:
        """Free an episode's captured calls, once they are not needed; whether there were any."""
        found = key in self._ledgers
        self._free(key)
        return found

    # ---- participant --------------------------------------------------------------------------------------

    def closing(self, restarts: frozenset[str]) -> None:
        self._cutting.close(self._going())

    def resumed(self) -> None:
        self._cutting.open()
        attempt = self.gate.fence.floor
        if self._begins is not None and attempt > self._begun:
            self._begun = attempt
            told = asyncio.ensure_future(self._begins(attempt))
            self._telling.add(told)
            told.add_done_callback(self._telling.discard)

    def _cut_made(self, counts: Mapping[str, int]) -> None:
        self._tally.update({name: count for name, count in counts.items() if count})

    def survey(self) -> Survey:
        counts = {"calls": len(self._calls), "ledgers": len(self._ledgers)}
        if self._prefixes:
            counts["prefixes"] = sum(map(len, self._prefixes.values()))
        counts.update(self._cutting.counts)
        return Survey(self._cutting.blockers(), counts)

    def generations(self) -> dict[str, int]:
        return dict(self._tally)

    async def export(self, scope: Scope) -> dict[str, bytes]:
        """Of an episode whose calls were damaged where they are kept, a record that nothing continues from: it is a
        restart, and no other's checkpoint is held up by it. Raises `checkpoint_error` where this process cannot read
        just now what it has."""
        cut = self._cutting.prefixes
        keys = {*self._ledgers, *self._prefixes, *cut}
        frozen = {key: [*self._prefixes.get(key, ()), *cut.get(key, ())] for key in sorted(keys) if scope.covers(key)}
        lost: dict[str, str] = {}
        with self._ledgers.reading(*frozen) as calls:

            def whole(key: str) -> Ledger:
                try:
                    return Ledger(assembled(calls[key]).calls, frozen[key])
                except Damaged as damaged:
                    lost[key] = damaged.detail
                    return Ledger(lost=damaged.detail)

            # Off the event loop, which serves the coordinator meanwhile; what a ledger holds is never changed.
            records = await asyncio.to_thread(lambda: {key: encode(key, whole(key)) for key in frozen})
        self._lose(lost)
        return records

    def _lose(self, lost: Mapping[str, str]) -> None:
        self.lost = frozenset(lost)
        if lost:
            self._tally[What.LEDGERS_LOST] += len(lost)
            named = "; ".join(f"{key}: {why}" for key, why in list(lost.items())[:MOST_NAMED])
            log.warning("a checkpoint does not continue what has lost its calls (%s): %s", len(lost), named)

    def read(self, records: Mapping[str, bytes], plan: RestorePlan) -> dict[str, Restored]:
        """Encodes each call as it is kept, here where the event loop does not wait for it. No more than one episode
        is in memory in full."""
        staged = {}
        for name, data in records.items():
            key, ledger = decode(name, data)
            episode = plan.restored(key)
            if episode is None:
                continue
            if ledger.lost:
                # Only a coordinator that does not know of `restarts` in a commit's reply asks for it.
                raise ProtocolError("invalid_checkpoint_state", f"{key} cannot be continued: {ledger.lost}")
            staged[episode.key] = Restored([kept_of(episode.key, call) for call in ledger.calls], ledger.prefixes)
        return staged

    def install(self, staged: dict[str, Restored]) -> list[str]:
        for key, (calls, prefixes) in staged.items():
            self._ledgers.install(key, calls)
            if prefixes:
                self._prefixes[key] = prefixes
            if unanswered := self._unanswered(key):
                self._replays[key] = unanswered
        return list(staged)

    def _unanswered(self, key: str) -> list[Kept]:
        """Replies that their caller may not have got: those without a position that no later call goes on from."""
        calls = self._ledgers.calls(key)
        parents = {kept.parent for kept in calls}
        return [kept for kept in calls if not kept.position and kept.chain not in parents]

    def uninstall(self) -> None:
        self._ledgers.clear()
        for known in (self._prefixes, self._replays, self._failures):
            known.clear()

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
        for key in {*self._ledgers, *self._prefixes, *self._replays, *self._failures}:
            if which(parse_key(key)):
                self._free(key)

    def _free(self, key: str) -> None:
        for prefix in self._prefixes.get(key, ()):
            if not prefix.skipped:
                self._tally.update(counted(What.DROPPED, Reason.UNCLAIMED))
        self._ledgers.drop(key)
        for known in (self._prefixes, self._replays, self._failures):
            known.pop(key, None)


def _meant(prefix: Prefix, call: Call) -> bool:
    """Whether a prefix is of this call, whatever it asks for now: at its position, or by parent and request."""
    if call.position or prefix.position:
        return prefix.position == call.position
    return (prefix.parent, prefix.digest) == (call.parent_chain, call.digest)
