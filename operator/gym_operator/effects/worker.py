"""One stack's worker: keeps what belongs to the stack as a whole as its spec says, again and again.

Woken by events, by its cells, or by a timer. A pass is a list of steps; each can be lost, and the next pass mends it.
The status is written once, last. Each cell is looked after beside it (effects/cell_worker.py), and so is what takes
long: a checkpoint, probing the storage.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any, Final, NamedTuple

from gym_operator.api import names
from gym_operator.api.conditions import ConditionReason
from gym_operator.api.stack import GymStack, StackStatus
from gym_operator.effects.adoptions import Adoptions
from gym_operator.effects.cache import Key
from gym_operator.effects.cell_worker import CellWorker, Orders, Parts
from gym_operator.effects.checkpoints import Checkpoints, Side, pins
from gym_operator.effects.children import ChildProblem, ControlTokens, ensure_children, ensure_secret
from gym_operator.effects.events import Subject
from gym_operator.effects.kube import KubeError
from gym_operator.effects.last_checkpoints import Cell, LastCheckpoints
from gym_operator.effects.leftovers import Leftovers
from gym_operator.effects.restores import Restores
from gym_operator.effects.services import Services
from gym_operator.effects.stack_pods import StackPods
from gym_operator.effects.status_writers import Gone, StackWriter, Superseded
from gym_operator.effects.storage import StackStorage
from gym_operator.effects.unasked import Unasked
from gym_operator.rules.cell_record import how_to_go_on, stopped_by
from gym_operator.rules.checkpoint_phases import Origin
from gym_operator.rules.checkpoint_queue import Obstacle, Situation
from gym_operator.rules.generations import Generations
from gym_operator.rules.observed import CellSeen, Engine, Observed
from gym_operator.rules.rest import at_rest, storage_told, was_at_rest
from gym_operator.rules.rollouts import Standing, Turn, standing_of, whose_turn, yields
from gym_operator.rules.spec_check import Problem, check_stack
from gym_operator.rules.stack_status import differs_in_progress_only, stack_status, warnings
from gym_operator.rules.workloads import StackContext, templates
from gym_servers.coordination.cell_host import CellSettings
from gym_servers.coordination.record import KEPT_RECOVERIES, CellRecord, Stage
from gym_servers.stack.durations import age_seconds, parse_duration, parse_duration_or_zero
from gym_servers.stack.render import checkpoint_root, stack_root
from gym_servers.storage.ownership import Owner
from gym_servers.storage.store import StorageError

log = logging.getLogger(__name__)

BUSY_SECONDS: Final = 0.25
CALM_SECONDS: Final = 1.0
TROUBLE_SECONDS: Final = 1.0
"""After a pass that failed."""
ENSURE_SECONDS: Final = 60.0
"""Between looks at children that nobody should have touched."""
ENSURE_STARTING_SECONDS: Final = 10.0
PROGRESS_SECONDS: Final = 1.0
"""Between writes of the driver's counters."""
REST_SECONDS: Final = 600.0
"""Between looks at a stack that is at rest: all that can happen to it is told."""
ENSURE_AT_REST_SECONDS: Final = 3600.0
"""Between looks at the children of such a stack."""
MOST_ASKED: Final = 300
"""Servers that are asked for their status each second while nothing happens: a death wakes its cell anyway."""
TORN_SECONDS: Final = 5.0
"""A checkpoint that was to stop a stack and has stopped some of its cells only has failed when nothing more comes."""
DELETED: Final = "StackDeleted"
"""Why a worker ends whose stack is gone, and whose pods go with it."""
LEAST_RECOVERIES: Final = 2
"""Past recoveries that a record keeps however many cells there are: all records have to fit into one object."""


class Ensured(NamedTuple):
    """How the stack's objects were found: good until `until` (monotonic), for this generation of the spec, for so
    many cells that are needed and that are at work, for servers that are still needed, for `running` pods or none,
    and for the cells `yielding`, whose pods may be evicted."""

    generation: int
    kept: int
    at_work: int
    servers: frozenset[str]
    running: bool
    yielding: frozenset[int]
    until: float
    problem: Problem | None
    trouble: str


