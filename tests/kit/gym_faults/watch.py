"""Looks on while a cell runs: control planes that report what they promise and export, and the network's traffic.

What it sees that must not be goes into `violations`, because an exception inside a server would only be an answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from gym_faults.model import (
    Attempts,
    Violation,
    check_publication,
    check_unchanged,
    episode_of,
    require,
    restored_as,
    split,
)
from gym_rig.network import Alive, Seen
from gym_servers.control.plane import ControlPlane
from gym_servers.coordination.record import CellRecord
from gym_servers.participants.base import Participant, Scope
from gym_servers.protocol import messages as m
from gym_servers.protocol.phases import Phase

ROLLOUT = "/ng-rollout/"
COORDINATOR = "cell"  # how the ids of the coordinator's own restores begin


class Watch:
    """What has been seen of one cell. `name_of` gives a session's process, `running` a server's."""

    def __init__(self, root: Path) -> None:
        self.violations: list[str] = []
        self.attempts = Attempts()
        self.published: dict[str, bytes] = {}
        self.failed: set[str] = set()  # ids of checkpoints that were declared failed, and were not published
        self.calls: list[Seen] = []  # data calls, for those who repeat them
        self._answered: set[tuple[str, str]] = set()  # agent processes and the episodes whose activation is complete
        self._generated: set[tuple[str, str]] = set()  # model processes and the calls that the engine answered them
        self._stale: dict[int, Seen] = {}  # calls that were stale when they were sent
        self.mistaken: set[str] = set()  # paths of attempts that there never are
        self.name_of: Callable[[str], str] = lambda session: session
        self.running: Callable[[str], str] = lambda server: server
        self.phase_of: Callable[[str], Phase | None] = lambda process: None
        self._root = root

    def check(self, work: Callable[[], None]) -> None:
        """Whatever `work` finds wrong is kept."""
        try:
            work()
        except Violation as found:
            self.violations.append(str(found))

    def broke(self, invariant: int, message: str) -> None:
        self.violations.append(f"invariant {invariant}: {message}")

    # ---- storage ------------------------------------------------------------------------------------------

    def written(self, key: str, data: bytes) -> None:
        """An object has landed."""
        if not key.endswith("/checkpoint.json"):
            return
        folder, document = Path(key).parent, json.loads(data)
        if document["state"] == "published":
            if document["checkpoint_id"] in self.failed:
                self.broke(1, f"{document['name']} was declared failed, and is published")
            self.published[str(folder)] = data
            self.check(lambda: _void(check_publication(folder)))

    def unchanged(self) -> None:
        """Invariant 1: what was published stays, and stays whole."""
        for folder, data in self.published.items():
            require((Path(folder) / "checkpoint.json").read_bytes() == data, 1, f"{folder} was changed")
            check_publication(Path(folder))

    def decided(self) -> None:
        """Invariant 1: at the end nothing that was written can still be published by anybody."""
        for folder in (self._root / "checkpoints").glob("*"):
            written = any(folder.rglob("manifest.json"))
            require(
                not written or (folder / "checkpoint.json").exists(),
                1,
                f"{folder.name} was given up, and nothing keeps it from being published",
            )

    # ---- the wire and the journal -------------------------------------------------------------------------

    def request(self, seen: Seen) -> None:
        if seen.path.startswith("/ng-control") or not seen.caller:
            return
        if seen.caller == "client":
            self._sent_when_stale(seen)
            return
        if seen.path == "/run":
            episode = json.loads(seen.body)["episode_id"]
            self.check(lambda: self.attempts.run(seen.caller, episode["rollout_id"], episode["attempt"]))
        key = key_of(seen)
        if key is not None and not seen.caller.startswith("collection"):
            self.check(lambda: self.attempts.acts(seen.caller, key, f"{seen.method} {seen.host}{seen.path}"))
        forgotten = key is not None and split(key)[0] in self.attempts.over  # and may be asked for anew
        if (seen.caller, key) in self._answered and not forgotten and not seen.path.endswith("close"):
            self.broke(2, f"{seen.caller} works for {key} though its activation is complete: {seen.host}{seen.path}")
        if seen.host != "engine":
            self.calls.append(seen)
        elif (seen.caller, _call_of(seen)) in self._generated and key and not forgotten:
            self.broke(2, f"{seen.caller} generates {_call_of(seen)} again")

    def _sent_when_stale(self, seen: Seen) -> None:
        key, fence = key_of(seen), self.attempts.fence(self.running(seen.host))
        closes = seen.path.endswith(("close", "close_session"))  # of what is not there any more: granted
        if key is not None and not closes and fence.is_stale(*split(key)):
            self._stale[id(seen)] = seen

    def reply(self, seen: Seen, status: int) -> None:
        """An answer has come back. An activation that was answered is never run again, nor is a model call, and who
        is stale is refused."""
        if self._stale.pop(id(seen), None) is not None and status < 300:
            self.broke(3, f"{seen.host} had fenced off what it answered: {seen.method} {seen.path}")
        if seen.path in self.mistaken and status < 300:
            self.broke(3, f"{seen.host} answered for an attempt that its session is not of: {seen.path}")
        if seen.path == "/run" and status == 200 and seen.caller.startswith("collection"):
            self.attempts.ran.add(json.loads(seen.body)["episode_id"]["rollout_id"])
        if seen.host == "engine":
            self._generated.add((seen.caller, _call_of(seen)))
        if seen.host == "agent" and seen.path.endswith("/v1/responses") and status == 200:
            self._answered.add((self.running("agent"), key_of(seen) or ""))

    def entry(self, alive: Alive, entry: Mapping[str, Any]) -> None:
        """A journal entry has been written."""
        if entry["kind"] not in ("seed", "effect"):
            return
        rollout, attempt = str(entry["rollout"]), int(entry["attempt"])
        key = f"{rollout}-a{attempt}" if attempt else rollout
        self.check(lambda: self.attempts.acts(alive.name, key, f"{entry['kind']} in the journal"))
        match self.phase_of(alive.name):
            case Phase.STARTING | Phase.RESTORED as phase:
                self.broke(6, f"{alive.name} is {phase}, and there is a {entry['kind']} of {key}")
            case Phase.PREPARED | Phase.COMMITTED as phase:
                self.broke(5, f"{alive.name} is {phase}, and there is a {entry['kind']} of {key}")
        if entry["kind"] == "seed":
            self.check(lambda: self.attempts.seeded(rollout, attempt, entry["session"]))

    def saved(self, record: CellRecord) -> None:
        """A coordinator's record is durable."""
        if record.recoveries:
            last = record.recoveries[-1]
            self.check(lambda: self.attempts.recovered(last.attempt, last.started_at))
        if record.restore is not None and record.restore.uri not in self.published:
            self.broke(1, f"{record.restore.name} is to be restored, and is not published")

    # ---- what a plane promises ----------------------------------------------------------------------------

    def fenced(self, plane: ControlPlane, floor: int) -> None:
        fence = self.attempts.fence(self.name_of(plane.author.session))
        fence.floor = max(fence.floor, floor)

    def retired(self, plane: ControlPlane, keys: list[str], before: set[str]) -> None:
        """`before`: what it had in the same instant, if no time has passed."""
        fence = self.attempts.fence(self.name_of(plane.author.session))
        for rollout, attempt in map(split, keys):
            fence.marks[rollout] = max(attempt, fence.marks.get(rollout, -1))
        if plane.participant.kind != "collection":
            left = {key for key in held(plane.participant) if fence.is_stale(*split(key))}
            if left:
                self.broke(3, f"{plane.author.instance} retired {keys} and still has {sorted(left)}")
            lost = {key for key in before - held(plane.participant) if not fence.is_stale(*split(key))}
            if lost:
                self.broke(6, f"{plane.author.instance} retired {keys} and lost {sorted(lost)}")

    def forgotten(self, plane: ControlPlane, rollouts: list[str]) -> None:
        marks = self.attempts.fence(self.name_of(plane.author.session)).marks
        for rollout in rollouts:
            marks.pop(rollout, None)
            self.attempts.over.add(rollout)

    def restored(self, plane: ControlPlane, request: m.RestoreRequest, reply: m.RestoreReply) -> None:
        """Invariants 1 and 6: only what is published is restored, and all of it."""
        kind, instance = plane.participant.kind, plane.author.instance
        if request.checkpoint_id.startswith(COORDINATOR) and request.checkpoint_dir not in self.published:
            self.broke(1, f"{instance} was restored from {request.checkpoint_dir}, which is not published")
        continues = {
            key: request.attempts.get(split(key)[0], max(split(key)[1] + 1, request.cell_attempt))
            for key in request.episode_ids
        }
        # A restore that was given up may come again under the same attempt: what was retired in between stays so.
        marks = self.attempts.fence(self.name_of(plane.author.session)).marks
        attempts = {key: last for key, last in continues.items() if last > marks.get(split(key)[0], -1)}
        wanted = {f"{split(key)[0]}-a{attempt}" for key, attempt in attempts.items()}
        if kind == "environment" and set(reply.restored) != wanted:
            self.broke(6, f"{instance} restored {sorted(reply.restored)} of {sorted(wanted)}")
        if kind != "collection":
            folder = Path(request.checkpoint_dir) / kind / instance
            if kind == "agent":
                for session in held_sessions(plane.participant):
                    if session.reply is not None:
                        self._answered.add((self.name_of(plane.author.session), session.episode.key))
            expected = restored_as(kind, _records(folder), attempts)
            found = export_now(plane.participant)
            if found != expected:
                odd = sorted(k for k in {*found, *expected} if found.get(k) != expected.get(k))
                differing = [(key, expected.get(key), found.get(key)) for key in odd]
                self.broke(6, f"{instance} does not have what was recorded: {differing}")

    def frozen(self, plane: WatchedPlane, request: m.CommitRequest, records: Mapping[str, bytes]) -> None:
        kind = plane.participant.kind
        if request.episode_ids is not None and kind != "collection":
            scope = set(request.episode_ids)
            outside = {episode_of(kind, name, data) for name, data in records.items()} - scope
            if outside:
                self.broke(1, f"{plane.author.instance} exported {sorted(outside)} outside the scope")
        if plane.at_ready is None:
            return
        ready = {
            name: data
            for name, data in plane.at_ready.items()
            if request.episode_ids is None or episode_of(kind, name, data) in request.episode_ids
        }
        self.check(lambda: check_unchanged(plane.author.instance, kind, ready, records))


