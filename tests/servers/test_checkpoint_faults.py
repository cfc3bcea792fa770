"""What goes wrong while a checkpoint is taken: storage and the control network fail in between, participants die,
the coordinator ends. What is reported is what storage says, and nobody stays closed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from gym_rig.cell import Rig, cell
from gym_rig.virtual import now, settle
from gym_servers.control.plane import ControlPlane
from gym_servers.control.writes import RecordWrite
from gym_servers.coordination import checkpoint as coordination
from gym_servers.coordination.checkpoint import CheckpointFailed, Progress
from gym_servers.coordination.client import ParticipantClient, Unreachable
from gym_servers.coordination.record import Stage
from gym_servers.coordination.settle import settle_left_open
from gym_servers.coordination.verbs import together
from gym_servers.engine.rows import counter_rows
from gym_servers.protocol.errors import ProtocolError
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.manifest import CHECKPOINT, read_publication
from gym_servers.storage.store import StorageError


def collecting(folder: Path) -> Any:
    return cell(folder, counter_rows(3, 2))


async def under_way(rig: Rig) -> None:
    await rig.until(lambda: rig.effects() >= 3)


async def quiet(_: Progress) -> None:
    return None


def stored(rig: Rig) -> list[str]:
    """What storage says of its checkpoints."""
    return [read_publication(path.read_bytes()).state for path in Path(rig.root).rglob(CHECKPOINT)]


def restored(rig: Rig) -> str | None:
    choice = rig.controller.record.recoveries[-1].checkpoint
    return choice and choice.name


def open_everywhere(rig: Rig) -> bool:
    return all(one.server.participant.gate.is_open for one in rig.processes_by_name.values())


def unreliable(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """Storage answers the writes of `checkpoint.json` so: `lost` after it was written, `away` before. The answers
    that are still to come."""
    original, left = DirectoryStore.create, list(answers)

    def create(self: DirectoryStore, key: str, data: bytes) -> None:
        answer = left.pop(0) if left and key.endswith(CHECKPOINT) else ""
        if answer != "away":
            original(self, key, data)
        if answer:
            raise StorageError(f"the bucket does not answer ({answer})")

    monkeypatch.setattr(DirectoryStore, "create", create)
    return left


# ---- publishing -------------------------------------------------------------------------------------------


async def test_a_publication_whose_answer_was_lost_is_reported_as_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        left = unreliable(monkeypatch, "lost")
        outcome = await rig.checkpoint("one")
        assert (left, stored(rig), outcome.publication.state) == ([], ["published"], "published")
        assert rig.controller.record.open is None
        rig.kill("agent")
        await rig.until(lambda: rig.running(1))
        assert restored(rig) == "one"


async def test_a_checkpoint_that_was_declared_failed_is_never_published_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the publication nor the tombstone got through: all records and the proposal are durable."""
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        left = unreliable(monkeypatch, "away", "away", "away")
        taken = asyncio.ensure_future(rig.controller.take("one-id", "one", quiet))
        await asyncio.wait([taken])
        failure = taken.exception()
        assert isinstance(failure, CheckpointFailed)
        assert (failure.reason, failure.settled) == ("StorageError", False)
        assert open_everywhere(rig)
        opened = rig.controller.record.open
        assert opened is not None
        assert opened.given_up
        with pytest.raises(CheckpointFailed, match="not settled yet"):
            await rig.controller.take("two-id", "two", quiet)
        with pytest.raises(StorageError):
            await rig.controller.look()
        await rig.until(lambda: rig.controller.record.open is None)
        assert (left, stored(rig)) == ([], ["abandoned"])
        await rig.checkpoint("two")


