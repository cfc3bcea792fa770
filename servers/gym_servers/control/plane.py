"""The control plane of one participant: carries out what `protocol.phases` decides.

State moves happen on the event loop without an await in between, so verbs and lease expiry are serialised. What
takes long - waiting for readiness, freezing, reading records - looks at the generation again when it comes back:
a resume, an expiry or a newer checkpoint in the meantime ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gym_servers.control.lease import Lease
from gym_servers.control.retires import Retires
from gym_servers.control.writes import Author, OpenStore, RecordWrite, check_written, read_back
from gym_servers.participants.base import Participant, RestorePlan, Scope, Survey, plan_restore
from gym_servers.protocol import messages as m
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import InvalidIdentity, parse_key
from gym_servers.protocol.phases import LEASED, Input, Phase, Verdict, judge, moved, remember
from gym_servers.storage.manifest import CodeIdentity
from gym_servers.unattended import unattended

log = logging.getLogger("gym_servers")

T = TypeVar("T")

PARK_SECONDS = 10.0  # for parking sessions at the end of a process: well within what its host grants it


@dataclass(frozen=True)
class _Commit:
    request: m.CommitRequest
    task: asyncio.Task[m.CommitReply]


@dataclass(frozen=True)
class _Frozen:
    """What a commit writes; the episodes that the environment exports; those in scope that are restarts after all."""

    records: dict[str, bytes]
    episodes: list[str]
    restarts: list[str]


@dataclass(frozen=True)
class _Read:
    """Records on their way into the participant."""

    source: str
    marks: Mapping[str, int]
    staged: Any


class ControlPlane:
    """The verbs of the control API over one participant.

    `open_store` opens a checkpoint's URI; `grace` is the lease in seconds; `wall` gives Unix time.
    """

    def __init__(
        self,
        participant: Participant,
        author: Author,
        open_store: OpenStore,
        *,
        grace: float,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.participant, self.author = participant, author
        self.gate = participant.gate
        self._open_store, self._wall = open_store, wall
        self._lease = Lease(grace, self._expired, wall)
        self._write: RecordWrite | None = None
        self._commit: _Commit | None = None
        self._restored: tuple[m.RestoreRequest, m.RestoreReply] | None = None
        self._restored_from: str | None = None
        self._restoring = asyncio.Lock()
        self._retires = Retires(self.gate, participant.retire)
        self._parked = False
        self.dismissed = False  # the coordinator has no use for this process any more

    # ---- prepare ------------------------------------------------------------------------------------------

    async def prepare(self, request: m.PrepareRequest) -> m.PhaseReply:
        """Close admission and wait for readiness until the deadline; not ready is a reply, not an error."""
        verdict = judge(self.gate.control, Input.PREPARE, request.checkpoint_id)
        if verdict is Verdict.PROCEED:
            if self._write is not None and self._write.running:
                raise ProtocolError(
                    "checkpoint_conflict", f"checkpoint {self._write.status.checkpoint_id} is still being written"
                )
            self.gate.move(moved(self.gate.control, Input.PREPARE, request.checkpoint_id))
            self._lease.renew()
        self.participant.closing(frozenset(request.restarts))
        generation = self.gate.control.generation

        def settled() -> bool:
            return self._over(generation) or self._ready()

        await self._until(request.deadline_ts, settled)
        self._require(generation, request.checkpoint_id)
        return m.PhaseReply(phase=self.gate.phase, report=self.report())

    def _ready(self) -> bool:
        """Readiness that was reached stays: what is parked cannot start again before resume."""
        if self.gate.phase is Phase.PREPARING and self._survey().ready:
            self.gate.move(moved(self.gate.control, Input.READY))
        return self.gate.phase is not Phase.PREPARING

    def _over(self, generation: int) -> bool:
        return self.gate.control.generation != generation or self.gate.control.checkpoint_id is None

    # ---- commit -------------------------------------------------------------------------------------------

    async def commit(self, request: m.CommitRequest) -> m.CommitReply:
        """Freeze the records in scope and write them; with `background` reply once they are frozen.

        Repeated it joins, or looks again at what was written; a commit that failed is carried out anew.
        """
        verdict = judge(self.gate.control, Input.COMMIT, request.checkpoint_id)
        current = self._commit
        if current is None or current.request.checkpoint_id != request.checkpoint_id or _failed(current.task):
            current = self._commit = _Commit(request, unattended(self._carry_out(request)))
        elif current.request != request.model_copy(update={"deadline_ts": current.request.deadline_ts}):
            raise ProtocolError("checkpoint_conflict", "this checkpoint is committed with another directory or scope")
        reply = await self._before(request.deadline_ts, asyncio.shield(current.task))
        if verdict is Verdict.REPEAT and self._write is not None and not self._write.running:
            digest = (await self._write.result()).manifest_digest or ""
            await self._before(
                request.deadline_ts,
                asyncio.to_thread(check_written, self._open_store, self.author, request.checkpoint_dir, digest),
            )
            reply = reply.model_copy(update={"manifest_digest": digest})
        return reply

    async def _carry_out(self, request: m.CommitRequest) -> m.CommitReply:
        """Committed is what is frozen, with `background`, else what is durable: a write that fails leaves the
        participant prepared."""
        generation = self.gate.control.generation
        frozen = await self._freeze(request, generation)
        records, episodes = frozen.records, frozen.episodes
        write = self._write = RecordWrite(
            self._open_store,
            self.author,
            request.checkpoint_id,
            request.checkpoint_dir,
            records,
            episodes,
            self.gate.fence.marks,
            background=request.background,
            seconds=self._remaining(request.deadline_ts),
        )
        digest = None
        if not request.background:
            digest = (await write.result()).manifest_digest
            self._require(generation, request.checkpoint_id)
        self.gate.move(moved(self.gate.control, Input.COMMIT))
        return m.CommitReply(
            phase=self.gate.phase,
            manifest_digest=digest,
            episodes=episodes,
            records=len(records),
            bytes=write.status.bytes,
            restarts=frozen.restarts,
        )

    async def _freeze(self, request: m.CommitRequest, generation: int) -> _Frozen:
        survey = self._survey()
        if not survey.ready:
            raise ProtocolError("checkpoint_error", f"no longer ready: {survey.blockers[0].where}")
        keys = frozenset(request.episode_ids) if request.episode_ids is not None else None
        export = asyncio.ensure_future(self.participant.export(Scope(keys, frozenset(request.live))))
        ended = asyncio.ensure_future(self.gate.wait_until(lambda: self._over(generation)))
        try:
            await self._before(
                request.deadline_ts, asyncio.wait({export, ended}, return_when=asyncio.FIRST_COMPLETED)
            )
            self._require(generation, request.checkpoint_id)
            records = self._exported(export)
        finally:
            export.cancel()
            ended.cancel()
        exported = set(survey.episodes or ()) & set(records)
        return _Frozen(records, sorted(exported), sorted(self.participant.lost))

    def _require(self, generation: int, checkpoint_id: str) -> None:
        if self._over(generation):
            raise ProtocolError("stale_checkpoint", f"checkpoint {checkpoint_id} was ended meanwhile")

    def _exported(self, export: asyncio.Task[dict[str, bytes]]) -> dict[str, bytes]:
        try:
            return export.result()
        except ProtocolError:
            raise
        except Exception as error:
            # A server's own hook: told at once, or the coordinator would ask again until its deadline.
            log.exception("%s could not export its records", self.author.instance)
            raise ProtocolError("checkpoint_error", f"the export failed: {type(error).__name__}") from error

    # ---- restore, resume ----------------------------------------------------------------------------------

    async def restore(self, request: m.RestoreRequest) -> m.RestoreReply:
        """Read and check every record off the event loop, build what they need out of reach of everything, then
        install all in one step, or none."""
        async with self._restoring:
            verdict = judge(self.gate.control, Input.RESTORE, request.checkpoint_id)
            if verdict is Verdict.REPEAT and self._restored is not None:
                known, reply = self._restored
                if known != request.model_copy(update={"deadline_ts": known.deadline_ts}):
                    raise ProtocolError(
                        "checkpoint_conflict", "another directory or scope was restored under this id"
                    )
                return reply
            self._require_meant(request.session)
            if request.cell_attempt < self.gate.fence.floor:
                raise ProtocolError("stale_attempt", f"a later recovery than {request.cell_attempt} was here")
            try:
                plan = plan_restore(request.episode_ids, request.cell_attempt, request.attempts, request.restarts)
            except InvalidIdentity as error:
                raise ProtocolError("invalid_request", str(error)) from error
            plan = plan.beyond(self.gate.fence.marks)
            read = await self._before(request.deadline_ts, asyncio.to_thread(self._read, request, plan))
            plan.check(read.marks)
            staged = await self._before(request.deadline_ts, self._build(read.staged))
            try:
                judge(self.gate.control, Input.RESTORE, request.checkpoint_id)
                self.gate.fence.raise_floor(request.cell_attempt)
            except ProtocolError:
                self.participant.discard(staged)
                raise
            self.gate.fence.restore(read.marks)
            self.gate.fence.restore(plan.marks())
            restored = self.participant.install(staged)
            self.participant.origin = request.origin
            self.gate.move(moved(self.gate.control, Input.RESTORE, request.checkpoint_id))
            self._lease.renew()
            reply = m.RestoreReply(phase=self.gate.phase, source_checkpoint_id=read.source, restored=sorted(restored))
            self._restored, self._restored_from = (request, reply), request.checkpoint_id
            return reply

    def _read(self, request: m.RestoreRequest, plan: RestorePlan) -> _Read:
        manifest, records = read_back(
            self._open_store,
            self.author,
            request.checkpoint_dir,
            request.manifest_digest,
            any_code=request.any_code,
        )
        try:
            return _Read(manifest.checkpoint_id, manifest.marks, self.participant.read(records, plan))
        except ProtocolError:
            raise
        except Exception as error:
            log.exception("%s could not read its records", self.author.instance)
            raise ProtocolError(
                "invalid_checkpoint_state", f"the records cannot be read: {type(error).__name__}"
            ) from error

    async def _build(self, read: Any) -> Any:
        try:
            return await self.participant.build(read)
        except ProtocolError:
            raise
        except Exception as error:
            # The records are whole: building what they describe failed, here and now. It is for the coordinator to
            # say when that is no chance any more.
            log.exception("%s could not build what its records describe", self.author.instance)
            raise ProtocolError(
                "install_failed", f"the records could not be installed: {type(error).__name__}"
            ) from error

    async def resume(self, request: m.ResumeRequest) -> m.PhaseReply:
        """Open admission: after a checkpoint, a restore, or a start that has nothing to restore."""
        checkpoint_id = request.checkpoint_id
        if judge(self.gate.control, Input.RESUME, checkpoint_id) is Verdict.NOTHING:
            self.gate.control = remember(self.gate.control, checkpoint_id)
            return m.PhaseReply(phase=self.gate.phase)
        fresh = self.gate.phase in (Phase.STARTING, Phase.RESTORED)
        if self.gate.phase is Phase.STARTING:
            if request.cell_attempt is None:
                # A resume that was meant for the process before this one must not open it.
                raise ProtocolError("invalid_phase", "a fresh process is resumed with its cell_attempt")
            self._require_meant(request.session)
            self.gate.fence.raise_floor(request.cell_attempt)
        self._reopen(Input.RESUME, checkpoint_id)
        if fresh:
            log.info("in service, attempt %d", self.gate.fence.floor)
        return m.PhaseReply(phase=self.gate.phase)

    def _require_meant(self, session: str | None) -> None:
        """A verb that is repeated until it is answered may reach the process that took the place of the one it was
        meant for: opened under an attempt that was not persisted for it, it would use its numbers again."""
        if session is not None and session != self.author.session:
            raise ProtocolError("invalid_phase", f"session {session} was meant, this is {self.author.session}")

    def _reopen(self, by: Input, checkpoint_id: str | None = None) -> None:
        self._lease.end()
        if self._write is not None and not self._write.background:
            self._write.stop()
        self._commit = None
        if self._parked:
            self._parked = False
            self.participant.unpark()
        self.gate.move(moved(self.gate.control, by, checkpoint_id))
        if self.gate.is_open:
            self.participant.resumed()

    def _expired(self) -> None:
        if self.gate.phase not in LEASED:
            return
        if self.gate.phase is Phase.RESTORED:
            self.participant.uninstall()
            self.participant.origin = None
            self._restored, self._restored_from = None, None
        # A commit whose coordinator vanished must not be published by what it left running.
        if self._write is not None and self.gate.phase is Phase.COMMITTED:
            self._write.stop()
        self._reopen(Input.EXPIRE)

    def parking(self) -> Coroutine[Any, Any, None] | None:
        """What is to be done before this process may end: after a commit with `stop` its sessions are parked. None
        where nothing is. A resume that comes first takes it back."""
        if self._parked or not self.stopped:
            return None
        self._parked = True
        return self._park()

    @property
    def stopped(self) -> bool:
        """Whether it is closed by a commit with `stop`."""
        commit = self._commit
        return self.gate.phase is Phase.COMMITTED and commit is not None and commit.request.stop

    def end(self, request: m.EndRequest) -> m.PhaseReply:
        """No checkpoint comes any more: once it is told to end it need not wait for one."""
        self._require_meant(request.session)
        self.dismissed = True
        self.gate.touch()
        return m.PhaseReply(phase=self.gate.phase)

    async def _park(self) -> None:
        try:
            async with asyncio.timeout(PARK_SECONDS):
                await self.participant.park()
        except Exception:
            log.exception("sessions of %s could not be parked", self.author.instance)  # they end with the process

    # ---- retire, forget, renew, status --------------------------------------------------------------------

    async def retire(self, request: m.RetireRequest) -> m.RetireReply:
        """Mark the episodes stale, stop their work, free their state, then reply. Repeatable."""
        self._require_settled("retire")
        try:
            episodes = [parse_key(key) for key in dict.fromkeys(request.episode_ids)]
        except InvalidIdentity as error:
            raise ProtocolError("invalid_request", str(error)) from error
        if request.unclaimed:
            # What is stale was given up already: the reply to that may have been lost.
            held, fence = self._survey().unclaimed or frozenset(), self.gate.fence
            episodes = [one for one in episodes if one.key in held or fence.is_stale(one)]
        for episode in episodes:
            self.gate.fence.mark(episode.rollout_id, episode.attempt)
        await self._before(request.deadline_ts, self._retires.carry_out(episodes))
        return m.RetireReply(retired=[episode.key for episode in episodes])

    async def forget(self, request: m.ForgetRequest) -> m.ForgetReply:
        """These rollouts are over: drop their watermarks and what was kept for their duplicates."""
        self._require_settled("forget")
        for rollout in request.rollout_ids:
            self.gate.fence.forget(rollout)
        self._retires.forget(request.rollout_ids)
        self.participant.forget(request.rollout_ids)
        return m.ForgetReply(forgotten=request.rollout_ids)

    def _require_settled(self, verb: str) -> None:
        if self.gate.phase not in (Phase.IDLE, Phase.RESTORED):
            raise ProtocolError("invalid_phase", f"{verb} is not possible in phase {self.gate.phase}")

    def renew(self, request: m.RenewRequest) -> m.RenewReply:
        """Extend the lease. Raises `stale_checkpoint` where this checkpoint is not open here any more."""
        if self.gate.control.checkpoint_id != request.checkpoint_id or self.gate.phase not in LEASED:
            raise ProtocolError("stale_checkpoint", f"checkpoint {request.checkpoint_id} is not open here")
        self._lease.renew()
        return m.RenewReply(lease_expires_at=self._lease.expires_at() or 0.0)

    def _survey(self) -> Survey:
        """Also what a retire has still to free holds a checkpoint up."""
        survey = self.participant.survey()
        return replace(survey, blockers=[*survey.blockers, *self._retires.blockers()])

    def report(self) -> m.Report:
        survey = self._survey()
        blockers = sorted(survey.blockers, key=lambda blocker: -blocker.age_seconds)
        return m.Report(
            ready=survey.ready,
            blockers=blockers[: m.MAX_BLOCKERS],
            blocker_count=len(blockers),
            counts=dict(survey.counts),
            restarts=sorted(survey.restarts),
            episodes=None if survey.episodes is None else sorted(survey.episodes),
            unclaimed=None if survey.unclaimed is None else sorted(survey.unclaimed),
        )

    def status(self) -> m.Status:
        control = self.gate.control
        return m.Status(
            kind=self.author.kind,
            instance=self.author.instance,
            session=self.author.session,
            phase=control.phase,
            cell_attempt=self.gate.fence.floor,
            restored_from=self._restored_from,
            checkpoint_id=control.checkpoint_id,
            lease_expires_at=self._lease.expires_at(),
            write=self._write.status if self._write is not None else None,
            report=self.report(),
            retired=self._retires.done,
            to_retire=self.participant.to_retire(),
            to_forget=self.participant.to_forget()[:1000],
            progress=self.participant.progress(),
            generations=self.participant.generations(),
            problem=self.participant.problem,
            problem_reason=self.participant.problem_reason,
            code=_code(self.author.code),
        )

    # ---- deadlines ----------------------------------------------------------------------------------------

    def _remaining(self, deadline_ts: float) -> float:
        return max(0.0, deadline_ts - self._wall())

    async def _until(self, deadline_ts: float, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._remaining(deadline_ts)):
                await self.gate.wait_until(condition)
        except TimeoutError:
            pass

    async def _before(self, deadline_ts: float, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(self._remaining(deadline_ts)):
                return await work
        except TimeoutError as error:
            raise ProtocolError("deadline_exceeded", "not done by the deadline; it can be asked again") from error


def _code(code: CodeIdentity) -> m.Code:
    return m.Code(image=code.image, server=code.server, record_format=code.record_format)


def _failed(task: asyncio.Task[Any]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)
