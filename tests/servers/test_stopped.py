"""A cell that a checkpoint has stopped: it stays closed for as long as somebody looks after it, whoever that is; the
end of its processes is no death; and it goes on, by the same processes or by fresh ones, when it is asked to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import GRACE, LOOK_SECONDS, Rig, cell
from gym_rig.coordinator import CoordinatorProcess
from gym_rig.virtual import now
from gym_servers.coordination.checkpoint import CheckpointFailed, Outcome, Progress
from gym_servers.coordination.client import ParticipantClient
from gym_servers.coordination.record import CellRecord, Stage
from gym_servers.coordination.settle import settle_left_open
from gym_servers.engine.rows import counter_rows
from gym_servers.protocol.phases import Phase
from gym_servers.storage.manifest import CHECKPOINT, read_publication

ROLLOUTS = 3


@asynccontextmanager
async def collecting(folder: Path) -> AsyncIterator[Rig]:
    """A cell in the middle of its work."""
    async with cell(folder, counter_rows(ROLLOUTS, 2)) as rig:
        await rig.until(lambda: rig.effects() >= ROLLOUTS)
        yield rig


async def quiet(_: Progress) -> None:
    return None


async def stop(rig: Rig, tell: Any = quiet, **options: Any) -> Outcome:
    """A checkpoint that stops the cell, while looks go on."""
    taken = asyncio.ensure_future(rig.controller.take("halt-id", "halt", tell, stop=True, **options))
    await rig.until(taken.done)
    return taken.result()


def phases(rig: Rig) -> set[Phase]:
    return {one.server.participant.gate.phase for one in rig.processes_by_name.values()}


def stage(rig: Rig) -> Stage:
    return rig.controller.record.stage


def stored(rig: Rig) -> list[str]:
    return sorted(read_publication(path.read_bytes()).state for path in Path(rig.root).rglob(CHECKPOINT))


async def passes(rig: Rig, seconds: float) -> None:
    """Time, with looks in it."""
    began = now()
    await rig.until(lambda: now() - began >= seconds)


async def to_the_end(rig: Rig, continued: int) -> None:
    await rig.until(rig.complete)
    counted = rig.account(ROLLOUTS)
    assert counted.problems == []
    assert (counted.rows, counted.reward_mean, counted.continued) == (ROLLOUTS, 1.0, continued)


async def test_looks_keep_a_stopped_cell_closed_and_a_release_lets_it_go_on(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        outcome = await stop(rig)
        assert (stage(rig), stored(rig)) == (Stage.STOPPED, ["published"])
        stopped = rig.controller.record.stopped
        assert stopped is not None
        assert (stopped.name, stopped.uri, stopped.digest) == ("halt", outcome.uri, outcome.digest)
        effects = rig.effects()
        await passes(rig, 4 * GRACE)
        assert (phases(rig), rig.effects()) == ({Phase.COMMITTED}, effects)
        with pytest.raises(CheckpointFailed, match="the cell is stopped"):
            await rig.controller.take("more-id", "more", quiet)
        await rig.controller.release()
        await rig.until(rig.running)
        assert (phases(rig), rig.controller.record.attempt) == ({Phase.IDLE}, 0)
        assert rig.controller.record.stopped is None
        await to_the_end(rig, continued=0)


async def test_the_end_of_its_processes_is_no_death_and_it_goes_on_from_what_stopped_it(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        await stop(rig)
        rig.kill("agent", "env")
        await passes(rig, 2 * GRACE)
        rig.kill()
        await passes(rig, 2 * GRACE)
        assert (stage(rig), rig.controller.record.attempt, phases(rig)) == (Stage.STOPPED, 0, {Phase.STARTING})
        assert not [said for said in rig.said if said[0] == "Warning"]
        await rig.controller.release()
        await rig.until(lambda: rig.running(1))
        recovery = rig.controller.record.recoveries[-1]
        assert recovery.checkpoint is not None
        assert (recovery.planned, recovery.checkpoint.name) == (True, "halt")
        assert rig.controller.record.failures == 0
        await to_the_end(rig, continued=ROLLOUTS)
        calls = [entry["call_id"] for entry in rig.journal() if entry["kind"] == "effect"]
        assert len(calls) == len(set(calls)), "nothing is done twice where nobody worked behind the cut"


async def test_a_policy_for_deaths_does_not_start_a_stopped_cell_over(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        rig.controller.settings = rig.cell_settings(policy="Restart", backoff_limit=0)
        await stop(rig)
        rig.kill()
        await rig.controller.release()
        await rig.until(lambda: rig.running(1))
        await to_the_end(rig, continued=ROLLOUTS)


async def test_another_coordinator_finds_it_stopped_and_goes_on_with_it(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        await stop(rig)
        rig.controller = rig.coordinator(rig.saved[-1])
        await passes(rig, 2 * GRACE)
        assert phases(rig) == {Phase.COMMITTED}
        await rig.controller.release()
        rig.controller = rig.coordinator(rig.saved[-1])  # the wish is durable too
        await rig.until(rig.running)
        await to_the_end(rig, continued=0)


@pytest.mark.parametrize("die", [False, True])
async def test_what_went_on_by_itself_while_nobody_looked_is_never_done_twice(tmp_path: Path, die: bool) -> None:
    """Its leases ended: what it did then is behind the cut, and is lost where its processes end all the same."""
    async with collecting(tmp_path) as rig:
        await stop(rig)
        await asyncio.sleep(GRACE + 2)
        assert phases(rig) == {Phase.IDLE}
        await rig.controller.look()
        assert stage(rig) is Stage.STOPPED
        if die:
            rig.kill()
        await rig.controller.release()
        await rig.until(lambda: rig.running(int(die)))
        await rig.until(rig.complete)
        assert rig.account(ROLLOUTS).problems == []


@pytest.mark.parametrize(("moment", "published"), [("Preparing", False), ("Committing", False), ("Publishing", True)])
async def test_a_death_while_it_is_being_stopped_is_one_unless_all_is_durable(
    tmp_path: Path, moment: str, published: bool
) -> None:
    async with collecting(tmp_path) as rig:

        async def tell(progress: Progress) -> None:
            if progress.phase == moment:
                rig.kill("counter")
                await asyncio.sleep(1)  # looks see it meanwhile

        taken = asyncio.ensure_future(rig.controller.take("halt-id", "halt", tell, stop=True))
        if published:
            await rig.until(lambda: taken.done() and stage(rig) is Stage.STOPPED)
            await passes(rig, 10)
            assert (taken.result().publication.state, rig.controller.record.attempt) == ("published", 0)
            await rig.controller.release()
        await rig.until(lambda: taken.done() and rig.running(1))
        recovery = rig.controller.record.recoveries[-1]
        assert (recovery.planned, recovery.checkpoint is not None) == (published, published)
        assert (taken.exception() is None) == published
        await to_the_end(rig, continued=ROLLOUTS if published else 0)


async def end(*tasks: asyncio.Task[Any] | None) -> None:
    """What a dead coordinator left waits for ever."""
    for task in tasks:
        if task is not None:
            task.cancel()
            await asyncio.wait([task], timeout=1)


async def never() -> None:
    await asyncio.get_running_loop().create_future()


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, rig: Rig, step: str) -> Iterator[tuple[CoordinatorProcess, Any]]:
    """A coordinator that is killed at a step of the checkpoint it takes: a verb that is on its way, a phase that it
    announces, or the record that says that the cell stands stopped. It, and what it tells of its phases by."""
    first = CoordinatorProcess(rig, rig.saved[-1], LOOK_SECONDS, lease_grace=GRACE)
    once, save = ParticipantClient._once, CoordinatorProcess.save

    async def asks(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
        answer = await once(self, method, verb, *arguments)
        opened = first.controller.record.open is not None
        if opened and (self.name, verb) == ("counter", step) and not first.alive.died.is_set():
            first.kill()
            await never()
        return answer

    async def saves(self: CoordinatorProcess, record: CellRecord) -> None:
        if self is first and step == "stopped" and record.stage is Stage.STOPPED:
            first.kill()
            await never()
        await save(self, record)

    async def tell(progress: Progress) -> None:
        if progress.phase == step:
            first.kill()
            await never()

    with monkeypatch.context() as patched:
        patched.setattr(ParticipantClient, "_once", asks)
        patched.setattr(CoordinatorProcess, "save", saves)
        yield first, tell


@pytest.mark.parametrize("away", [1.0, GRACE + 5])
@pytest.mark.parametrize("step", ["prepare", "commit", "renew", "Publishing", "stopped"])
async def test_c1_a_coordinator_lost_while_it_stops_a_cell_leaves_it_stopped_or_at_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, away: float
) -> None:
    """Also where its successor comes late, when everybody has gone on by himself."""
    async with collecting(tmp_path) as rig:
        with dying(monkeypatch, rig, step) as (first, tell):
            while first.view is None:  # noqa: ASYNC110 - until it has looked once
                await asyncio.sleep(LOOK_SECONDS)
            taking = asyncio.ensure_future(first.controller.take("halt-id", "halt", tell, stop=True))
            await asyncio.wait_for(first.alive.died.wait(), GRACE)
        await asyncio.sleep(away)
        rig.controller = rig.coordinator(rig.saved[-1])
        assert rig.controller.record.open is not None
        assert rig.controller.record.open.stop
        await rig.until(lambda: rig.controller.record.open is None)
        published = step in ("Publishing", "stopped")
        assert stored(rig) == (["published"] if published else ["abandoned"])
        assert stage(rig) is (Stage.STOPPED if published else Stage.RUNNING)
        if not published:
            await rig.until(lambda: phases(rig) == {Phase.IDLE})
        elif away < GRACE:
            await passes(rig, 2 * GRACE)
            assert phases(rig) == {Phase.COMMITTED}
            rig.kill()
        await rig.controller.release()
        await rig.until(rig.complete)
        assert rig.account(ROLLOUTS).problems == []
        await end(taking, first.looking, first.controller._checkpoint)


@pytest.mark.parametrize("slow", ["the record", "storage"])
async def test_nobody_goes_on_while_it_takes_long_to_say_that_the_cell_stands_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """The record is saved slowly; or another coordinator has to ask a slow storage first what became of it."""
    async with collecting(tmp_path) as rig:
        save, to_thread = rig.save, asyncio.to_thread

        async def saves(record: CellRecord) -> None:
            if record.stage is Stage.STOPPED and slow == "the record":
                await asyncio.sleep(2 * GRACE)
            await save(record)

        async def settles(work: Any, *arguments: Any) -> Any:
            if work is settle_left_open:
                await asyncio.sleep(2 * GRACE)
            return await to_thread(work, *arguments)

        monkeypatch.setattr(rig, "save", saves)
        monkeypatch.setattr(asyncio, "to_thread", settles)
        first = None
        if slow == "storage":
            with dying(monkeypatch, rig, "Publishing") as (first, tell):
                await rig.until(lambda: first.view)
                taking = asyncio.ensure_future(first.controller.take("halt-id", "halt", tell, stop=True))
                await asyncio.wait_for(first.alive.died.wait(), GRACE)
            rig.controller = rig.coordinator(rig.saved[-1])
        else:
            taking = asyncio.ensure_future(rig.controller.take("halt-id", "halt", quiet, stop=True))
        began = now()
        await rig.until(lambda: stage(rig) is Stage.STOPPED)
        assert now() - began >= 2 * GRACE
        assert phases(rig) == {Phase.COMMITTED}
        await end(taking, *([first.looking, first.controller._checkpoint] if first is not None else []))


async def test_a_checkpoint_of_a_controller_may_keep_some_episodes_only(tmp_path: Path) -> None:
    async with collecting(tmp_path) as rig:
        kept = sorted(rig.participant("env")._live)[0]
        taken = asyncio.ensure_future(
            rig.controller.take("some-id", "some", quiet, episodes=frozenset({kept}), prepare_timeout=5.0)
        )
        await rig.until(taken.done)
        assert taken.result().publication.episodes == [kept]
        rig.kill("agent")
        await to_the_end(rig, continued=1)
