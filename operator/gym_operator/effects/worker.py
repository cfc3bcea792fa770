"""One stack's worker: looks at all that belongs to it, again and again, and puts right what is not as it should be.

Woken by events, or by a timer. A pass is a list of steps; each can be lost, and the next pass mends it. The status is
written once, last. What takes long - installing a cell, a checkpoint, probing the storage - runs beside the passes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import httpx

from gym_operator.api import names
from gym_operator.api.conditions import ConditionReason
from gym_operator.api.stack import GymStack, StackStatus
from gym_operator.effects.cache import Cache, Key
from gym_operator.effects.checkpoints import Checkpoints
from gym_operator.effects.children import ChildProblem, ControlTokens, ensure_children, ensure_secret
from gym_operator.effects.events import Events, Subject
from gym_operator.effects.kube import Kube, KubeError
from gym_operator.effects.kube_host import KubeCellHost
from gym_operator.effects.metrics import Metrics
from gym_operator.effects.status_writers import Gone, StackWriter, Superseded
from gym_operator.effects.storage import StackStorage
from gym_operator.rules.checkpoint_queue import Situation
from gym_operator.rules.spec_check import Problem, check_stack
from gym_operator.rules.stack_status import Observed, differs_in_progress_only, stack_status, warnings
from gym_operator.rules.workloads import StackContext
from gym_servers.coordination import decide
from gym_servers.coordination.controller import CellController, CellSettings, View
from gym_servers.coordination.record import CellRecord, Stage, tried_again
from gym_servers.protocol.messages import Status
from gym_servers.stack.durations import parse_duration
from gym_servers.stack.render import checkpoint_root, stack_root
from gym_servers.storage.ownership import Owner
from gym_servers.storage.store import StorageError

log = logging.getLogger(__name__)

FAST_SECONDS: Final = 0.1
"""Between looks at a cell on its way into service: every look that comes late is part of the recovery's time."""
FAST_FOR_SECONDS: Final = 120.0
"""A cell that is on its way for longer waits for something slow, such as its image."""
LAST_WORDS_SECONDS: Final = 0.02
"""A look that is all but done when something dies may end by itself."""
BUSY_SECONDS: Final = 0.25
CALM_SECONDS: Final = 1.0
TROUBLE_SECONDS: Final = 1.0
"""After a pass that failed."""
STAND_BY_SECONDS: Final = 30.0
"""After another operator was noticed: two that take turns would undo each other's recoveries."""
ENSURE_SECONDS: Final = 60.0
"""Between looks at children that nobody should have touched."""
ENSURE_STARTING_SECONDS: Final = 10.0
REFRESH_SECONDS: Final = 2.0
"""Between lists of the pods while something does not answer."""
PROGRESS_SECONDS: Final = 1.0
"""Between writes of the driver's counters."""
SILENT_SECONDS: Final = 5.0
"""A server that does not answer for so long is worth a condition."""


@dataclass(frozen=True)
class Services:
    """What all workers share."""

    kube: Kube
    cache: Cache
    events: Events
    http: httpx.AsyncClient
    operator_namespace: str
    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic
    cluster: str | None = None
    """The cluster's id, None where it may not be read."""
    metrics: Metrics = field(default_factory=Metrics)


@dataclass(frozen=True)
class Ensured:
    """How the stack's objects were found: good until `until` (monotonic), for this generation of the spec."""

    generation: int
    until: float
    problem: Problem | None
    trouble: str