class StackWorker:
    """Works until it is cancelled or its stack is gone. `pass_began` (monotonic) is when the pass under way began, or
    last heard from its storage; None between passes. `first_looks` is held during the first, `looked` says that it is
    over. `generations` is what its policy servers count."""

    def __init__(self, services: Services, key: Key, uid: str, first_looks: asyncio.Semaphore) -> None:
        self.key, self.uid = key, uid
        self.pass_began: float | None = None
        self.looked = False
        self._first_looks = first_looks
        self._s = services
        self._wake = asyncio.Event()
        self._subject = Subject(names.STACK_KIND, key.namespace, key.name, uid)
        self._writer = StackWriter(services.kube, key.namespace, key.name, uid, self._following)
        owner = Owner(cluster=services.cluster or uid, stack_uid=uid, namespace=key.namespace, name=key.name)
        self._storage = StackStorage(
            services.kube, key.namespace, services.monotonic, owner, self._progressed, services.accesses
        )
        self._pods = StackPods(services, self._subject)
        self._checkpoints = Checkpoints(services, key, self._storage.open, self._wake_cell)
        self._adoptions = Adoptions(services, key, self._storage.open, self.wake)
        self._restores = Restores(services, key, uid, self._storage.open, self.wake, self._wake_cell)
        self._leftovers = Leftovers(
            self._storage.open, owner, services.wall, Unasked(services, self._subject, self._storage.open)
        )
        self._last = LastCheckpoints(services, key, self._storage.open, self.wake)
        self.generations = Generations()
        self._parts = Parts(
            services,
            self._subject,
            self._writer,
            self._pods,
            self._storage,
            self._checkpoints,
            self._restores,
            self.generations,
        )
        self._cells: dict[int, tuple[CellWorker, asyncio.Task[None]]] = {}
        self._good: GymStack | None = None
        self._observe_now: Callable[[], Observed] | None = None
        self._tokens: ControlTokens | None = None
        self._templates: Mapping[str, str] = {}
        self._turn = Turn()
        self._loaded = False
        self._ensured: Ensured | None = None
        self._written = float("-inf")
        self._torn_since: float | None = None

    def wake(self) -> None:
        """Look at once."""
        self._wake.set()

    def pod_changed(self, cell: int, *, ended: bool) -> None:
        """Something is new about a pod of a cell; `ended`: it is not alive any more."""
        if (found := self._cells.get(cell)) is not None:
            if ended:
                found[0].pod_ended()
            else:
                found[0].wake()
        self.wake()

    def stuck(self, seconds: float) -> bool:
        """Whether a pass, over the stack or over one of its cells, has gone on for so long."""
        began = [self.pass_began, *(cell.pass_began for cell, _ in self._cells.values())]
        return any(at is not None and self._s.monotonic() - at > seconds for at in began)

    def _progressed(self) -> None:
        """A storage that answers again and again is slow, and who waits for it is not stuck. In any thread."""
        now = self._s.monotonic()
        if self.pass_began is not None:
            self.pass_began = now
        for cell, _ in list(self._cells.values()):
            if cell.pass_began is not None:
                cell.pass_began = now

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            for _, task in self._cells.values():
                task.cancel()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            began = self.pass_began = self._s.monotonic()
            try:
                async with nullcontext() if self.looked else self._first_looks:
                    began = self.pass_began = self._s.monotonic()
                    pause = await self._pass()
                self.looked = True
            except Gone:
                return
            except Superseded as error:
                log.warning("stack %s/%s: %s; standing by", *self.key, error)
                self._checkpoints.forget()
                for cell, _ in self._cells.values():
                    cell.stand_by()
                    cell.wake()
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
        if self._cells:
            await asyncio.wait([task for _, task in self._cells.values()])
        if reason == DELETED:
            await asyncio.gather(*(cell.dismiss() for cell, _ in self._cells.values()))
        await asyncio.gather(*(cell.let_go(reason, message) for cell, _ in self._cells.values()))
        with suppress(Gone, Superseded, KubeError, StorageError):
            await self._checkpoints.close(reason, message)
        self._adoptions.close()
        self._restores.close()
        self._last.close()
        self._leftovers.close()
        self._storage.close()

    # ---- one pass -----------------------------------------------------------------------------------------

    async def _pass(self) -> float:
        """One look at everything; how long to wait for the next."""
        if any(cell.gone for cell, _ in self._cells.values()):
            raise Gone(f"stack {self.key.name} is gone")
        elsewhere = [cell.stands_by for cell, _ in self._cells.values()]
        if elsewhere and all(elsewhere):
            return TROUBLE_SECONDS  # another operator is at work: its status stands
        body = self._s.cache.stacks.get(self.key)
        if body is None or body["metadata"]["uid"] != self.uid or body["metadata"].get("deletionTimestamp"):
            return CALM_SECONDS  # whoever runs the workers ends this one
        stack, problem = self._read(body)
        await self._load()
        generation = int(body["metadata"].get("generation") or 0)
        if stack is None:
            await self._conclude(lambda: Observed(generation=generation, participants=(), problem=problem))
            return CALM_SECONDS
        self._see_to_cells(stack)
        resting = problem is None and self._rests(stack)
        # Before its pods go: a cell that is to stop must not take that for somebody's deletion.
        self._give_orders(stack, resting)
        ensured = await self._ensure(stack, generation, resting)
        problem = problem or ensured.problem
        if not resting or not self._is_proved(generation):
            await self._tend_storage(stack)
        self._give_orders(stack, resting)
        sides = {index: self._side(stack, problem, cell) for index, (cell, _) in self._cells.items()}
        await self._checkpoints.step(sides, stack.spec.checkpoints.cell_order)
        await self._adoptions.step(self._unreadable(stack), self._checkpoints.origin)
        # A cell that has given up is just what a restore may help.
        hindrance = self._obstacle(stack, problem) or self._unreadable(stack)
        records = {index: cell.record for index, (cell, _) in self._cells.items() if index < stack.spec.cells}
        if not any(elsewhere):  # they are about all cells
            await self._restores.step(records, stack.spec.participants(), hindrance, self._checkpoints.active)
        self._see_to_storage(stack)
        await self._conclude(lambda: self._observe(stack, generation, problem, ensured.trouble))
        if resting and self._all_is_told(stack, generation):
            return REST_SECONDS
        return BUSY_SECONDS if self._checkpoints.waiting or self._restores.waiting else CALM_SECONDS

    def _rests(self, stack: GymStack) -> bool:
        """Whether nothing is to be done before somebody wants something."""
        cells = [cell for cell, _ in self._cells.values()]
        return (
            at_rest(
                suspended=stack.spec.suspend,
                records=[cell.record for cell in cells],
                has_pods=self._s.cache.has_pods(self.uid),
                waiting=self._checkpoints.waiting or self._restores.waiting or any(cell.busy for cell in cells),
            )
            and len(cells) == stack.spec.cells
        )

    def _is_proved(self, generation: int) -> bool:
        """Whether the storage of this spec is known to be good, from whichever operator."""
        return self._storage.state.ok is True or storage_told(self._writer.status, generation) is not None

    def _all_is_told(self, stack: GymStack, generation: int) -> bool:
        """Whether the next look would have nothing to add to the status."""
        tried = (
            not stack.spec.checkpoints.enabled or self._storage.state.ok is not None or self._is_proved(generation)
        )
        return tried and self._s.monotonic() - self._written >= PROGRESS_SECONDS

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
        await self._pods.refresh()
        self._loaded = True

    # ---- children and storage -----------------------------------------------------------------------------

    async def _ensure(self, stack: GymStack, generation: int, resting: bool) -> Ensured:
        """The stack's objects as its spec wants them. Where that fails, cells that run are looked after all the
        same. Of a stack at rest they may be as the operator before has left them: many begin at once."""
        now, kept = self._s.monotonic(), max(self._cells) + 1
        at_work = max(kept, self._pods.cells_at_work())
        running = not stack.spec.suspend and not (stack.spec.checkpoints.enabled and all(self._stopped(stack)))
        servers = self._servers() - {each.name for each in stack.spec.participants()}
        yielding = frozenset(
            index
            for index, (cell, _) in self._cells.items()
            if yields(cell.record, self._pods.of(index), self._s.cache.cordoned)
        )
        wanted, known = (generation, kept, at_work, servers, running, yielding), self._ensured
        if known is None and resting and was_at_rest(self._writer.status, generation):
            known = self._ensured = Ensured(*wanted, now - ENSURE_AT_REST_SECONDS * random.random(), None, "")
        if known is not None and known[: len(wanted)] == wanted:
            calm = resting and not known.problem and not known.trouble
            if now < known.until + (ENSURE_AT_REST_SECONDS if calm else 0.0):
                return known
        settled = all(
            cell.record is not None and cell.record.stage is Stage.RUNNING for cell, _ in self._cells.values()
        )
        guarded = self._s.watches_nodes and stack.spec.checkpoints.enabled
        context = StackContext(
            stack.identity, stack.spec, self._s.operator_namespace, kept, at_work, servers, guarded, yielding
        )
        problem, trouble = None, ""
        try:
            self._tokens = await ensure_secret(self._s.kube, context)
            await ensure_children(self._s.kube, context, running=running)
            self._pods.let_through(yielding)
            self._templates = templates(context)  # only now: fresh pods are made from these
        except ChildProblem as error:
            problem = error.problem
        except KubeError as error:
            trouble = str(error)
            self._s.events.say(self._subject, "Warning", "ObjectsNotApplied", trouble)
        seconds = TROUBLE_SECONDS if trouble else ENSURE_SECONDS if settled else ENSURE_STARTING_SECONDS
        self._ensured = Ensured(*wanted, now + seconds, problem, trouble)
        return self._ensured

    def _servers(self) -> frozenset[str]:
        """Servers of cells in service: whatever the spec says, each cell lets them go in its turn."""
        in_service = (Stage.RUNNING, Stage.STOPPED)
        records = [cell.record for cell, _ in self._cells.values()]
        return frozenset(
            name for record in records if record is not None and record.stage in in_service for name in record.pins
        )

    async def _tend_storage(self, stack: GymStack) -> None:
        storage = stack.spec.checkpoints.storage
        if storage is None or not stack.spec.checkpoints.enabled:
            return
        self._checkpoints.origin = Origin(self.uid, storage.document())
        try:
            await self._storage.tend(storage, stack_root(storage, stack.identity))
        except KubeError as error:
            log.warning("stack %s/%s: Secrets of the storage: %s", *self.key, error)

    # ---- cells --------------------------------------------------------------------------------------------

    def _see_to_cells(self, stack: GymStack) -> None:
        """A worker for each cell, and for each that the spec does not have any more until it has stopped. The highest
        go first: a StatefulSet takes away no others."""
        wanted = set(range(stack.spec.cells))
        if not self._cells:
            # An operator before this one may not have come to the end of taking cells away.
            wanted |= {index for index in self._writer.cells if self._runs(index)}
        for index in sorted(wanted - set(self._cells)):
            cell = CellWorker(self._parts, index, self.wake)
            task = asyncio.create_task(cell.run(), name=str(cell))
            self._cells[index] = (cell, task)
        while (last := max(self._cells)) >= stack.spec.cells and self._cells[last][0].stopped:
            self._cells.pop(last)[1].cancel()
        self._checkpoints.among = range(stack.spec.cells)

    def _stopped(self, stack: GymStack) -> list[bool]:
        """Of each cell that is to stay, whether it stands stopped by a checkpoint."""
        return [stopped_by(cell.record) is not None for i, (cell, _) in self._cells.items() if i < stack.spec.cells]

    def _is_torn(self, stack: GymStack) -> bool:
        """Whether some cells stand stopped, and the others did not get to it: a stack is stopped as a whole or not at
        all. For a while, since what is being taken ends for one cell after the other."""
        stopped = self._stopped(stack)
        torn = any(stopped) and not all(stopped) and not self._checkpoints.waiting
        self._torn_since = (self._torn_since or self._s.monotonic()) if torn else None
        return self._torn_since is not None and self._s.monotonic() - self._torn_since >= TORN_SECONDS

    def _runs(self, index: int) -> bool:
        """Whether a cell that was in service has all its pods still."""
        record, pods = self._writer.record(index), self._pods.of(index)
        return (
            record is not None
            and bool(record.pins)
            and all(name in pods and pods[name].alive for name in record.pins)
        )

    def _give_orders(self, stack: GymStack, resting: bool) -> None:
        if self._tokens is None:
            return  # nothing of this stack runs yet
        enabled, participants = stack.spec.checkpoints.enabled, stack.spec.participants()
        release = self._is_torn(stack)
        self._turn = self._whose_turn(stack)
        drain = parse_duration_or_zero(stack.spec.scale_down.drain_timeout)
        calm = REST_SECONDS if resting else max(CALM_SECONDS, len(self._cells) * len(participants) / MOST_ASKED)
        for index, (cell, _) in self._cells.items():
            settings = self._settings(stack, index) if enabled else None
            stop = index >= stack.spec.cells
            prefix = f"cell {index}: " if len(self._cells) > 1 else ""
            orders = Orders(participants, settings, stack.spec.suspend, stop, drain, release, calm)
            cell.order(
                replace(
                    orders, templates=self._templates, cordoned=self._s.cache.cordoned, turn=index == self._turn.cell
                ),
                prefix,
            )

    def _whose_turn(self, stack: GymStack) -> Turn:
        """The cell whose pods may be replaced now, where that can wait."""
        cells = {i: cell for i, (cell, _) in self._cells.items() if i < stack.spec.cells}
        enabled, participants = stack.spec.checkpoints.enabled, stack.spec.participants()

        def standing(cell: CellWorker) -> Standing:
            if enabled:
                return standing_of(cell.record)
            pods = self._pods.of(cell.index)
            serves = all(each.name in pods and pods[each.name].ready for each in participants)
            return Standing.SERVES if serves else Standing.COMES

        return whose_turn(
            {i: standing(cell) for i, cell in cells.items()},
            {i: cell.cause for i, cell in cells.items()},
            [i for i, cell in cells.items() if cell.moves],
        )

    def _settings(self, stack: GymStack, index: int) -> CellSettings:
        spec = stack.spec
        assert spec.checkpoints.storage is not None  # the spec demands it where checkpoints are enabled
        assert self._tokens is not None  # without them nothing of this stack runs
        return CellSettings(
            stack_uid=self.uid,
            cell=index,
            token=self._tokens.current,
            previous_token=self._tokens.previous,
            root=checkpoint_root(spec.checkpoints.storage, stack.identity, index),
            policy=spec.recovery.policy,
            max_checkpoint_age=age_seconds(spec.recovery.max_checkpoint_age),
            backoff_limit=spec.recovery.backoff_limit,
            prepare_timeout=parse_duration(spec.checkpoints.prepare_timeout),
            commit_timeout=parse_duration(spec.checkpoints.commit_timeout),
            kept_recoveries=max(LEAST_RECOVERIES, KEPT_RECOVERIES // spec.cells),
            restart_blockers_after=spec.checkpoints.restart_blockers_after,
            any_code=spec.recovery.code_mismatch == "Accept",
            patient=True,
        )

    def _wake_cell(self, index: int) -> None:
        if (found := self._cells.get(index)) is not None:
            found[0].wake()
        self.wake()

    # ---- what comes of it ---------------------------------------------------------------------------------

    def _observe(self, stack: GymStack, generation: int, problem: Problem | None, trouble: str) -> Observed:
        enabled, storage = stack.spec.checkpoints.enabled, self._storage.state
        if storage.ok is None and stack.spec.suspend:
            # Proved by an operator before this one, and not needed now.
            storage = storage_told(self._writer.status, generation) or storage
        return Observed(
            generation=generation,
            participants=stack.spec.participants(),
            cells=tuple(cell.seen() for _, (cell, _) in sorted(self._cells.items())),
            waits=trouble,
            problem=problem,
            suspended=stack.spec.suspend,
            checkpoints_enabled=enabled,
            storage=storage if enabled else None,
            checkpoint=self._checkpoints.active,
            engine=self._engine(stack),
            last_of=self._last.sure,
            after=self._turn.after,
        )

    def _engine(self, stack: GymStack) -> Engine | None:
        """The engine of its inference block, as its pods say."""
        if stack.spec.inference is None:
            return None
        running = self._ensured is None or self._ensured.running
        return Engine(stack.spec.inference.vllm.replicas if running else 0, self._pods.engines())

    def _see_to_storage(self, stack: GymStack) -> None:
        """What the cells have there, also those that were taken away: what each would continue from, and what nobody
        needs any more."""
        storage = stack.spec.checkpoints.storage
        if storage is None or not stack.spec.checkpoints.enabled:
            return
        told = {cell.index: cell.last_checkpoint for cell in self._writer.status.cells}
        records = {
            index: record for index in self._writer.cells if (record := self._writer.record(index)) is not None
        }
        roots = {index: checkpoint_root(storage, stack.identity, index) for index in records}
        self._last.step(
            {
                index: Cell(record, roots[index], self._checkpoints.last_of.get(index), told.get(index))
                for index, record in records.items()
            },
            usable=self._storage.state.ok is True,
        )
        self._leftovers.step(
            {index: (record, roots[index]) for index, record in records.items()},
            stack_root(storage, stack.identity),
            usable=self._storage.state.ok is True,
        )

    def _side(self, stack: GymStack, problem: Problem | None, cell: CellWorker) -> Side:
        """A cell's side of the queue of checkpoints."""
        record, participants = cell.record, stack.spec.participants()
        obstacle = self._obstacle(stack, problem)
        if obstacle is None and cell.index >= stack.spec.cells:
            obstacle = (ConditionReason.STACK_NOT_READY, "the cell is being taken away")
        elif obstacle is None and (checkpoint := stopped_by(record)) is not None:
            obstacle = (ConditionReason.STACK_NOT_READY, how_to_go_on(checkpoint))
        elif obstacle is None and record is not None and record.stage is Stage.STALLED:
            obstacle = (ConditionReason.STACK_NOT_READY, "the stack has given up; its condition Stalled says why")
        situation = Situation(
            enabled=stack.spec.checkpoints.enabled,
            stage=record.stage if record else None,
            free=obstacle is None and cell.free and not self._restores.is_next and not cell.is_moved,
            open_id=record.open.checkpoint_id if record and record.open else None,
            obstacle=obstacle,
            storage_proved=self._storage.state.ok is True,
            elsewhere=cell.stands_by,
            given_up=bool(record and record.open and record.open.given_up),
        )
        return Side(
            situation, cell.controller, lambda: pins(record, participants, self._pods.of(cell.index)), cell.statuses
        )

    def _obstacle(self, stack: GymStack, problem: Problem | None) -> Obstacle | None:
        """What only a person can mend."""
        if problem is not None:
            return ConditionReason.STACK_NOT_READY, problem.message
        if stack.spec.suspend:
            return ConditionReason.STACK_NOT_READY, "the stack is suspended; set spec.suspend to false"
        state = self._storage.state
        return (state.reason, state.message) if state.ok is False else None

    def _unreadable(self, stack: GymStack) -> Obstacle | None:
        """What keeps checkpoints from being read through this stack's storage."""
        if not stack.spec.checkpoints.enabled:
            return ConditionReason.CHECKPOINTS_DISABLED, "checkpoints are turned off in this stack"
        state = self._storage.state
        return (state.reason, state.message) if state.ok is False else None

    async def _conclude(self, observe: Callable[[], Observed]) -> None:
        """Write the status, once and last; then the events, so that nobody reads of one without the other."""
        self._observe_now = observe
        if await self._writer.write(self._status_now):
            self._written = self._s.monotonic()
        for reason, message in warnings(observe()):
            self._s.events.say(self._subject, "Warning", reason, message)

    def _status_now(self, before: StackStatus) -> StackStatus | None:
        """The status as all is now; None where nothing but counters would change so soon."""
        assert self._observe_now is not None
        status = stack_status(before, self._observe_now(), self._s.wall())
        soon = self._s.monotonic() - self._written < PROGRESS_SECONDS
        return None if soon and differs_in_progress_only(before, status) else status

    def _following(self, status: StackStatus, index: int, record: CellRecord) -> StackStatus:
        """The status that goes with a cell's record saved between two passes."""
        if self._observe_now is None:
            return status
        observed = self._observe_now()

        def with_record(cell: CellSeen) -> CellSeen:
            return replace(cell, record=record, waits="") if cell.index == index else cell

        cells = tuple(with_record(cell) for cell in observed.cells)
        return stack_status(status, replace(observed, cells=cells), self._s.wall())