@pytest.mark.parametrize("broken_off", [False, True])
async def test_nothing_is_forsaken_while_a_thread_may_still_publish_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken_off: bool
) -> None:
    """Or somebody is told that it will not be published, and it is. `broken_off`: nobody waits for the thread."""
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        away = unreliable(monkeypatch, "away", "away", "away")
        with pytest.raises(CheckpointFailed):
            await rig.controller.take("one-id", "one", quiet)
        away.clear()
        controller, to_thread, may_go_on = rig.controller, asyncio.to_thread, asyncio.Event()
        left = controller.record.open
        assert left is not None
        # As a coordinator leaves it that dies before anything has failed.
        controller.record = controller.record.model_copy(update={"open": left.model_copy(update={"given_up": False})})

        async def slow(work: Callable[..., Any], *arguments: Any) -> Any:
            if work is settle_left_open:
                await may_go_on.wait()
            return await to_thread(work, *arguments)

        monkeypatch.setattr(asyncio, "to_thread", slow)
        settling = asyncio.ensure_future(controller.settle(reopen=False))
        await settle()
        if broken_off:
            settling.cancel()
            await asyncio.wait([settling])
        await controller.forsake("one-id")
        assert controller.record.open is not None
        assert not controller.record.open.given_up
        may_go_on.set()
        if not broken_off:
            await settling
            assert controller.record.open is None
        await asyncio.sleep(1.0)  # of virtual time, which stands still while a thread works
        assert stored(rig) == ["published"]
        await controller.forsake("one-id")
        assert broken_off == (controller.record.open is not None and controller.record.open.given_up)


async def test_what_could_not_even_be_begun_to_be_settled_can_be_forsaken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        unreliable(monkeypatch, "away", "away", "away")
        with pytest.raises(CheckpointFailed):
            await rig.controller.take("one-id", "one", quiet)
        controller, left = rig.controller, rig.controller.record.open
        assert left is not None
        controller.record = controller.record.model_copy(update={"open": left.model_copy(update={"given_up": False})})

        def closed(_: str) -> DirectoryStore:
            raise StorageError("no storage can be opened")

        monkeypatch.setattr(controller, "_open_store", closed)
        with pytest.raises(StorageError):
            await controller.settle(reopen=False)
        await controller.forsake("one-id")
        assert controller.record.open is not None
        assert controller.record.open.given_up


@pytest.mark.parametrize("during", ["its announcement", "its write"])
async def test_a_death_while_a_publication_is_under_way_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    """Also where that takes a while: all of it is durable by then."""
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        to_thread, killed = asyncio.to_thread, False

        async def dies() -> None:
            nonlocal killed
            if not killed:
                killed = True
                rig.kill("agent")
                await asyncio.sleep(2)

        async def slow(work: Callable[..., Any], *arguments: Any) -> Any:
            if work is coordination.settle and during == "its write":
                await dies()
            return await to_thread(work, *arguments)

        async def tell(progress: Progress) -> None:
            if progress.phase == "Publishing" and during == "its announcement":
                await dies()

        monkeypatch.setattr(asyncio, "to_thread", slow)
        taken = asyncio.ensure_future(rig.controller.take("one-id", "one", tell))
        await rig.until(lambda: taken.done() and rig.running(1))
        assert taken.result().publication.state == "published"
        assert (stored(rig), restored(rig)) == (["published"], "one")