class StackWorker:
    """Works until it is cancelled or its stack is gone. `pass_began` (monotonic) is when the pass under way began, or
    last heard from its storage; None between passes."""

    def __init__(self, services: Services, key: Key, uid: str) -> None:
        self.key, self.uid = key, uid
        self.pass_began: float | None = None
        self._s = services
        self._wake, self._death = asyncio.Event(), asyncio.Event()
        self._subject = Subject(names.STACK_KIND, key.namespace, key.name, uid)
        self._writer = StackWriter(services.kube, key.namespace, key.name, uid, self._following)
        owner = Owner(cluster=services.cluster or uid, stack_uid=uid, namespace=key.namespace, name=key.name)
        self._storage = StackStorage(services.kube, key.namespace, services.monotonic, owner, self._progressed)
        self._host = KubeCellHost(
            services.kube,
            services.cache,
            self._writer,
            services.events,
            self._subject,
            (),
            services.wall,
            services.monotonic,
        )
        self._checkpoints = Checkpoints(
            services.kube, services.cache, services.events, key, self._storage.open, self.wake, services.wall
        )
        self._controller: CellController | None = None
        self._good: GymStack | None = None
        self._observed: Observed | None = None
        self._tokens: ControlTokens | None = None
        self._loaded = False
        self._stand_by_until = float("-inf")
        self._ensured: Ensured | None = None
        self._refreshed = self._written = float("-inf")
        self._moving_since: float | None = None
        self._silent_since: float | None = None
        self._silent: tuple[str, ...] = ()

    def wake(self) -> None:
        """Look at once."""
        self._wake.set()

    def pod_ended(self) -> None:
        """A pod of the stack is not alive any more: do not even finish what is being looked at."""
        self._death.set()
        self._wake.set()

    def _progressed(self) -> None:
        """A storage that answers again and again is slow, and who waits for it is not stuck. In any thread."""
        if self.pass_began is not None:
            self.pass_began = self._s.monotonic()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            began = self.pass_began = self._s.monotonic()
            try:
                pause = await self._pass()
            except Gone:
                return
            except Superseded as error:
                log.warning("stack %s/%s: %s; standing by", *self.key, error)
                await self._start_over()
                self._stand_by_until = self._s.monotonic() + STAND_BY_SECONDS
                pause = TROUBLE_SECONDS
            except (KubeError, StorageError, ValueError) as error:
                log.warning("stack %s/%s: %s", *self.key, error)
                pause = TROUBLE_SECONDS
            except Exception:
                # A fault of ours in one stack must not end the work for it, nor for the others.
                log.exception("stack %s/%s: a pass failed", *self.key)
                pause = 5 * TROUBLE_SECONDS
            self._s.metrics.passed(self._s.monotonic() - began)
            self.pass_began = None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause)

    async def close(self, reason: str, message: str) -> None:
        """End what runs beside the passes; `run` must have been cancelled before."""
        with suppress(Gone, Superseded, KubeError, StorageError):
            await self._checkpoints.close(self._controller, reason, message)
        self._storage.close()

    # ---- one pass -----------------------------------------------------------------------------------------

    async def _pass(self) -> float:
        """One look at everything; how long to wait for the next."""
        if self._s.monotonic() < self._stand_by_until:
            return TROUBLE_SECONDS
        body = self._s.cache.stacks.get(self.key)
        if body is None or body["metadata"]["uid"] != self.uid or body["metadata"].get("deletionTimestamp"):
            return CALM_SECONDS  # whoever runs the workers ends this one
        stack, problem = self._read(body)
        await self._load()
        generation = int(body["metadata"].get("generation") or 0)
        if stack is None:
            await self._conclude(Observed(generation=generation, participants=(), problem=problem))
            return CALM_SECONDS
        self._host.participants = stack.spec.participants()
        ensured = await self._ensure(stack, generation)
        problem = problem or ensured.problem
        await self._tend_storage(stack)
        view, waits = await self._tend_cell(stack)
        waits = "; ".join(each for each in (waits, ensured.trouble) if each)
        observed = self._observe(stack, generation, problem, view, waits)
        await self._checkpoints.step(
            self._controller, self._situation(stack, problem, view), self._host.participants, observed.pods
        )
        await self._conclude(observed)
        return self._pause(stack, view)

    def _read(self, body: Mapping[str, Any]) -> tuple[GymStack | None, Problem | None]:
        """The stack, and what is wrong with its spec; rollouts go on under the last one that was right."""
        checked = check_stack(body)
        if isinstance(checked, Problem):
            return self._good, checked
        self._good = checked
        return checked, None

    async def _load(self) -> None:
        """Once: what is known about the stack, from the API server itself. Neither the status nor the list of pods
        may be an old one here: a pod that the watch has not told of yet would be taken for dead."""
        if self._loaded:
            return
        await self._writer.load()
        await self._host.refresh()
        self._loaded = True

    async def _start_over(self) -> None:
        self._loaded = False
        controller, self._controller = self._controller, None
        with suppress(Superseded, KubeError, StorageError):
            await self._checkpoints.close(controller, "Superseded", "another operator has taken over")
        self._checkpoints.reopen()

    # ---- children and storage -----------------------------------------------------------------------------

    async def _ensure(self, stack: GymStack, generation: int) -> Ensured:
        """The stack's objects as its spec wants them. Where that fails, a cell that runs is looked after all the
        same."""
        now = self._s.monotonic()
        if self._ensured is not None and self._ensured.generation == generation and now < self._ensured.until:
            return self._ensured
        record = self._writer.record
        settled = record is not None and record.stage is Stage.RUNNING
        context = StackContext(stack.identity, stack.spec, self._s.operator_namespace)
        problem, trouble = None, ""
        try:
            self._tokens = await ensure_secret(self._s.kube, context)
            await ensure_children(self._s.kube, context, running=not stack.spec.suspend)
        except ChildProblem as error:
            problem = error.problem
        except KubeError as error:
            trouble = str(error)
            self._s.events.say(self._subject, "Warning", "ObjectsNotApplied", trouble)
        seconds = TROUBLE_SECONDS if trouble else ENSURE_SECONDS if settled else ENSURE_STARTING_SECONDS
        self._ensured = Ensured(generation, now + seconds, problem, trouble)
        return self._ensured

    async def _tend_storage(self, stack: GymStack) -> None:
        storage = stack.spec.checkpoints.storage
        if storage is None or not stack.spec.checkpoints.enabled:
            return
        try:
            await self._storage.tend(storage, stack_root(storage, stack.identity))
        except KubeError as error:
            log.warning("stack %s/%s: Secrets of the storage: %s", *self.key, error)

    # ---- the cell -----------------------------------------------------------------------------------------

    async def _tend_cell(self, stack: GymStack) -> tuple[View | None, str]:
        """Look at the cell and do what follows; the view, and what the cell waits for."""
        if self._tokens is None:
            return None, ""  # nothing of this stack runs yet
        if not stack.spec.checkpoints.enabled:
            await self._let_go("CheckpointsDisabled", "checkpoints were turned off")
            return None, ""
        settings = self._settings(stack)
        if stack.spec.suspend:
            await self._suspend(settings)
            return None, ""
        controller = await self._take_up(settings, stack.spec.recovery.backoff_limit)
        await self._checkpoints.adopt(controller.record)
        await self._refresh()
        try:
            view = await self._look(controller)
        except StorageError as error:
            self._storage.failed(error)
            return None, f"storage: {error}"
        log.debug("stack %s/%s: %r", *self.key, view.step)
        return view, view.step.reason if isinstance(view.step, decide.Wait) else ""

    async def _look(self, controller: CellController) -> View:
        """One look. A death that it cannot know of yet breaks it off: a verb to the dead process, which is repeated
        until its deadline, would hold up the recovery. Every step may be lost, and the next look decides anew."""
        self._death.clear()
        look = asyncio.create_task(controller.look())
        if controller.record.pins and not self._host.any_ended(controller.record.pins):
            death = asyncio.create_task(self._death.wait())
            try:
                await asyncio.wait([look, death], return_when=asyncio.FIRST_COMPLETED)
                if not look.done():
                    await asyncio.wait([look], timeout=LAST_WORDS_SECONDS)
                if not look.done():
                    look.cancel()
                    await asyncio.wait([look])
            except asyncio.CancelledError:
                look.cancel()
                raise
            finally:
                death.cancel()
            if look.cancelled():
                if (saved := await self._writer.settled_record()) is not None:
                    controller.record = saved  # what is durable is what counts, whether the look heard of it or not
                look = asyncio.create_task(controller.look())
        return await look

    def _settings(self, stack: GymStack) -> CellSettings:
        spec = stack.spec
        assert spec.checkpoints.storage is not None  # the spec demands it where checkpoints are enabled
        assert self._tokens is not None  # without them nothing of this stack runs
        return CellSettings(
            stack_uid=self.uid,
            cell=0,
            token=self._tokens.current,
            previous_token=self._tokens.previous,
            root=checkpoint_root(spec.checkpoints.storage, stack.identity, 0),
            policy=spec.recovery.policy,
            backoff_limit=spec.recovery.backoff_limit,
            prepare_timeout=parse_duration(spec.checkpoints.prepare_timeout),
            commit_timeout=parse_duration(spec.checkpoints.commit_timeout),
        )

    async def _take_up(self, settings: CellSettings, backoff_limit: int) -> CellController:
        """The cell's controller, made from what was persisted last, and told of changes in the spec."""
        record = self._writer.record
        again = tried_again(record, backoff_limit, suspended=False) if record is not None else None
        if again is not None:
            self._controller = None  # it has nothing under way: the cell has given up
            await self._writer.save_record(again)
        if self._controller is None:
            self._controller = self._new_controller(settings)
        self._controller.settings = settings
        return self._controller

    def _new_controller(self, settings: CellSettings) -> CellController:
        return CellController(
            self._host, settings, self._storage.open, self._s.http, self._writer.record, self._s.wall
        )

    async def _suspend(self, settings: CellSettings) -> None:
        """Stop coordinating; the pods go because their StatefulSets want none."""
        await self._let_go("StackSuspended", "the stack was suspended")
        record = self._writer.record
        if record is None:
            return
        if record.open is not None:
            await self._new_controller(settings).settle(reopen=False)
            record = self._writer.record or record
        if (again := tried_again(record, 0, suspended=True)) is not None:
            await self._writer.save_record(again)

    async def _let_go(self, reason: str, message: str) -> None:
        """Stop coordinating; a checkpoint that is being taken fails for the given reason."""
        if self._controller is not None:
            controller, self._controller = self._controller, None
            await self._checkpoints.close(controller, reason, message)
            self._checkpoints.reopen()

    async def _refresh(self) -> None:
        """List the pods where the watch alone is not to be trusted: something does not answer or does not go away."""
        now = self._s.monotonic()
        record = self._writer.record
        replacing = record is not None and record.stage is Stage.REPLACING
        silent = self._silent_since is not None and now - self._silent_since >= REFRESH_SECONDS
        if (silent or replacing or self._host.has_lost_nodes) and now - self._refreshed >= REFRESH_SECONDS:
            self._refreshed = now
            await self._host.refresh(self._silent)

    # ---- what comes of it ---------------------------------------------------------------------------------

    def _observe(
        self, stack: GymStack, generation: int, problem: Problem | None, view: View | None, waits: str
    ) -> Observed:
        statuses: dict[str, Status] = {}
        self._silent = ()
        if view is not None:
            statuses = {name: one.status for name, one in view.seen.items() if one.status is not None}
            self._silent = tuple(name for name, one in view.seen.items() if one.alive and one.status is None)
        now = self._s.monotonic()
        self._silent_since = (self._silent_since or now) if self._silent else None
        record = self._controller.record if self._controller else self._writer.record
        running = record is not None and record.stage is Stage.RUNNING
        unheard = self._silent_since is not None and now - self._silent_since >= SILENT_SECONDS
        return Observed(
            generation=generation,
            participants=self._host.participants,
            pods=self._host.pods(),
            statuses=statuses,
            record=record if stack.spec.checkpoints.enabled else None,
            waits=waits if not running or unheard or view is None else "",
            problem=problem,
            suspended=stack.spec.suspend,
            checkpoints_enabled=stack.spec.checkpoints.enabled,
            storage=self._storage.state if stack.spec.checkpoints.enabled else None,
            checkpoint=self._checkpoints.active,
            last_checkpoint=self._checkpoints.last,
        )

    def _situation(self, stack: GymStack, problem: Problem | None, view: View | None) -> Situation:
        record: CellRecord | None = self._controller.record if self._controller else self._writer.record
        obstacle: tuple[ConditionReason, str] | None = None
        if problem is not None:
            obstacle = (ConditionReason.STACK_NOT_READY, problem.message)
        elif stack.spec.suspend:
            obstacle = (ConditionReason.STACK_NOT_READY, "the stack is suspended; set spec.suspend to false")
        elif record is not None and record.stage is Stage.STALLED:
            obstacle = (ConditionReason.STACK_NOT_READY, "the stack has given up; its condition Stalled says why")
        elif self._storage.state.ok is False:
            obstacle = (self._storage.state.reason, self._storage.state.message)
        return Situation(
            enabled=stack.spec.checkpoints.enabled,
            stage=record.stage if record else None,
            free=view is not None and isinstance(view.step, decide.Tend) and not self._busy,
            open_id=record.open.checkpoint_id if record and record.open else None,
            obstacle=obstacle,
            storage_proved=self._storage.state.ok is True,
        )

    @property
    def _busy(self) -> bool:
        return self._controller is not None and self._controller.busy

    async def _conclude(self, observed: Observed) -> None:
        """Write the status, once and last; then the events, so that nobody reads of one without the other."""
        self._observed = observed
        await self._write_status(observed)
        for reason, message in warnings(observed):
            self._s.events.say(self._subject, "Warning", reason, message)

    def _following(self, status: StackStatus, record: CellRecord) -> StackStatus:
        """The status that goes with a record saved between two passes."""
        if self._observed is None:
            return status
        return stack_status(status, replace(self._observed, record=record, waits=""), self._s.wall())

    async def _write_status(self, observed: Observed) -> None:
        before = self._writer.status
        status = stack_status(before, observed, self._s.wall())
        now = self._s.monotonic()
        if now - self._written < PROGRESS_SECONDS and differs_in_progress_only(before, status):
            return
        if await self._writer.write(status):
            self._written = now

    def _pause(self, stack: GymStack, view: View | None) -> float:
        record = self._controller.record if self._controller else None
        moving = record is not None and record.stage in (Stage.REPLACING, Stage.STARTING)
        now = self._s.monotonic()
        self._moving_since = (self._moving_since or now) if moving else None
        if self._moving_since is not None:
            return FAST_SECONDS if now - self._moving_since < FAST_FOR_SECONDS else 5 * FAST_SECONDS
        if record is not None and view is not None and not isinstance(view.step, decide.Tend | decide.Wait):
            return FAST_SECONDS  # something was done: see what came of it
        return BUSY_SECONDS if self._checkpoints.waiting or self._busy else CALM_SECONDS
