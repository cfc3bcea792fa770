"""Keeps one cell in service: looks, decides, acts, and takes checkpoints. Where processes live is the host's matter.

Level-driven: `look` can be called at any time and as often as wanted. What takes long - putting a cell into service,
a checkpoint - runs beside it, so that a death is seen meanwhile.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import httpx

from gym_servers.coordination import blockers
from gym_servers.coordination import decide as d
from gym_servers.coordination.cell_host import CellHost, CellSettings, View, Wish
from gym_servers.coordination.checkpoint import (
    Checkpoint,
    CheckpointFailed,
    Outcome,
    Request,
    Tell,
    tombstone,
)
from gym_servers.coordination.choice import choice_of, people_decide
from gym_servers.coordination.client import ParticipantClient, Unreachable
from gym_servers.coordination.clocks import PeerClock
from gym_servers.coordination.continuation import Continuation
from gym_servers.coordination.install import InstallFailed, InstallRefused, RecordsRefused
from gym_servers.coordination.into_service import TEND_SECONDS, CodeMismatch, put_into_service
from gym_servers.coordination.record import (
    REFUSALS,
    CellRecord,
    Choice,
    Chosen,
    Hold,
    OpenCheckpoint,
    Recovery,
    Stage,
    published_under,
)
from gym_servers.coordination.restarts import BlockerRestarts
from gym_servers.coordination.settle import settle_left_open
from gym_servers.coordination.verbs import dismiss, leased, pass_on, renew, resume_all
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.messages import Status
from gym_servers.storage.cells import directory_name, highest_attempt, reserve_attempt
from gym_servers.storage.locate import join
from gym_servers.storage.manifest import Publication
from gym_servers.storage.store import ObjectStore, StorageError
from gym_servers.unattended import unattended


class CellController:
    """One cell. `open_store` opens a storage URI; `record` is what was persisted last, None for a new cell.
    `continuation`: what the recovery that it put into service continues, None before there was one."""

    def __init__(
        self,
        host: CellHost,
        settings: CellSettings,
        open_store: Callable[[str], ObjectStore],
        http: httpx.AsyncClient,
        record: CellRecord | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.record = record or CellRecord()
        self.settings = settings
        self.continuation: Continuation | None = None
        self._host, self._open_store, self._http, self._wall = host, open_store, http, wall
        self._clients: list[ParticipantClient] = []
        self._install: asyncio.Task[None] | None = None
        self._checkpoint: asyncio.Task[Outcome] | None = None
        self._restarts = BlockerRestarts(host.announce, self._update, wall)
        self._taking: Checkpoint | None = None
        self._reserved: tuple[int, float] | None = None
        self._clocks: defaultdict[str, PeerClock] = defaultdict(PeerClock)
        self._rows: int | None = None  # that were seen; None while none were counted
        self._seen: Mapping[str, d.Seen] = {}
        self._recovering = False
        self._changing = asyncio.Lock()
        self._settling = 0  # threads that may publish what is open, also such as nobody waits for any more

    @property
    def busy(self) -> bool:
        return any(task is not None and not task.done() for task in (self._install, self._checkpoint))

    async def close(self) -> None:
        """Give up what runs beside the looks, as when the coordinator ends."""
        for task in (self._install, self._checkpoint):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        self._install = None  # its outcome, a cancellation, is nobody's to judge
        await self._restarts.close()

    # ---- looking ------------------------------------------------------------------------------------------

    async def look(self) -> View:
        """One look and what follows from it. Raises StorageError where a decision needs storage that is away."""
        processes = await self._host.processes()
        self._clients = [
            self._client(p.name, p.kind, p.control_url) for p in processes if p.control_url is not None and p.alive
        ]
        answers = await asyncio.gather(*(self._status(client) for client in self._clients))
        statuses = {c.name: status for c, status in zip(self._clients, answers, strict=True)}
        seen = {p.name: d.Seen(p.incarnation, p.alive, statuses.get(p.name), p.detail, p.leaving) for p in processes}
        self._seen = seen
        if self.record.held:
            await self._reconsider()
        step = await self._after_install(seen) or d.next_step(self.record, seen, busy=self.busy)
        await self._act(step, seen)
        return View(self.record, seen, {p.name: p.kind for p in processes}, step)

    def _client(self, name: str, kind: str, url: str) -> ParticipantClient:
        token, previous = self.settings.token, self.settings.previous_token
        return ParticipantClient(name, kind, url, token, self._http, self._wall, previous, self._clocks[name])

    async def _status(self, client: ParticipantClient) -> Status | None:
        try:
            return await client.status()
        except (Unreachable, ProtocolError):
            return None

    async def _act(self, step: d.Step, seen: Mapping[str, d.Seen]) -> None:
        match step:
            case d.End(processes):
                await self._end(processes)
            case d.Start():
                await self._save(stage=Stage.STARTING, pins={}, ended={})
            case d.Install(pins):
                await self._save(pins=dict(pins))
                self._install = asyncio.create_task(self._put_into_service(restore=True))
            case d.Open():
                await self._save()  # another coordinator may be replacing these already
                self._install = asyncio.create_task(self._put_into_service(restore=False))
            case d.Recover(reason, planned):
                await self._recover(reason, planned, seen)
            case d.Settle():
                await self.settle()
            case d.Reopen(names):
                await self._reopen(names)
            case d.Hold(names):
                await self._hold(names)
            case d.GoOn():
                await self._go_on()
            case d.Tend():
                await self._tend(seen)
            case d.Wait():
                pass

    # ---- putting into service -----------------------------------------------------------------------------

    async def _put_into_service(self, *, restore: bool) -> None:
        record = self.record
        clients = [client for client in self._clients if client.name in record.pins]
        statuses = {name: one.status for name, one in self._seen.items() if one.status is not None}
        self.continuation = await put_into_service(
            record, self.settings, clients, statuses, self._open_store, self._wall, restore=restore
        )

    async def _after_install(self, seen: Mapping[str, d.Seen]) -> d.Step | None:
        """What follows from an installation that has ended since the last look."""
        task = self._install
        if task is None or not task.done():
            return None
        self._install = None
        if task.cancelled():
            return None  # it was given up for a recovery
        try:
            task.result()
        except CodeMismatch as error:
            return await self._hold_back(str(error))
        except RecordsRefused as error:
            await self._refused(error, REFUSALS)
            return d.Recover(f"checkpoint refused: {error}")
        except InstallRefused as error:
            await self._refused(error, 1)
            return d.Recover(f"not put into service: {error}")
        except (InstallFailed, Unreachable, ProtocolError) as error:
            return d.Recover(f"not put into service: {error}")
        except StorageError as error:
            await self._host.announce("Warning", "StorageError", str(error))
            return d.Wait(f"storage: {error}")
        await self._in_service()
        # What was seen is older than the end of the installation: some participants may still show as starting.
        return d.Wait("the cell has just been put into service")

    async def _hold_back(self, wrong: str) -> d.Step:
        """What is to be restored was written by other code. Neither an older one nor the input in its place: what it
        holds can be continued, by other processes than these or when somebody allows it."""
        choice = self.record.restore
        held = f"checkpoint {choice.name if choice is not None else ''} was written by other code: {wrong}"
        await self._save(held=held, held_for=Hold.CODE)
        await self._host.announce("Warning", "CodeMismatch", held)
        return d.Wait(held)

    async def _reconsider(self) -> None:
        """Let the cell go on once what it is held for is not so any more."""
        record, policy = self.record, self.settings.policy
        if record.held_for is Hold.CODE:
            if self.settings.any_code:
                await self._save(held="")
        elif policy == "Restart":
            *before, last = record.recoveries
            await self._save(
                held="", restore=None, recoveries=[*before, last.model_copy(update={"checkpoint": None})]
            )
        elif policy == "Restore":
            await self._save(held="")

    async def _refused(self, error: Exception, times: int) -> None:
        """What is being restored was refused, as if `times` times: often enough, and an older one is chosen."""
        choice, record = self.record.restore, self.record
        if choice is None:
            return
        refusals = record.refusals.get(choice.uri, 0) + times
        if refusals >= REFUSALS:
            await self._host.announce("Warning", "RecordsRefused", f"{choice.name}: {error}")
            await self._save(
                refused=[*record.refused, choice.uri],
                chosen=record.chosen_but(choice),
                recoveries=record.with_refusal(f"checkpoint {choice.name} was refused: {error}"),
            )
        else:
            await self._save(refusals={**record.refusals, choice.uri: refusals})

    async def _in_service(self) -> None:
        recoveries = list(self.record.recoveries)
        if recoveries and recoveries[-1].seconds is None:
            last = recoveries[-1]
            recoveries[-1] = last.model_copy(update={"seconds": round(self._wall() - last.started_at, 3)})
            source = f"checkpoint {last.checkpoint.name}" if last.checkpoint else "the input"
            await self._host.announce(
                "Normal", "Recovered", f"attempt {last.attempt} runs from {source} after {recoveries[-1].seconds} s"
            )
        await self._save(stage=Stage.RUNNING, recoveries=recoveries, refused=[], refusals={})

    # ---- recovery -----------------------------------------------------------------------------------------

    async def restore_chosen(self, wish: Wish) -> None:
        """Replace the cell's processes, whatever it is at, and continue from the checkpoint that is wished for. Once
        for each wish: asked again, nothing happens. Raises StorageError."""
        if self.record.chosen is None or self.record.chosen.by != wish.by:
            await self._recover(
                f"checkpoint {wish.choice.name} was asked for", True, self._seen, afresh=True, wish=wish
            )

    async def replace(self, reason: str) -> None:
        """Replace the cell's processes, whatever it is at, and continue from the newest checkpoint, or from what is
        being restored already. Raises StorageError."""
        await self._recover(reason, True, self._seen, afresh=True)

    async def give_up_chosen(self, by: str, reason: str) -> None:
        """Continue from the cell's own newest checkpoint after all: what `by` wished for cannot be restored, here or
        in another cell. Nothing happens where the cell is not at that wish. Raises StorageError."""
        record, chosen = self.record, self.record.chosen
        if chosen is None or chosen.by != by:
            return
        # Where it is in service its own part is good, and may be its newest: in its place it would lose work.
        good = record.stage in (Stage.RUNNING, Stage.STOPPED)
        await self._save(refused=[*record.refused, *([] if good else [chosen.choice.uri])], chosen=None)
        await self._recover(reason, True, self._seen, afresh=True)

    async def _recover(
        self,
        reason: str,
        planned: bool,
        seen: Mapping[str, d.Seen],
        *,
        afresh: bool = False,
        wish: Wish | None = None,
    ) -> None:
        """Settle what is open, use the next attempt up, choose what to restore; then the old processes go. `planned`:
        it is no failure. `afresh`: failures before do not count any more."""
        started = self._wall()
        self._recovering = True  # no checkpoint may begin from here on
        try:
            await self._replace(reason, planned, seen, started, afresh, wish)
        finally:
            self._recovering = False

    async def _replace(
        self,
        reason: str,
        planned: bool,
        seen: Mapping[str, d.Seen],
        started: float,
        afresh: bool,
        wish: Wish | None,
    ) -> None:
        if self._taking is not None:
            self._taking.death = reason
        await self.close()
        if self.record.open is not None:
            await self.settle(reopen=False)
        record = self.record
        if record.stage is Stage.STOPPED and not planned:
            await self._host.announce("Normal", "Stopped", f"{reason}: its end was expected")
            return
        before = 0 if afresh else record.failures
        failures = max(0, before) if planned else before + 1
        if failures > self.settings.backoff_limit:
            await self._save(stage=Stage.STALLED, failures=failures)
            await self._host.announce(
                "Warning", "RecoveryStalled", f"{failures - 1} recoveries in a row without progress; last: {reason}"
            )
            return
        choice, passed_over = await self._choice(record, planned) if wish is None else (wish.choice, [])
        above = max(record.attempt, wish.above if wish is not None else 0)
        attempt, started = self._reserved = await asyncio.to_thread(self._reserve, above, started)
        pins = record.pins
        # What is not pinned is fresh already, unless nothing is: then nobody knows who coordinated these processes.
        ended = {
            name: one.incarnation
            for name, one in seen.items()
            if one.incarnation is not None
            and (not pins or (name in pins and one.incarnation == pins[name].incarnation))
        }
        source = f"checkpoint {choice.name}" if choice else "the input"
        decided = not people_decide(record, self.settings, planned)
        recovery = Recovery(
            attempt=attempt,
            reason=reason,
            checkpoint=choice,
            started_at=started,
            planned=planned,
            passed_over=passed_over,
        )
        await self._save(
            stage=Stage.REPLACING,
            attempt=attempt,
            ended=ended,
            pins={},
            restore=choice,
            stopped=None,
            held="" if decided else f"{reason}, and people decide what comes of it: it would continue from {source}",
            held_for=Hold.CODE if decided else Hold.POLICY,
            **({"refused": [], "refusals": {}} if wish is not None else {}),  # somebody wants it tried again
            chosen=record.chosen if wish is None else Chosen(choice=wish.choice, by=wish.by, attempt=attempt),
            failures=failures,
            recoveries=record.with_recovery(recovery, self.settings.kept_recoveries),
        )
        self._reserved = None
        if decided:
            said: tuple[Literal["Normal", "Warning"], str] = (
                ("Normal", "GoingOn") if planned else ("Warning", "Recovering")
            )
            await self._host.announce(*said, f"{reason}; attempt {attempt} continues from {source}")
        else:
            await self._host.announce("Warning", "RecoveryHeld", self.record.held)
        if ended:
            await self._end(ended)

    async def _end(self, processes: Mapping[str, str]) -> None:
        """End these processes, and fresh ones come up."""
        await asyncio.gather(self._host.end(processes), self.dismiss(processes))

    async def dismiss(self, names: Collection[str] | None = None) -> None:
        """Those that would wait for a last checkpoint when they are told to end need not: none comes. All of them
        where no `names` are given."""
        if not self.settings.patient:
            return
        sessions = {name: one.status.session for name, one in self._seen.items() if one.status is not None}
        told = [c for c in self._clients if c.name in sessions and (names is None or c.name in names)]
        await asyncio.gather(*(dismiss(client, sessions[client.name]) for client in told))

    def _reserve(self, above: int, started: float) -> tuple[int, float]:
        """An attempt number for a recovery, and when that began: those of the one before, if it is not known that it
        was persisted. Else each look would use a number up for as long as that goes on; and perhaps it was: then it
        is the same recovery. Blocks. Raises StorageError."""
        cell = self._open_store(self.settings.root)
        if self._reserved is not None and self._reserved[0] > above and self._reserved[0] == highest_attempt(cell):
            return self._reserved
        return reserve_attempt(cell, above, f"recovery-{secrets.token_hex(8)}"), started

    async def _choice(self, record: CellRecord, planned: bool) -> tuple[Choice | None, list[str]]:
        """What to continue from, and what is passed over for it."""
        said: list[str] = []

        async def passed_over(message: str) -> None:
            said.append(message)
            await self._host.announce("Warning", "CheckpointUnusable", message)

        choice = await choice_of(record, self.settings, self._open_store, passed_over, self._wall(), planned=planned)
        return choice, record.passing_over(said)

    # ---- in service ---------------------------------------------------------------------------------------

    async def _tend(self, seen: Mapping[str, d.Seen]) -> None:
        """Pass on what the driver asks for, and let progress end a series of failures."""
        if (rows := _rows_of(seen)) is not None:
            if self.record.failures and self._rows is not None and rows > self._rows:
                await self._save(failures=0)
            self._rows = rows
        statuses = {name: one.status for name, one in seen.items() if one.status is not None}
        await pass_on(self._clients, statuses.values(), self._wall() + TEND_SECONDS)
        await self._restarts.see_to(self.record, self.settings.restart_blockers_after, statuses, self._clients)

    async def _reopen(self, names: Mapping[str, str]) -> None:
        await self._save()  # one that another coordinator has open looks the same to whoever does not know its record
        for checkpoint_id in sorted(set(names.values())):
            closed = [c for c in self._clients if names.get(c.name) == checkpoint_id]
            await resume_all(closed, checkpoint_id, self._wall() + TEND_SECONDS)

    # ---- stopped ------------------------------------------------------------------------------------------

    async def _hold(self, names: frozenset[str]) -> None:
        """Renew the leases of a stopped cell: nobody goes on by itself while it is looked after."""
        stopped = self.record.stopped
        if stopped is not None:
            held = [client for client in self._clients if client.name in names]
            grace = self.settings.lease_grace
            await asyncio.gather(*(renew(c, stopped.checkpoint_id, grace) for c in held), return_exceptions=True)

    async def release(self) -> None:
        """A stopped cell is to go on; the looks that follow see to it. Repeatable."""
        stopped = self.record.stopped
        if stopped is not None and stopped.stays:
            await self._save(stopped=stopped.model_copy(update={"stays": False}))

    async def _go_on(self) -> None:
        """Nothing has ended: the same processes go on under the same attempt. Whoever is not resumed here is found
        closed by the next look."""
        stopped = self.record.stopped
        if stopped is None:
            return
        await self._save(stage=Stage.RUNNING, stopped=None)
        await self._host.announce("Normal", "GoingOn", f"the cell goes on after checkpoint {stopped.name}")
        await resume_all(self._clients, stopped.checkpoint_id, self._wall() + TEND_SECONDS)

    # ---- checkpoints --------------------------------------------------------------------------------------

    async def take(
        self,
        checkpoint_id: str,
        name: str,
        tell: Tell,
        *,
        prepare_timeout: float | None = None,
        commit_timeout: float | None = None,
        episodes: frozenset[str] | None = None,
        stop: bool = False,
        replacing: str = "",
        labels: Mapping[str, str] | None = None,
        driver_state: Mapping[str, Any] | None = None,
    ) -> Outcome:
        """Take a checkpoint of a running cell. Raises CheckpointFailed. One at a time.

        With `stop` the cell stands stopped once it is published, until `release`: closed, or without processes. Where
        `replacing` says why, it goes on by itself instead, with fresh processes.
        `labels` and `driver_state` go into the publication as they are."""
        record = self.record
        if record.stage is not Stage.RUNNING or self.busy or self._recovering:
            raise CheckpointFailed("CellNotRunning", f"the cell is {record.stage}; try again when it runs")
        if record.open is not None:
            raise CheckpointFailed("CheckpointOpen", f"checkpoint {record.open.name} is not settled yet; try again")
        sequence = record.sequence + 1
        uri = join(self.settings.root, directory_name(record.attempt, sequence, checkpoint_id))
        request = Request(
            checkpoint_id,
            name,
            uri,
            self.settings.stack_uid,
            self.settings.cell,
            record.attempt,
            sequence,
            {participant: pin.session for participant, pin in record.pins.items()},
            self.settings.prepare_timeout if prepare_timeout is None else prepare_timeout,
            self.settings.commit_timeout if commit_timeout is None else commit_timeout,
            self.settings.lease_grace,
            episodes,
            stop,
            labels or {},
            driver_state,
        )
        left = OpenCheckpoint(
            checkpoint_id=checkpoint_id, name=name, uri=uri, sequence=sequence, stop=stop, replacing=replacing
        )
        checkpoint = self._taking = Checkpoint(
            [c for c in self._clients if c.name in record.pins], request, self._open_store(uri), tell, self._wall
        )
        self._checkpoint = taken = unattended(self._begin(left, checkpoint))
        try:
            return await asyncio.shield(taken)
        except asyncio.CancelledError:
            # It was ended while it was being given up already, not whoever asked for it: nobody knows what stands.
            if taken.cancelled():
                raise CheckpointFailed(
                    "ParticipantDied", checkpoint.death or "it was ended while it was being given up", settled=False
                ) from None
            raise

    async def _begin(self, left: OpenCheckpoint, checkpoint: Checkpoint) -> Outcome:
        await self._save(open=left, sequence=left.sequence)
        try:
            outcome = await checkpoint.take()
        except CheckpointFailed as failure:
            still = None if failure.settled else left.model_copy(update={"given_up": True})
            waited_for, answered = failure.blockers, checkpoint.answered
            await self._update(
                lambda record: {"open": still, "blocked": blockers.counted(record.blocked, waited_for, answered)}
            )
            raise
        async with checkpoint.held():  # until the record says who is to hold what it has stopped
            await self._save(failures=0, blocked=[], **published_under(left, outcome.digest))
        return outcome

    async def forsake(self, checkpoint_id: str) -> None:
        """Nobody wants this checkpoint any more: if it is open, it is not to be published. Nothing is changed while
        something may still publish it: it has to be asked again. Raises what saving the record raises."""

        def change(record: CellRecord) -> Mapping[str, Any]:
            left = record.open
            if left is None or left.checkpoint_id != checkpoint_id or self._settling:
                return {}
            return {"open": left.model_copy(update={"given_up": True})}

        await self._update(change)

    async def settle(self, *, reopen: bool = True) -> tuple[Publication, str] | None:
        """Settle the checkpoint that was left open and reopen whoever it closed; what became of it, None where there
        is none, or it lies where nobody looks any more. Raises StorageError.

        `reopen=False` where the processes are about to be replaced."""
        left = self.record.open
        if left is None:
            return None
        request = Request(
            left.checkpoint_id,
            left.name,
            left.uri,
            self.settings.stack_uid,
            self.settings.cell,
            self.record.attempt,
            left.sequence,
            {},
        )
        if reopen:
            await self._save()  # raises where another coordinator has taken over: what is open may be its own by now
        if reopen and not left.stop:
            await resume_all(self._clients, left.checkpoint_id, self._wall() + TEND_SECONDS)
        grave = tombstone(request, "its coordinator ended before it was published", self._wall())
        # What was to stop stays closed until it is known whether it has: if it has, nobody may go on behind its cut.
        # If not, the next look finds it closed for nothing.
        try:
            async with leased(
                lambda: self._clients if left.stop else (), left.checkpoint_id, self.settings.lease_grace
            ):
                store = self._open_store(left.uri)
                async with self._changing:  # by what the record says now
                    stands = self.record.open or left
                    work = unattended(asyncio.to_thread(settle_left_open, store, stands, grave))
                    self._settling += 1
                    work.add_done_callback(self._thread_ended)
                settled = await asyncio.shield(work)
        except StorageError as error:
            if left.uri.startswith(join(self.settings.root, "")):
                raise
            # Another storage was chosen since. Nothing is continued from there any more, and nobody knows of it here.
            await self._save(open=None)
            text = f"checkpoint {left.name} is given up where the stack keeps its checkpoints no more: {error}"
            await self._host.announce("Warning", "CheckpointUnusable", text)
            return None
        published = settled[0].state == "published"
        await self._save(**published_under(left, settled[1]) if published else {"open": None})
        return settled

    def _thread_ended(self, _: object) -> None:
        self._settling -= 1

    async def _save(self, **changes: Any) -> None:
        """Persist first, then believe: what is not durable did not happen."""
        await self._update(lambda _: changes)

    async def _update(self, change: Callable[[CellRecord], Mapping[str, Any]]) -> None:
        """As `_save`, by what the record says once nobody else is changing it."""
        async with self._changing:
            record = self.record.model_copy(update=dict(change(self.record)))
            await self._host.save(record)
            self.record = record


def _rows_of(seen: Mapping[str, d.Seen]) -> int | None:
    """How many rows of the cell are done; None where its driver does not say, or has not counted them yet."""
    told = [one.status.progress for one in seen.values() if one.status is not None]
    return next((progress["rows"] for progress in told if progress.get("expected")), None)