@pytest.mark.parametrize("step", ["scope", "verify", "settle"])
async def test_an_error_that_nobody_expected_gives_a_checkpoint_up_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody stays closed until a lease ends, it says what it was, and it is never published."""
    async with collecting(tmp_path) as rig:
        await under_way(rig)

        def broken(*_: Any) -> Any:
            raise RuntimeError("a fault of ours")

        with monkeypatch.context() as patched:
            if step == "scope":
                patched.setattr(coordination.Request, "keeps", broken)
            else:
                patched.setattr(coordination, step, broken)
            began = now()
            with pytest.raises(CheckpointFailed, match="RuntimeError") as failed:
                await rig.controller.take("one-id", "one", quiet)
        assert (failed.value.reason, failed.value.settled) == ("InternalError", True)
        assert now() - began < 10
        assert open_everywhere(rig)
        assert set(stored(rig)) <= {"abandoned"}
        assert rig.controller.record.open is None
        assert "a fault of ours" in caplog.text
        await rig.checkpoint("two")


# ---- the pause --------------------------------------------------------------------------------------------


async def test_one_lost_connection_does_not_fail_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A status is asked for again, as every verb is."""
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        once, lost = ParticipantClient._once, set()

        async def flaky(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            if (self.name, verb) not in lost:
                lost.add((self.name, verb))
                raise Unreachable(f"{self.name} does not answer on control: ReadError")
            return await once(self, method, verb, *arguments)

        monkeypatch.setattr(ParticipantClient, "_once", flaky)
        outcome = await rig.controller.take("one-id", "one", quiet)
        assert {verb for _, verb in lost} == {"status", "prepare", "commit", "renew", "resume"}
        assert outcome.publication.state == "published"


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("by", ["the end of the coordinator", "a death"])
async def test_a_checkpoint_that_is_cancelled_while_it_resumes_leaves_nobody_closed_and_stands_if_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, durable: bool
) -> None:
    """Every freeze is proved by then: whether the cell goes on is no question of what was frozen."""
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        original, resuming = ControlPlane.resume, asyncio.Event()
        write, written = RecordWrite._run, asyncio.Event()

        async def hangs(self: RecordWrite, *arguments: Any) -> None:
            await written.wait()
            await write(self, *arguments)

        if not durable:
            monkeypatch.setattr(RecordWrite, "_run", hangs)

        async def slow(self: ControlPlane, request: Any) -> Any:
            if self.author.kind == "resources" and not resuming.is_set():
                resuming.set()
                await asyncio.sleep(0.3)
            return await original(self, request)

        monkeypatch.setattr(ControlPlane, "resume", slow)
        taken = asyncio.ensure_future(rig.controller.take("one-id", "one", quiet))
        await resuming.wait()
        await asyncio.sleep(0.1)  # what can be written is written
        began = now()
        if by == "a death":
            assert rig.controller._checkpoint is not None
            rig.controller._checkpoint.cancel()
        else:
            await rig.controller.close()
        await asyncio.wait([taken])
        assert open_everywhere(rig)
        assert now() - began < 2
        assert (taken.exception() is None) == durable
        assert stored(rig) == ["published" if durable else "abandoned"]
        written.set()


@pytest.mark.parametrize("victim", ["counter", "agent", "policy", "env", "collection"])
async def test_a_death_during_the_resume_publishes_and_the_recovery_continues_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        original = ControlPlane.resume

        async def dies(self: ControlPlane, request: Any) -> Any:
            if self.author.instance == victim and request.checkpoint_id == "one-id":
                rig.kill(victim)
            return await original(self, request)

        monkeypatch.setattr(ControlPlane, "resume", dies)
        taken = asyncio.ensure_future(rig.controller.take("one-id", "one", quiet))
        await rig.until(lambda: taken.done() and rig.running(1))
        assert taken.result().publication.state == "published"
        assert (stored(rig), restored(rig)) == (["published"], "one")
        assert victim in rig.controller.record.recoveries[-1].reason
        await rig.until(rig.complete)
        counted = rig.account(3)
        assert (counted.problems, counted.rows, counted.continued) == ([], 3, 3)


@pytest.mark.parametrize("victims", [("agent",), ("env", "policy", "agent", "counter", "collection")])
async def test_a_recovery_does_not_wait_for_those_who_died_in_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victims: tuple[str, ...]
) -> None:
    """An address without a pod behind it does not refuse a connection, it swallows it."""
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        once, dead = ParticipantClient._once, dict[str, float]()

        async def swallowing(self: ParticipantClient, method: str, *arguments: Any) -> Any:
            if method == "POST" and self.name in dead and not rig.controller.record.recoveries:
                await asyncio.sleep(2)
                raise Unreachable(f"{self.name} does not answer on control: ConnectTimeout")
            return await once(self, method, *arguments)

        monkeypatch.setattr(ParticipantClient, "_once", swallowing)

        async def die(progress: Progress) -> None:
            if progress.phase == "Committing":
                dead.update(dict.fromkeys(victims, now()))
                rig.kill(*victims)

        taken = asyncio.ensure_future(rig.controller.take("one-id", "one", die))
        await rig.until(lambda: rig.controller.record.recoveries)
        assert now() - dead["agent"] < 1.5
        await asyncio.wait([taken])
        assert isinstance(taken.exception(), CheckpointFailed)