class WatchedPlane(ControlPlane):
    """A control plane that tells what it does. `watch` is set by its cell."""

    watch: Watch

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.at_ready: dict[str, bytes] | None = None
        install = self.participant.install

        def installing(staged: Any) -> Any:
            if self.gate.phase is not Phase.STARTING:
                self.watch.broke(6, f"{self.author.instance} is {self.gate.phase}, and records are installed in it")
            return install(staged)

        self.participant.install = installing  # type: ignore[method-assign]

    async def prepare(self, request: m.PrepareRequest) -> m.PhaseReply:
        reply = await super().prepare(request)
        if self.gate.control.checkpoint_id != request.checkpoint_id:
            self.watch.broke(4, f"{self.author.instance} says of {request.checkpoint_id}, which is over: {reply}")
        return reply

    def _ready(self) -> bool:
        before = self.gate.phase
        ready = super()._ready()
        if before is Phase.PREPARING and self.gate.phase is Phase.PREPARED:
            self.at_ready = export_now(self.participant) if self.participant.kind != "collection" else None
        return ready

    def _exported(self, export: Any) -> dict[str, bytes]:
        records = super()._exported(export)
        assert self._commit is not None
        self.watch.frozen(self, self._commit.request, records)
        return records

    async def restore(self, request: m.RestoreRequest) -> m.RestoreReply:
        known = self._restored
        reply = await super().restore(request)
        if self._restored is not known:
            self.watch.restored(self, request, reply)
        self.watch.fenced(self, request.cell_attempt)
        return reply

    async def resume(self, request: m.ResumeRequest) -> m.PhaseReply:
        starting = self.gate.phase is Phase.STARTING
        reply = await super().resume(request)
        if starting and request.cell_attempt is not None:
            self.watch.fenced(self, request.cell_attempt)
        return reply

    async def retire(self, request: m.RetireRequest) -> m.RetireReply:
        began, before = self._wall(), held(self.participant) if self.participant.kind != "collection" else set()
        reply = await super().retire(request)
        self.watch.retired(self, reply.retired, before if began == self._wall() else set())
        return reply

    async def forget(self, request: m.ForgetRequest) -> m.ForgetReply:
        reply = await super().forget(request)
        self.watch.forgotten(self, request.rollout_ids)
        return reply


