"""Looks after one cell of a stack, in a loop of its own: whatever holds up one cell holds up no other.

The stack's worker says what is wanted of the cell (`order`) and puts what is seen of it (`seen`) into the status; the
cell's own record is saved here, on the way, before each act that rests on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from gym_operator.api.objects import format_time
from gym_operator.effects.checkpoints import Checkpoints
from gym_operator.effects.events import Subject
from gym_operator.effects.kube import KubeError
from gym_operator.effects.kube_host import KubeCellHost
from gym_operator.effects.last_checkpoint import FAILURES, take_last
from gym_operator.effects.restores import Restores
from gym_operator.effects.rollouts import Rollout
from gym_operator.effects.services import Services
from gym_operator.effects.stack_pods import StackPods
from gym_operator.effects.status_writers import Gone, StackWriter, Superseded
from gym_operator.effects.storage import StackStorage
from gym_operator.rules import rollouts
from gym_operator.rules.drain import BEGUN, drain, drain_told, running_in
from gym_operator.rules.generations import Generations
from gym_operator.rules.observed import CellSeen
from gym_operator.rules.unasked import PREFIXES, SCALE_DOWN
from gym_servers.coordination import decide
from gym_servers.coordination.cell_host import CellSettings, View
from gym_servers.coordination.controller import CellController
from gym_servers.coordination.record import CellRecord, Stage, tried_again
from gym_servers.protocol.messages import Status
from gym_servers.stack.spec import Participant
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
UNASKED_SECONDS: Final = 600.0
"""While nobody has given orders: who does wakes the cell."""
TROUBLE_SECONDS: Final = 1.0
"""After a pass that failed."""
STAND_BY_SECONDS: Final = 30.0
"""After another operator was noticed: two that take turns would undo each other's recoveries."""
SILENT_LIST_SECONDS: Final = 2.0
"""A server that does not answer for so long is worth a list of the pods."""
LEAVING_SILENT_SECONDS: Final = 3.0
"""A server that is about to be ended and does not answer for so long counts as ended: no checkpoint waits for it."""
SILENT_SECONDS: Final = 5.0
"""A server that does not answer for so long is worth a condition."""


@dataclass(frozen=True)
class Orders:
    """What the stack wants of a cell. `settings` is None where nobody coordinates: checkpoints are turned off.
    `stop`: the spec does not have the cell any more; it has `drain` seconds to finish what it has begun. `release`: a
    cell that a checkpoint has stopped is to go on. `templates`: what its pods carry where they are as the spec wants
    them, by server, as far as that is known; `cordoned`: nodes that they are to leave; `turn`: no other cell is to be
    waited for with that. `calm` is how long to wait between looks while nothing happens, in seconds."""

    participants: Sequence[Participant]
    settings: CellSettings | None
    suspend: bool = False
    stop: bool = False
    drain: float = 0.0
    release: bool = False
    calm: float = CALM_SECONDS
    templates: Mapping[str, str] = field(default_factory=dict)
    cordoned: frozenset[str] = frozenset()
    turn: bool = False


@dataclass
class Leaving:
    """How far a cell is that is to go and waits for nothing any more: its last checkpoint has to begin by `begin_by`
    (monotonic); `text` is what came of it."""

    begin_by: float
    task: asyncio.Task[None] | None = None
    text: str = "stopped without a last checkpoint: it was not in service"


@dataclass(frozen=True)
class Parts:
    """What the workers of one stack's cells share."""

    services: Services
    subject: Subject
    writer: StackWriter
    pods: StackPods
    storage: StackStorage
    checkpoints: Checkpoints
    restores: Restores
    generations: Generations


