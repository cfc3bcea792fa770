"""A cell that can be hurt, with its coordinators and its clients, as plain calls: each does one thing and lets time
pass. Everything is repeatable: time is virtual, threads are none, and what is random elsewhere is counted here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import shutil
import tempfile
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx

from gym_faults.model import Violation, check_rows, require, split, stages
from gym_faults.watch import Watch, WatchedPlane, held
from gym_rig.cell import TOKEN, Rig, rig_settings
from gym_rig.coordinator import CoordinatorProcess
from gym_rig.network import Alive, Seen
from gym_rig.storage import Bucket
from gym_rig.virtual import VirtualLoop, now
from gym_servers.coordination.checkpoint import CheckpointFailed, Progress
from gym_servers.coordination.record import CellRecord, Stage
from gym_servers.engine.rows import counter_rows
from gym_servers.http import peers
from gym_servers.protocol.identity import parse_key
from gym_servers.protocol.messages import PREFIX
from gym_servers.protocol.phases import LEASED, Phase

SERVERS = ("env", "policy", "agent", "counter", "collection")
GRACE = 9.0
LOOK_SECONDS = 1.2
FAST = 0.01  # how long work in a thread takes
RATE = 100.0  # tokens a second: a turn takes about one
ROLLOUTS = 4
CONCURRENCY = 2  # so that one begins when another has ended
HEALING_SECONDS = 60.0  # of virtual time: what was begun while things were broken has ended by then
NEVER_REACHED = 1000  # attempts above its own no rollout gets to
BEGIN_OR_END = ("/seed_session", "/agent_sessions", "close", "close_session")  # calls that make or end a session
LONGEST_SECONDS = 400.0  # from the healing of everything to the end of the collection


class World:
    """One cell from its start to its end. `seed` chooses its rows; a message takes `latency`, a journal entry
    `journal_seconds`."""

    def __init__(self, seed: int, *, latency: float = 0.003, journal_seconds: float = 0.02) -> None:
        shared = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="gym-faults-", dir=shared if shared.is_dir() else None))
        self.loop = VirtualLoop(thread_seconds=FAST)
        asyncio.set_event_loop(self.loop)
        self._patches = ExitStack()
        for target, name, value in (
            (peers, "time", SimpleNamespace(monotonic=self.loop.time)),
            *counted_identifiers(),
        ):
            self._patches.enter_context(mock.patch.object(target, name, value))
        self._level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        rows = counter_rows(ROLLOUTS, seed, (2, 4))
        self.rows = {f"{index}-0": row for index, row in enumerate(rows)}
        self.coordinators: list[CoordinatorProcess] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.taken = 0
        self._meddled = False  # somebody else has used the coordinator's ids
        self._taking: dict[asyncio.Task[Any], CoordinatorProcess] = {}
        self.run(self._build(rows, latency, journal_seconds))

    async def _build(self, rows: Sequence[Any], latency: float, journal_seconds: float) -> None:
        settings, root = rig_settings(self.folder, rows)
        changed = {}
        for name, one in settings.items():
            leased = one.checkpoint.model_copy(update={"lease_grace_seconds": GRACE})
            job = one.collection and one.collection.model_copy(
                update={"concurrency": CONCURRENCY, "max_failures": 1000}
            )
            changed[name] = one.model_copy(update={"checkpoint": leased, "collection": job})
        self.rig = Rig(self.folder, changed, root, rate=RATE, backoff_limit=10**6)
        self.rig.bucket = self.bucket = Bucket()
        self.network = self.rig.network
        self.network.latency = latency
        self.rig.journal_file.seconds = journal_seconds
        self.watch = Watch(Path(root))
        self.watch.name_of = self._name_of
        self.rig.plane_type = type("Plane", (WatchedPlane,), {"watch": self.watch})
        self.bucket.on_write = self.watch.written
        self.watch.running = lambda server: self.rig.processes_by_name[server].incarnation
        self.watch.phase_of = self._phase_of
        self.network.on_request = self.watch.request
        self.network.on_reply = self.watch.reply
        self.network.may_arrive_late = self._may_arrive_late
        self.rig.journal_file.on_entry = self.watch.entry
        self.rig.on_save = self.watch.saved
        self.client = self.network.client(Alive("client"))
        self.take_over()

    # ---- time ---------------------------------------------------------------------------------------------

    def run(self, work: Coroutine[Any, Any, Any] | float) -> Any:
        """Do `work`, or let so many seconds pass."""
        return self.loop.run_until_complete(asyncio.sleep(work) if isinstance(work, float) else work)

    def until(self, holds: Callable[[], object], seconds: float, *, look_seconds: float = 0.1) -> bool:
        """Let time pass until it holds, at most so many seconds; whether it did."""

        async def wait() -> bool:
            give_up = now() + seconds
            while not holds():
                if now() >= give_up:
                    return False
                await asyncio.sleep(look_seconds)
            return True

        return bool(self.run(wait()))

    def begin(self, work: Coroutine[Any, Any, Any], alive: Alive | None = None) -> asyncio.Task[Any]:
        """Something that has to come to an end, by itself, once all is healed. `alive`: whose task it is."""

        async def start() -> asyncio.Task[Any]:
            return asyncio.get_running_loop().create_task(work, context=alive.context() if alive else None)

        task: asyncio.Task[Any] = self.run(start())
        self.tasks.append(task)
        return task

    # ---- coordinators -------------------------------------------------------------------------------------

    @property
    def coordinator(self) -> CoordinatorProcess:
        return self.coordinators[-1]

    @property
    def record(self) -> CellRecord:
        return self.coordinator.controller.record

    @property
    def coordinated(self) -> bool:
        return not self.coordinator.alive.died.is_set()

    def take_over(self) -> None:
        """A coordinator that knows what the last one saved; whether that one is dead is another matter."""
        self._meddled = self._meddled or bool(self.coordinators and self.coordinated)
        record = self.rig.saved[-1] if self.rig.saved else None
        make = partial(CoordinatorProcess, self.rig, record, LOOK_SECONDS)
        if asyncio._get_running_loop() is not None:
            self.coordinators.append(make(lease_grace=GRACE, prepare_timeout=15.0, commit_timeout=15.0))
        else:
            self.run(self._take_over(make))

    async def _take_over(self, make: Callable[..., CoordinatorProcess]) -> None:
        self.coordinators.append(make(lease_grace=GRACE, prepare_timeout=15.0, commit_timeout=15.0))

    def coordinator_dies(self) -> None:
        self.coordinator.kill()

    def _awaited(self) -> list[asyncio.Task[Any]]:
        """What has to end by itself: whoever waits for a dead coordinator waits in vain."""
        return [
            task
            for task in self.tasks
            if (owner := self._taking.get(task)) is None or not owner.alive.died.is_set() or task.done()
        ]

    def checkpoint(
        self, prepare_timeout: float = 15.0, *, stop: bool = False, only: frozenset[str] | None = None
    ) -> asyncio.Task[Any]:
        """`only`: the rollouts that it is to hold."""
        self.taken += 1
        name = f"cp{self.taken}"

        async def tell(_: Progress) -> None:
            await asyncio.sleep(0.005)

        coordinator, harmed = self.coordinator, self.network.harmed

        async def take() -> Any:
            try:
                return await coordinator.controller.take(
                    f"{name}-id", name, tell, prepare_timeout=prepare_timeout, episodes=only, stop=stop
                )
            except ConnectionError as failure:
                return failure
            except CheckpointFailed as failure:
                self._failed(f"{name}-id", failure, harmed == self.network.harmed)
                return failure

        task = self.begin(take(), coordinator.alive)
        self._taking[task] = self.coordinator
        return task

    def _failed(self, checkpoint_id: str, failure: CheckpointFailed, unharmed: bool) -> None:
        """A checkpoint was declared failed: it is not published from now on, and nobody is left closed by it."""
        published = any(json.loads(data)["checkpoint_id"] == checkpoint_id for data in self.watch.published.values())
        if published and failure.settled:
            self.watch.broke(1, f"{checkpoint_id} was declared failed, and was published before")
        if not published:
            self.watch.failed.add(checkpoint_id)
        closed = [one.settings.name for one in self.alive() if one.plane.gate.control.checkpoint_id == checkpoint_id]
        if closed and unharmed and failure.reason != "ParticipantDied" and not self._meddled:
            self.watch.broke(4, f"{checkpoint_id} failed ({failure}), and {closed} are left closed")

    def release(self) -> None:
        """A cell that a checkpoint has stopped is to go on."""
        task = self.begin(self._release(), self.coordinator.alive)
        self._taking[task] = self.coordinator

    async def _release(self) -> None:
        with suppress(ConnectionError):
            await self.coordinator.controller.release()

    def back(self) -> bool:
        """In service; a cell that stands stopped is asked to go on."""
        if (stopped := self.record.stopped) is not None and stopped.stays:
            self.tasks.append(asyncio.ensure_future(self._release()))
        return self.in_service()

    def ends(self) -> bool:
        """Whether an episode is behind its activation: there it is soon over, and nothing may be repeated."""
        return any(
            live.where in ("close_agent", "verify", "return") for live in self.rig.participant("env")._live.values()
        )

    def works(self, name: str) -> bool:
        """Whether this server is doing something for a rollout."""
        if name not in self.rig.processes_by_name:
            return False
        participant = self.rig.participant(name)
        return bool(participant._live if name == "env" else len(participant._busy))

    def reads(self) -> bool:
        """Whether some process is reading the records that it is to restore."""
        return any(one.plane._restoring.locked() for one in self.alive())

    def in_service(self) -> bool:
        return self.coordinated and self.record.stage is Stage.RUNNING and not self.coordinator.controller.busy

    # ---- processes, clients -------------------------------------------------------------------------------

    def kill(self, *names: str) -> None:
        for name in names:
            if name in self.rig.processes_by_name:
                self.rig.kill(name)

    def alive(self) -> list[Any]:
        return [one for one in self.rig.processes_by_name.values() if not one.alive.died.is_set()]

    def verb(self, name: str, verb: str, body: dict[str, Any]) -> asyncio.Task[Any]:
        """A verb by somebody else than the coordinator; its answer, or None where none came."""
        self._meddled = self._meddled or body["checkpoint_id"].startswith("cp")
        return self.begin(self._send("POST", f"http://{name}-control{PREFIX}/{verb}", json.dumps(body).encode()))

    def repeat(self, seen: Seen) -> asyncio.Task[Any]:
        """A call that was made once is made again, by somebody who does not know that it is old."""
        return self.begin(self._send(seen.method, f"http://{seen.host}{seen.path}", seen.body, dict(seen.headers)))

    def mistake(self, seen: Seen) -> None:
        """A call to a session is made by somebody who takes it for another attempt's, which there never is."""
        if seen.host not in ("agent", "counter") or seen.path.endswith(BEGIN_OR_END):
            return
        _, prefix, key, rest = seen.path.split("/", 3)
        episode = parse_key(key)
        path = f"/{prefix}/{episode.under(episode.attempt + NEVER_REACHED).key}/{rest}"
        self.watch.mistaken.add(path)
        self.repeat(replace(seen, path=path))

    async def _send(
        self, method: str, url: str, body: bytes, headers: dict[str, str] | None = None
    ) -> tuple[int, Any] | None:
        sent = headers or {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        try:
            response = await self.client.request(method, url, content=body, headers=sent, timeout=None)
        except httpx.TransportError:
            return None
        return response.status_code, response.content

    def _name_of(self, session: str) -> str:
        for one in self.rig.processes_by_name.values():
            if one.server.author.session == session:
                return one.incarnation
        return session  # of a process that was replaced while its verb was answered

    def _phase_of(self, incarnation: str) -> Phase | None:
        """None of a process that is not there any more."""
        for one in self.alive():
            if one.incarnation == incarnation:
                phase: Phase = one.plane.gate.phase
                return phase
        return None

    def _may_arrive_late(self, seen: Seen) -> bool:
        """No network keeps a request for so long that its rollout is over and forgotten."""
        return not any(rollout in self.watch.attempts.over for rollout in self.rows if named(seen, rollout))

    # ---- what must hold -----------------------------------------------------------------------------------

    def check(self) -> None:
        """What holds at every moment."""
        self.run(self._check())

    async def _check(self) -> None:
        require(not self.watch.violations, 0, "; ".join(self.watch.violations))
        require(not self.network.crashes, 0, "; ".join(self.network.crashes))
        for one in self.alive():
            self._check_process(one)
        for coordinator in self.coordinators:
            if coordinator.looking.done():
                coordinator.looking.result()

    def _check_process(self, one: Any) -> None:
        phase, name = one.plane.gate.phase, one.settings.name
        until = one.plane._lease.expires_at()
        if phase in LEASED:
            now = self.loop.time()
            require(
                until is not None and now <= until <= now + GRACE, 4, f"{name} is {phase}, its lease ends {until}"
            )
        else:
            require(until is None, 4, f"{name} is {phase} and has a lease")
        if phase is Phase.STARTING and one.settings.kind != "collection":
            require(not held(one.server.participant), 6, f"{name} is starting and holds something")
        if one.background is not None and one.background.done() and not one.background.cancelled():
            one.background.result()

    # ---- the end ------------------------------------------------------------------------------------------

    def heal(self) -> None:
        self.network.faults.clear()
        self.bucket.heal()
        self.loop.thread_seconds = FAST
        self.coordinator.save_faults.clear()

    def complete(self) -> bool:
        collection = self.rig.processes_by_name["collection"]
        return not collection.alive.died.is_set() and bool(collection.server.participant.progress()["complete"])

    def finish(self, crashes: int) -> None:
        """All is healed; a checkpoint is taken, the cell dies `crashes` times, and all comes to its end."""
        self.heal()
        for predecessor in self.coordinators[:-1]:
            predecessor.kill()
        if self.coordinator.is_behind:  # it would end at its next save, and then nobody would be left
            self.coordinator_dies()
        if not self.coordinated:
            self.take_over()
        require(self.until(self.back, LONGEST_SECONDS), 4, f"the cell is not put into service: {self.story()}")
        continued = self._last_checkpoint() if crashes else set()
        for _ in range(crashes):
            attempt = self.record.attempt
            self.kill(*SERVERS)
            recovered = self.until(lambda a=attempt: self.record.attempt > a and self.in_service(), LONGEST_SECONDS)  # type: ignore[misc]
            require(recovered, 4, f"the cell is not put into service again: {self.story()}")
        require(self.until(self.complete, LONGEST_SECONDS), 4, f"the collection does not end: {self.story()}")
        self.until(self._quiet, HEALING_SECONDS)
        self.check()
        self.watch.unchanged()
        self.watch.decided()
        self._check_idle()
        self._check_account(continued)

    def _last_checkpoint(self) -> set[str]:
        """With nothing wrong any more a checkpoint has to succeed; the rollouts it holds that have begun."""
        give_up, outcome = self.loop.time() + HEALING_SECONDS, None
        while self.loop.time() < give_up:
            require(self.until(self.in_service, LONGEST_SECONDS), 4, f"the cell is not in service: {self.story()}")
            task = self.checkpoint()
            require(self.until(task.done, 60.0), 4, f"a checkpoint does not end: {self.story()}")
            outcome = task.result()
            if not isinstance(outcome, Exception):
                return {split(key)[0] for key, stage in stages(Path(outcome.uri)).items() if stage != "seed"}
            self.run(1.0)
        raise Violation(f"invariant 4: no checkpoint succeeds, though all is healed: {outcome}")

    def _quiet(self) -> bool:
        """Everything that had something to wait for is done."""
        open_everywhere = all(one.plane.gate.is_open for one in self.alive())
        forgotten = not self.rig.participant("collection").to_forget()
        settled = self.record.open is None and self.in_service()
        return open_everywhere and forgotten and settled and all(task.done() for task in self._awaited())

    def _check_idle(self) -> None:
        """Invariant 4: nothing is parked, nobody waits."""
        for one in self.alive():
            name, survey = one.settings.name, one.server.participant.survey()
            require(one.plane.gate.phase is Phase.IDLE, 4, f"{name} is {one.plane.gate.phase}")
            require(survey.ready, 4, f"{name} is blocked: {survey.blockers}")
            busy = {k: n for k, n in survey.counts.items() if k in ("live", "busy", "calls", "outstanding") and n}
            require(not busy, 4, f"{name} still has {busy}")
        for task in self._awaited():
            require(task.done(), 4, f"somebody waits for ever: {task}")
            task.result()

    def _check_account(self, continued: set[str]) -> None:
        """Invariants 2 and 6."""
        rows = [json.loads(line) for line in (self.folder / "output/rollouts.jsonl").read_text().splitlines()]
        check_rows(rows, self.rows)
        counted = self.rig.account_of(self.record, len(self.rows))
        require(not counted.problems, 2, "; ".join(counted.problems))
        for row in rows:
            if row["_ng_rollout_id"] in continued and row["_ng_attempt_index"] >= self.record.attempt:
                episode = (row["_ng_rollout_id"], row["_ng_attempt_index"])
                require(
                    episode not in self.watch.attempts.sessions,
                    6,
                    f"{episode} started over, though it was in the checkpoint",
                )

    def story(self) -> str:
        """Where things stand, for people."""
        phases = {one.settings.name: str(one.plane.gate.phase) for one in self.alive()}
        return f"{self.record.stage} at attempt {self.record.attempt}, {phases}; {self.rig.said[-3:]}"

    def close(self) -> None:
        """End everything, and give back what was borrowed."""
        self.rig.kill()
        for coordinator in self.coordinators:
            coordinator.kill()
        for _ in range(20):
            left = asyncio.all_tasks(self.loop)
            if not left:
                break
            for task in left:
                task.cancel()
            self.run(_gathered(left))
        self.rig.give_back()
        self.loop.close()
        asyncio.set_event_loop(None)
        self._patches.close()
        logging.disable(self._level)
        shutil.rmtree(self.folder, ignore_errors=True)


def counted_identifiers() -> list[tuple[Any, str, Callable[..., Any]]]:
    """In the place of what draws identifiers: such as are always the same, and no two alike."""
    numbers = count()

    def unique() -> str:
        return hashlib.sha256(str(next(numbers)).encode()).hexdigest()

    def uuid4() -> uuid.UUID:
        return uuid.UUID(unique()[:32])

    def token_hex(size: int = 16) -> str:
        return unique()[: 2 * size]

    return [(uuid, "uuid4", uuid4), (secrets, "token_hex", token_hex)]


async def _gathered(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks, timeout=1.0)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()


def named(seen: Seen, rollout: str) -> bool:
    """Whether a call is of a rollout."""
    return f"/{rollout}/" in seen.path or f"/{rollout}-a" in seen.path or f'"{rollout}"'.encode() in seen.body