def key_of(seen: Seen) -> str | None:
    """The capture key in whose name a call is made."""
    if seen.host == "engine":
        key = seen.headers.get("x-request-id", "-").partition("/")[0]
        return None if key == "-" else key
    if seen.path.startswith(ROLLOUT):
        return seen.path.removeprefix(ROLLOUT).partition("/")[0]
    return None


def _call_of(seen: Seen) -> str:
    """The model call that an engine request is for: episode and position."""
    return seen.headers.get("x-request-id", "").rpartition("/")[0]


def export_now(participant: Participant) -> dict[str, bytes]:
    """All that a participant would export at this moment. Of servers whose export waits for nothing but the thread
    that encodes it, whose work is done here and now."""

    async def here(work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)

    exporting = participant.export(Scope(None))
    try:
        with mock.patch.object(asyncio, "to_thread", here):
            exporting.send(None)  # not awaited: no time may pass
    except StopIteration as done:
        records: dict[str, bytes] = done.value
        return records
    raise AssertionError("the export waits")


def held(participant: Any) -> set[str]:
    """The capture keys of which a participant has anything, running or kept."""
    match participant.kind:
        case "environment":
            return {*participant._live, *(record.episode.key for record in participant._unclaimed.values())}
        case "model":
            calls = (call.key for call in participant._calls)
            return {*participant._ledgers, *participant._prefixes, *calls}
        case _:
            return {session.episode.key for session in held_sessions(participant)}


def held_sessions(participant: Any) -> list[Any]:
    return list(participant._sessions.values())


def _records(folder: Path) -> dict[str, bytes]:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    root = folder.parent.parent
    return {
        entry["id"]: (root / entry["pack"]).read_bytes()[entry["offset"] : entry["offset"] + entry["length"]]
        for entry in manifest["records"]
    }


def _void(_: object) -> None:
    return None