@pytest.mark.parametrize("durable", [True, False])
async def test_a_resume_that_one_refuses_keeps_no_other_closed_and_gives_up_what_is_not_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    """As by a process that took the place of the one that is meant. The next look resumes it, or recovers."""
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        once, refused, write, written = ParticipantClient._once, False, RecordWrite._run, asyncio.Event()

        async def refuses(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            nonlocal refused
            if (self.name, verb, refused) == ("policy", "resume", False):
                refused = True
                await asyncio.sleep(0.1)  # what can be written is written
                raise ProtocolError("invalid_phase", "policy: a fresh process is resumed with its cell_attempt")
            return await once(self, method, verb, *arguments)

        async def hangs(self: RecordWrite, *arguments: Any) -> None:
            await written.wait()
            await write(self, *arguments)

        monkeypatch.setattr(ParticipantClient, "_once", refuses)
        if not durable:
            monkeypatch.setattr(RecordWrite, "_run", hangs)
        taken = asyncio.ensure_future(rig.controller.take("one-id", "one", quiet))
        await asyncio.wait([taken])
        closed = [name for name, one in rig.processes_by_name.items() if not one.server.participant.gate.is_open]
        assert closed == ["policy"]
        assert stored(rig) == ["published" if durable else "abandoned"]
        failure = taken.exception()
        assert (failure is None) == durable
        if failure is not None:
            assert (failure.reason, "policy" in str(failure)) == ("ResumeFailed", True)  # type: ignore[attr-defined]
        written.set()
        await rig.until(lambda: open_everywhere(rig))
        await rig.checkpoint("two")


async def test_no_checkpoint_begins_while_a_recovery_is_decided(tmp_path: Path) -> None:
    """Storage and the record take their time: until the record says so, the cell still counts as running."""
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        save, tried = rig.save, list[asyncio.Future[Any]]()

        async def slow(record: Any) -> None:
            if record.stage is Stage.REPLACING and not tried:
                assert rig.controller.record.stage is Stage.RUNNING
                tried.append(asyncio.ensure_future(rig.controller.take("late-id", "late", quiet)))
                await asyncio.sleep(2)
            await save(record)

        rig.save = slow  # type: ignore[method-assign]
        rig.kill("agent")
        await rig.until(lambda: rig.running(1))
        with pytest.raises(CheckpointFailed, match="try again when it runs"):
            await tried[0]
        assert rig.controller.record.open is None
        assert stored(rig) == []


async def test_what_is_done_together_has_ended_when_its_error_comes_out() -> None:
    going: list[str] = []

    async def slow(name: str) -> str:
        going.append(name)
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(1)
            going.remove(name)
        return name

    async def fails() -> str:
        await asyncio.sleep(1)
        raise StorageError("no")

    work: list[Coroutine[Any, Any, str]] = [slow("a"), fails(), slow("b")]
    with pytest.raises(StorageError, match="no"):
        await together(*work)
    assert going == []
    assert await together(slow("a"), slow("b")) == ["a", "b"]


async def test_a_refused_commit_leaves_no_other_commit_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting(tmp_path) as rig:
        await under_way(rig)
        once, asked = ParticipantClient._once, 0

        async def noted(self: ParticipantClient, method: str, verb: str, *arguments: Any) -> Any:
            nonlocal asked
            if verb != "commit":
                return await once(self, method, verb, *arguments)
            asked += 1
            if self.name == "env":
                raise ProtocolError("checkpoint_error", "env: the export failed")
            raise Unreachable(f"{self.name} does not answer on control: ReadError")  # asked again

        monkeypatch.setattr(ParticipantClient, "_once", noted)
        with pytest.raises(CheckpointFailed, match="the export failed"):
            await rig.checkpoint("one")
        before = asked
        await asyncio.sleep(30)
        assert asked == before
