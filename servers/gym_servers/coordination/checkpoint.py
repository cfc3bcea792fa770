"""Taking one checkpoint of a cell.

    prepare in order -> commit all at once -> renew all -> resume in order -> await the writes -> publish

Records are frozen in memory while the cell is paused and written after it goes on. Whatever fails, every
participant that was closed is resumed, and a tombstone keeps what was written from ever being published.

With `stop` the cell does not go on: what is written is awaited and published while everybody stays closed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from gym_servers.coordination.client import ParticipantClient, Unreachable
from gym_servers.coordination.order import PREPARE, staged
from gym_servers.coordination.terms import (
    CheckpointFailed,
    Outcome,
    Progress,
    Request,
    Tell,
    failure_of,
    give_up,
    tombstone,
)
from gym_servers.coordination.verbs import leased, renew, resume_all, retire_unclaimed, together
from gym_servers.protocol import messages as m
from gym_servers.protocol.digests import sha256
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.cells import PROPOSAL, settle, verify
from gym_servers.storage.manifest import Member, Publication
from gym_servers.storage.packs import load_manifest
from gym_servers.storage.store import ObjectStore, StorageError

__all__ = ["Checkpoint", "CheckpointFailed", "Outcome", "Progress", "Request", "Tell", "tombstone"]

log = logging.getLogger("gym_servers")

RESUME_SECONDS = 10.0  # for a resume after a failure; the lease is the second line
DEATH_RESUME_SECONDS = 0.5  # in all, for a resume before the processes are replaced: recovery does not wait for it
RETIRE_SECONDS = 30.0  # for freeing what a published checkpoint leaves out
POLL_SECONDS = 0.1  # between looks at a background write
MOST_NAMED = 10  # in one line of the log


class Checkpoint:
    """One checkpoint in progress; `take` runs it once. `tell` is awaited before the phase it announces."""

    def __init__(
        self,
        clients: Sequence[ParticipantClient],
        request: Request,
        store: ObjectStore,
        tell: Tell,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._clients, self._request, self._store, self._tell, self._wall = clients, request, store, tell, wall
        self._closed: list[ParticipantClient] = []
        self._restarts: set[str] = set()
        self._paused_at = self._pause = 0.0
        self._commits: dict[str, m.CommitReply] = {}
        self._asked = False  # records may have been written: from here on a failure leaves a tombstone
        self._scope: list[str] = []
        self._left_out: set[str] = set()
        self._proved = False  # every freeze: no lease ran out between the first and the last
        self._publication: Publication | None = None
        self.answered: set[str] = set()  # participants that said whether they are ready, and for whom they are not
        self.death = ""  # whose, and how it showed: set before `take` is cancelled for it

    async def take(self) -> Outcome:
        """Raises CheckpointFailed; when cancelled (a participant died) it publishes if the freezes are proved and
        everything is durable already, else it gives the checkpoint up, and then ends."""
        try:
            return await self._run()
        except asyncio.CancelledError:
            return await self._after_death()
        except Exception as error:
            return await self._give_up(failure_of(error))

    async def _run(self) -> Outcome:
        await self._tell(Progress("Preparing", self._phases()))
        async with leased(lambda: self._closed, self._request.checkpoint_id, self._request.lease_grace):
            self._scope, live = await self._prepare()
            await self._tell(Progress("Committing", self._phases()))
            await self._commit(self._scope, live)
            await self._renew_once()
            self._proved = True
            if self._request.stop:
                return await self._publish(await self._written())
        problems = await self._resume()
        durable = await self._durable() if problems else await self._written()
        if durable is None:
            raise CheckpointFailed("ResumeFailed", "; ".join(problems.values()))
        outcome = await self._publish(durable)
        await self._retire_left_out()
        return outcome

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """After `take` with `stop`: keep the participants closed for as long as the block runs. Without it their
        leases run out and they go on by themselves."""
        async with leased(lambda: self._closed, self._request.checkpoint_id, self._request.lease_grace):
            yield

    async def _after_death(self) -> Outcome:
        failure = CheckpointFailed(
            "ParticipantDied", self.death or "a participant died while the checkpoint was open"
        )
        try:
            durable = await self._durable() if self._proved else None
            if durable is not None:
                if not self._request.stop:
                    await self._take_leave()
                return await self._publish(durable)
        except Exception as error:
            failure = failure_of(error)
        return await self._give_up(failure, died=True)

    # ---- prepare ------------------------------------------------------------------------------------------

    async def _prepare(self) -> tuple[list[str], list[str]]:
        await together(*(self._free(client) for client in self._clients))
        deadline = self._wall() + self._request.prepare_timeout
        self._paused_at = time.monotonic()
        exportable: set[str] = set()
        live: set[str] = set()
        for stage in staged(self._clients, PREPARE):
            replies = await together(*(self._prepare_one(client, deadline) for client in stage))
            self.answered |= {client.name for client in stage}
            for client, report in zip(stage, replies, strict=True):
                self._restarts |= set(report.restarts)
                if client.kind == "environment":
                    exportable |= set(report.episodes or ())
                    live |= set(report.episodes or ()) | set(report.restarts)
            unready = [(c.name, report) for c, report in zip(stage, replies, strict=True) if not report.ready]
            if unready:
                raise self._not_ready(unready)
        scope = {key for key in exportable - self._restarts if self._request.keeps(key)}
        self._left_out = exportable - self._restarts - scope
        return sorted(scope), sorted(live - scope)

    def _not_ready(self, unready: Sequence[tuple[str, m.Report]]) -> CheckpointFailed:
        blocked = [(name, blocker) for name, report in unready for blocker in report.blockers]
        name, why = unready[0][0], "it does not say why"
        if blocked:
            name, first = blocked[0]
            where = f"{first.id} is in {first.where} for {first.age_seconds:.1f} s"
            why = f"{where} ({len(blocked)} blockers)"
        seconds = f"{self._request.prepare_timeout:g} s"
        return CheckpointFailed("PrepareTimeout", f"{name} was not ready in {seconds}: {why}", blocked)

    async def _free(self, client: ParticipantClient) -> None:
        """Wait, with everybody still at work, for what an earlier checkpoint left being written."""
        give_up = self._wall() + self._request.prepare_timeout
        while (write := (await client.status_by(give_up)).write) is not None and write.state == "writing":
            if self._wall() >= give_up:
                raise CheckpointFailed(
                    "PrepareTimeout", f"{client.name} still writes the records of {write.checkpoint_id}"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def _prepare_one(self, client: ParticipantClient, deadline: float) -> m.Report:
        status = await client.status_by(deadline)
        pinned = self._request.sessions.get(client.name)
        if status.session != pinned:
            raise CheckpointFailed("SessionChanged", f"{client.name} is another process than the one that runs")
        self._closed.append(client)
        reply = await client.call(
            "prepare",
            m.PrepareRequest(
                checkpoint_id=self._request.checkpoint_id, deadline_ts=deadline, restarts=sorted(self._restarts)
            ),
            m.PhaseReply,
        )
        return reply.report or m.Report(ready=False)

    # ---- commit -------------------------------------------------------------------------------------------

    async def _commit(self, scope: list[str], live: list[str]) -> None:
        request = m.CommitRequest(
            checkpoint_id=self._request.checkpoint_id,
            deadline_ts=self._wall() + self._request.commit_timeout,
            checkpoint_dir=self._request.uri,
            episode_ids=scope,
            live=live,
            stop=self._request.stop,
            background=not self._request.stop,
        )
        self._asked = True
        replies = await together(*(self._commit_one(client, request) for client in self._clients))
        self._commits = {client.name: reply for client, reply in zip(self._clients, replies, strict=True)}
        if late := {key for reply in replies for key in reply.restarts}:
            named = ", ".join(sorted(late)[:MOST_NAMED])
            log.warning(
                "checkpoint %s does not continue what cannot be (%s): %s", self._request.name, len(late), named
            )
        self._restarts |= late

    async def _commit_one(self, client: ParticipantClient, request: m.CommitRequest) -> m.CommitReply:
        try:
            return await client.call("commit", request, m.CommitReply)
        except ProtocolError:
            status = await client.status_by(request.deadline_ts)
            if status.session != self._request.sessions.get(client.name):
                raise CheckpointFailed(
                    "SessionChanged", f"{client.name} was started again after it was prepared"
                ) from None
            raise

    async def _renew_once(self) -> None:
        """Nobody's lease may have run out between the first freeze and the last: one refusal aborts."""
        request = self._request
        await together(*(renew(client, request.checkpoint_id, request.lease_grace) for client in self._clients))

    async def _resume(self, seconds: float = RESUME_SECONDS) -> dict[str, str]:
        problems = await resume_all(self._closed, self._request.checkpoint_id, self._wall() + seconds)
        self._closed = []  # only now: whoever is cancelled before has to resume them again
        if self._paused_at and not self._pause:
            self._pause = time.monotonic() - self._paused_at
        return problems

    async def _take_leave(self) -> None:
        """Resume as a courtesy. Whoever is dead may swallow what is sent, and each stage would wait for that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(DEATH_RESUME_SECONDS):
                await self._resume(DEATH_RESUME_SECONDS)

    async def _retire_left_out(self) -> None:
        """Restored records that nobody has claimed, and that this checkpoint leaves out, are not going to run: what
        they hold is freed. Whatever is missed shows again in the next checkpoint."""
        if not self._left_out:
            return
        verb_id = f"{self._request.checkpoint_id[:100]}-left-out"
        try:
            await retire_unclaimed(self._clients, verb_id, sorted(self._left_out), self._wall() + RETIRE_SECONDS)
        except (ProtocolError, Unreachable) as error:
            log.warning(
                "checkpoint %s is published; what it left out is still to be retired: %s", self._request.name, error
            )

    # ---- write and publish --------------------------------------------------------------------------------

    async def _written(self) -> dict[str, str]:
        deadline = self._wall() + self._request.commit_timeout
        digests = await together(*(self._write_of(client, deadline) for client in self._clients))
        return {client.name: digest for client, digest in zip(self._clients, digests, strict=True)}

    async def _write_of(self, client: ParticipantClient, deadline: float) -> str:
        while True:
            try:
                write = (await client.status()).write
            except Unreachable:
                write = None  # asked again: whether it died is for others to say
            if write is not None and write.checkpoint_id == self._request.checkpoint_id:
                if write.state == "done" and write.manifest_digest is not None:
                    return write.manifest_digest
                if write.state in ("failed", "stopped"):
                    raise CheckpointFailed("WriteFailed", f"{client.name}: {write.detail or 'its write was stopped'}")
            if self._wall() > deadline:
                raise CheckpointFailed(
                    "WriteTimeout", f"{client.name} did not write in {self._request.commit_timeout:g} s"
                )
            await asyncio.sleep(POLL_SECONDS)

    async def _durable(self) -> dict[str, str] | None:
        """Every participant's manifest digest, if all are durable."""

        def look() -> dict[str, str]:
            return {c.name: load_manifest(self._store, f"{c.kind}/{c.name}", None)[1] for c in self._clients}

        try:
            return await asyncio.to_thread(look)
        except (ProtocolError, StorageError):
            return None

    async def _publish(self, digests: Mapping[str, str]) -> Outcome:
        # Composed once: a second try, after a death, must propose the same bytes.
        if self._publication is None:
            self._publication = await asyncio.to_thread(self._compose, digests)
        publication = self._publication
        await asyncio.to_thread(verify, self._store, publication.members, publication.checkpoint_id)
        # Durable before it is announced: whoever finds the announcement can finish or refuse the publication.
        await asyncio.to_thread(self._store.create, PROPOSAL, publication.to_bytes())
        await self._tell(Progress("Publishing", self._phases()))
        landed = await asyncio.to_thread(settle, self._store, publication)
        if landed.state != "published":
            raise CheckpointFailed("GivenUp", landed.reason or "another coordinator gave this checkpoint up")
        return self._outcome(landed)

    def _outcome(self, landed: Publication) -> Outcome:
        return Outcome(landed, self._request.uri, sha256(landed.to_bytes()), self._pause)

    def _compose(self, digests: Mapping[str, str]) -> Publication:
        members, episodes = [], set()
        for client in self._clients:
            manifest, digest = load_manifest(self._store, f"{client.kind}/{client.name}", digests[client.name])
            if manifest.session != self._request.sessions[client.name]:
                raise CheckpointFailed("SessionChanged", f"{client.name}'s records are of another process")
            if client.kind == "environment":
                episodes |= set(manifest.episodes) - self._restarts
            members.append(
                Member(
                    kind=client.kind,
                    instance=client.name,
                    session=manifest.session,
                    manifest_digest=digest,
                    records=len(manifest.records),
                    bytes=sum(pack.size for pack in manifest.packs),
                    code=manifest.code,
                )
            )
        return tombstone(self._request, "", self._wall()).model_copy(
            update={
                "state": "published",
                "members": members,
                "scope": self._scope,
                "episodes": sorted(episodes),
                "restarts": sorted(self._restarts),
                "not_started": sorted(set(self._scope) - episodes - self._restarts),
                "left_out": sorted(self._left_out),
                "labels": dict(self._request.labels),
                "driver_state": None if self._request.driver_state is None else dict(self._request.driver_state),
            }
        )

    # ---- failure ------------------------------------------------------------------------------------------

    async def _give_up(self, failure: CheckpointFailed, *, died: bool = False) -> Outcome:
        """Resume everybody and write the tombstone. What stands is the truth: a publication whose answer was lost is
        one all the same. Raises the failure otherwise."""
        if died:
            await self._take_leave()
        else:
            await self._resume()
        if not self._asked:
            raise failure
        try:
            landed = await asyncio.to_thread(give_up, self._store, self._request, str(failure), self._wall())
        except (StorageError, ProtocolError) as error:
            message = f"{failure} (storage is still to be told: {error})"
            raise CheckpointFailed(failure.reason, message, failure.blockers, settled=False) from error
        if landed.state == "published":
            return self._outcome(landed)
        raise failure

    def _phases(self) -> dict[str, str]:
        closed = {client.name for client in self._closed}
        return {
            client.name: "committed"
            if client.name in self._commits
            else "closed"
            if client.name in closed
            else "idle"
            for client in self._clients
        }