class CellWorker:
    """Works until it is cancelled or its stack is gone (`gone`). `pass_began` (monotonic) is when the pass under way
    began, or last heard from its storage; None between passes. `changed` is called where the stack's status has
    something new to say. `stopped`: it was to stop, and its pods are not needed any more."""

    def __init__(self, parts: Parts, index: int, changed: Callable[[], None]) -> None:
        self.index = index
        self.gone = False
        self.stopped = False
        self.pass_began: float | None = None
        self.controller: CellController | None = None
        self.view: View | None = None
        self._p, self._s = parts, parts.services
        self._changed = changed
        self._wake, self._death = asyncio.Event(), asyncio.Event()
        self._host = KubeCellHost(parts.services, parts.subject, index, parts.pods, parts.writer)
        self._rollout = Rollout(index, self._host, parts.checkpoints, self._s.monotonic, self.wake)
        self._orders: Orders | None = None
        self._drain = drain_told(parts.writer.status, index)  # by an operator before this one
        self._leaving: Leaving | None = None
        self._stand_by_until = float("-inf")
        self._known = True
        self._waits = ""
        self._told: tuple[object, ...] = ()
        self._moving_since: float | None = None
        self._silent_since: float | None = None

    # ---- what others say and ask --------------------------------------------------------------------------

    def order(self, orders: Orders, prefix: str) -> None:
        """What is wanted from now on. `prefix` is how Events about this cell begin."""
        self._host.participants, self._host.prefix = orders.participants, prefix
        if orders != self._orders:
            self._orders = orders
            if not orders.stop:
                self.stopped = False  # it may have come back before it was gone
            self.wake()

    def wake(self) -> None:
        """Look at once."""
        self._wake.set()

    def pod_ended(self) -> None:
        """A pod of the cell is not alive any more: do not even finish what is being looked at."""
        self._death.set()
        self._wake.set()

    def stand_by(self) -> None:
        """Another operator works on this stack: let it."""
        self._stand_by_until = self._s.monotonic() + STAND_BY_SECONDS

    @property
    def stands_by(self) -> bool:
        return self._s.monotonic() < self._stand_by_until

    @property
    def record(self) -> CellRecord | None:
        """What is durable counts: the controller hears of its own write a moment later."""
        saved = self._p.writer.record(self.index)
        return self.controller.record if saved is None and self.controller is not None else saved

    @property
    def busy(self) -> bool:
        return self.controller is not None and self.controller.busy

    @property
    def free(self) -> bool:
        """Whether the cell is in service and nothing else goes on in it."""
        return self.view is not None and isinstance(self.view.step, decide.Tend) and not self.busy

    # ---- replacing its pods on purpose --------------------------------------------------------------------

    @property
    def is_moved(self) -> bool:
        """Whether its pods are replaced now, or as soon as it is free: nothing else is to begin in it."""
        orders = self._orders
        return orders is not None and not orders.stop and (self._rollout.under_way or rollouts.is_due(self._moving()))

    @property
    def moves(self) -> bool:
        """Whether its last checkpoint before that is being taken."""
        return self._rollout.under_way

    @property
    def cause(self) -> rollouts.Cause | None:
        """Why its pods are to be replaced, where they are to stay at all."""
        orders = self._orders
        going = orders is None or orders.stop or orders.suspend
        return None if going else rollouts.cause_of(self._moving())

    def _moving(self) -> rollouts.Situation:
        orders = self._orders
        return rollouts.Situation(
            record=self.record,
            pods=self._host.pods(),
            templates=orders.templates if orders is not None else {},
            cordoned=orders.cordoned if orders is not None else (),
            free=self.free,
            busy=self.busy,
            turn=orders is not None and orders.turn,
            failed=self._rollout.failed,
            storage_ok=self._p.storage.state.ok is True,
        )

    @property
    def statuses(self) -> dict[str, Status]:
        """What its participants said at the last look, of those that answered."""
        return {name: one.status for name, one in self.view.seen.items() if one.status} if self.view else {}

    def seen(self) -> CellSeen:
        """The cell, as it was seen last."""
        record, view = self.record, self.view
        running = record is not None and record.stage is Stage.RUNNING
        stopping = self._orders is not None and self._orders.stop
        now = self._s.monotonic()
        unheard = self._silent_since is not None and now - self._silent_since >= SILENT_SECONDS
        return CellSeen(
            index=self.index,
            pods=self._host.pods(),
            statuses=self.statuses,
            record=record if self._orders is None or self._orders.settings is not None else None,
            waits=self._waits if not running or unheard or view is None else "",
            stopping=stopping,
            drain=self._drain if stopping else None,
            continuation=self.controller.continuation if self.controller is not None else None,
            cause=self.cause,
            trouble=self._rollout.trouble,
        )

    # ---- the loop -----------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            self._wake.clear()
            self.pass_began = self._s.monotonic()
            try:
                pause = await self._pass()
            except Gone:
                self.gone = True
                self._changed()
                return
            except Superseded as error:
                log.warning("%s: %s; standing by", self, error)
                self.stand_by()
                pause = 0.0
            except (KubeError, StorageError, ValueError) as error:
                log.warning("%s: %s", self, error)
                pause = TROUBLE_SECONDS
            except Exception:
                # A fault of ours in one cell must not end the work for it, nor for the others.
                log.exception("%s: a pass failed", self)
                pause = 5 * TROUBLE_SECONDS
            log.debug("%s: pass of %.3f s", self, self._s.monotonic() - self.pass_began)
            self.pass_began = None
            self._tell()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause)

    def __str__(self) -> str:
        return f"stack {self._p.subject.namespace}/{self._p.subject.name} cell {self.index}"

    async def dismiss(self) -> None:
        """Its processes are about to be ended for good: they need not wait for a last checkpoint."""
        if self.controller is not None:
            await self.controller.dismiss()

    async def let_go(self, reason: str, message: str) -> None:
        """Stop coordinating; a checkpoint that is being taken fails for the given reason."""
        self.view, self._waits, self._silent_since = None, "", None
        if self.controller is not None:
            with suppress(Gone, Superseded, KubeError, StorageError):
                await self._p.checkpoints.let_go(self.index, self.controller, reason, message)
            self.controller = None  # only now: whoever is broken off before has to let go of it again

    async def _pass(self) -> float:
        """One look at the cell and what follows from it; how long to wait for the next."""
        orders = self._orders
        if self.stands_by:
            self._known = False
            await self.let_go("Superseded", "another operator has taken over")
            return TROUBLE_SECONDS
        if orders is None:
            return UNASKED_SECONDS
        await self._know()
        if orders.settings is None:
            await self.let_go("CheckpointsDisabled", "checkpoints were turned off")
            self.stopped = orders.stop
            if orders.turn:
                await self._host.discard(rollouts.outdated(self._host.pods(), orders.templates))
        elif orders.suspend:
            await self._put_down(orders.settings, "StackSuspended", "the stack was suspended")
            self.stopped = orders.stop
        elif orders.stop:
            await self._stop(orders.settings, orders.drain)
        else:
            self._drain = None
            if self._leaving is not None and (self._leaving.task is None or self._leaving.task.done()):
                self._leaving = None
            await self._tend(orders.settings, release=orders.release or self._came_back())
            if self.controller is not None:
                await self._rollout.step(self.controller, self._moving())
        return self._pause()

    def _came_back(self) -> bool:
        """Whether it was to go, had stopped for that, and is to stay after all."""
        stopped = self.record.stopped if self.record is not None else None
        return stopped is not None and stopped.checkpoint_id.startswith(PREFIXES[SCALE_DOWN])

    async def _know(self) -> None:
        """After another operator was at work: what stands of the cell, from the API server itself. Neither the record
        nor the list of pods may be an old one: a pod that the watch has not told of yet would be taken for dead."""
        if not self._known:
            await self._p.writer.reload(self.index)
            await self._p.pods.refresh()
            self._known = True
        if self._p.writer.superseded(self.index):
            raise Superseded("another operator has written the record of this cell")

    async def _tend(self, settings: CellSettings, *, release: bool = False) -> None:
        controller = await self._take_up(settings)
        if release:
            await controller.release()
        await self._p.checkpoints.adopt(self.index, controller.record)
        await self._refresh()
        try:
            self.view = await self._look(controller)
            self._count(self.view)
            await self._p.restores.fulfil(self.index, controller)
        except StorageError as error:
            self._p.storage.failed(error)
            self.view, self._waits = None, f"storage: {error}"
        else:
            step = self.view.step
            log.debug("%s: %r", self, step)
            self._waits = step.reason if isinstance(step, decide.Wait) else ""
        self._listen(self.view)

    def _count(self, view: View) -> None:
        """Add up what its policy servers count."""
        for name, one in view.seen.items():
            if one.status is not None:
                self._p.generations.hear(self.index, name, one.status)

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
                if (saved := await self._p.writer.settled_record(self.index)) is not None:
                    controller.record = saved  # what is durable is what counts, whether the look heard of it or not
                look = asyncio.create_task(controller.look())
        return await look

    async def _take_up(self, settings: CellSettings) -> CellController:
        """The cell's controller, made from what was persisted last, and told of changes in the spec."""
        record = self._p.writer.record(self.index)
        again = tried_again(record, settings.backoff_limit, suspended=False) if record is not None else None
        if again is not None:
            self.controller = None  # it has nothing under way: the cell has given up
            await self._p.writer.save_record(self.index, again)
        if self.controller is None:
            self.controller = self._new_controller(settings)
        self.controller.settings = settings
        return self.controller

    def _new_controller(self, settings: CellSettings) -> CellController:
        record = self._p.writer.record(self.index)
        return CellController(self._host, settings, self._p.storage.open, self._s.http, record, self._s.wall)

    async def _put_down(self, settings: CellSettings, reason: str, message: str) -> None:
        """Stop coordinating; the pods go because their StatefulSets want none."""
        await self.dismiss()
        await self.let_go(reason, message)
        record = self._p.writer.record(self.index)
        if record is None:
            return
        controller = self._new_controller(settings)
        await controller.settle(reopen=False)
        await controller.release()  # whoever suspends a stack that a checkpoint has stopped wants it to go on later
        record = self._p.writer.record(self.index) or record
        if (again := tried_again(record, 0, suspended=True)) is not None:
            await self._p.writer.save_record(self.index, again)

    async def _stop(self, settings: CellSettings, drain_seconds: float) -> None:
        """The cell is to go: it finishes what it has begun, then a last checkpoint, from which it would continue were
        it to come back, and no more. One that is not in service has nothing to add to what it has published."""
        if self.stopped:
            return
        if self._leaving is None:
            drains = drain_seconds > 0 or self._drain is not None
            if drains and not self._has_ended() and not await self._has_drained(settings, drain_seconds):
                return
            self._leaving = Leaving(self._s.monotonic() + settings.prepare_timeout + settings.commit_timeout)
        leaving, record = self._leaving, self.record
        late = self._s.monotonic() > leaving.begin_by
        taken = leaving.task is not None and leaving.task.done()
        if record is not None and record.stage is Stage.STOPPED and leaving.task is not None and not taken:
            return  # what became of it is about to be told
        if self._has_ended() or taken or (late and leaving.task is None):
            try:
                await self._put_down(settings, "CellRemoved", "the cell was taken away")
            except StorageError:
                if not late:  # else it is settled when the cell comes back
                    raise
            self.stopped = True
            over = self._drain.over if self._drain is not None else ""
            await self._host.announce("Normal", "CellStopped", f"{leaving.text}; {over}" if over else leaving.text)
            return
        await self._tend(settings)
        if leaving.task is None and self.free and self.controller is not None:
            leaving.task = asyncio.create_task(self._take_last(self.controller, leaving))

    def _has_ended(self) -> bool:
        """Whether the cell is not in service, or is about not to be: nothing of it goes on."""
        record = self.record
        return record is None or record.stage is not Stage.RUNNING or self._host.any_ended(record.pins)

    async def _has_drained(self, settings: CellSettings, seconds: float) -> bool:
        """Whether nobody waits any longer for what the cell has begun. Its driver sees by itself that it is to go."""
        now = self._s.wall()
        if self._drain is None:
            until = format_time(now + seconds)
            text = f"it finishes what it has begun, until {until} at the latest; then a last checkpoint stops it"
            await self._host.announce("Normal", "CellDraining", text)
        since = now if self._drain is None else self._drain.since
        await self._tend(settings)
        view, orders = self.view, self._orders
        statuses = [one.status for name, one in view.seen.items() if view.kinds[name] in BEGUN] if view else [None]
        cordoned = orders.cordoned if orders is not None else ()
        self._drain = drain(since, seconds, running_in(statuses), self._host.pods(), cordoned, now)
        return bool(self._drain.over)

    async def _take_last(self, controller: CellController, leaving: Leaving) -> None:
        try:
            await take_last(controller, self._p.checkpoints, self.index, SCALE_DOWN)
        except FAILURES as error:
            leaving.text = f"stopped without a last checkpoint: {error}"
        else:
            leaving.text = "stopped; were it to come back, it would continue from its last checkpoint"
        self.wake()

    async def _refresh(self) -> None:
        """List the pods where the watch alone is not to be trusted: something does not answer or does not go away."""
        record = self.record
        replacing = record is not None and record.stage is Stage.REPLACING
        silent = self._silent_since
        unheard = silent is not None and self._s.monotonic() - silent >= SILENT_LIST_SECONDS
        if unheard or replacing or self._p.pods.has_lost_nodes:
            await self._p.pods.mend()

    def _listen(self, view: View | None) -> None:
        """Note who does not answer, and since when somebody does not."""
        seen = view.seen if view is not None else {}
        silent = [name for name, one in seen.items() if one.alive and one.status is None]
        self._p.pods.silent(self.index, silent)
        now = self._s.monotonic()
        since = self._silent_since = (self._silent_since or now) if silent else None
        lasting = since is not None and now - since >= LEAVING_SILENT_SECONDS
        self._host.given_up = frozenset(silent) if lasting else frozenset()

    def _tell(self) -> None:
        """Let the stack's status be written where more than the driver's counters has changed."""
        telling = (self.free, self.stopped, *_outline(self.seen()))
        if telling != self._told:
            self._told = telling
            self._changed()

    def _pause(self) -> float:
        record = self.controller.record if self.controller else None
        moving = record is not None and record.stage in (Stage.REPLACING, Stage.STARTING)
        now = self._s.monotonic()
        self._moving_since = (self._moving_since or now) if moving else None
        if self._moving_since is not None:
            return FAST_SECONDS if now - self._moving_since < FAST_FOR_SECONDS else 5 * FAST_SECONDS
        if self.view is not None and not isinstance(self.view.step, decide.Tend | decide.Wait | decide.Hold):
            return FAST_SECONDS  # something was done: see what came of it
        # A cell that is free can have its part of a checkpoint without another look.
        if self.busy or (self._p.checkpoints.waiting and not self.free):
            return BUSY_SECONDS
        return self._orders.calm if self._orders is not None else CALM_SECONDS


def _outline(seen: CellSeen) -> tuple[object, ...]:
    """What of a look cannot wait to be told."""
    statuses = {name: (one.session, one.phase, one.problem) for name, one in seen.statuses.items()}
    complete = [one.progress.get("complete", 0) for one in seen.statuses.values()]
    drains = seen.drain and (seen.drain.until, seen.drain.over)
    return (seen.record, seen.pods, seen.waits, seen.cause, seen.trouble, statuses, complete, drains)
