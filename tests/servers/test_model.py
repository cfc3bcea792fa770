"""The model participant: nothing is generated twice, and what was delivered is in the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from gym_rig.verbs import checkpoint, commit, prepare, restore, resume, start
from gym_rig.virtual import now, settle
from gym_servers.capture.arrays import int32
from gym_servers.capture.ledger import CallRecord
from gym_servers.participants.gate import Gate
from gym_servers.participants.model import ModelParticipant
from gym_servers.participants.model_call import Asked, Call
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

R0, R1, R2 = (Episode("r", attempt) for attempt in range(3))


class Engine:
    """Generates numbered replies, each when a test lets it."""

    def __init__(self, *, started: bool = True) -> None:
        self.participant = ModelParticipant(Gate(clock=now))
        if started:
            start(self.participant)
        self.generated = 0
        self.turnstile = asyncio.Semaphore(1000)

    async def call(self, position: str = "1.1", *, episode: Episode = R0, digest: str = "d") -> int:
        async def generate(call: Call) -> CallRecord:
            self.generated += 1
            number = self.generated
            await self.turnstile.acquire()
            call.tokens.extend([number], [0.5], "w")
            whole = call.tokens.frozen()
            return CallRecord(
                position, digest, int32([1]), whole.ids, whole.logprobs, whole.spans, {"n": number}, call.parent_chain
            )

        record = await self.participant.call(episode, Asked(position, digest), generate)
        return int(record.response["n"])

    def hold(self) -> None:
        self.turnstile = asyncio.Semaphore(0)


async def code(call: Awaitable[Any]) -> str:
    with pytest.raises(ProtocolError) as refused:
        await call
    return refused.value.code


async def test_a_call_repeated_at_its_position_is_answered_from_the_ledger() -> None:
    engine = Engine()
    assert [await engine.call("1.1"), await engine.call("1.1"), await engine.call("1.2")] == [1, 1, 2]
    assert await code(engine.call("1.1", digest="other")) == "checkpoint_conflict"
    assert engine.generated == 2


async def test_a_call_that_runs_is_joined_also_while_closed() -> None:
    engine = Engine()
    engine.hold()
    first = asyncio.create_task(engine.call())
    await settle()
    prepare(engine.participant)
    second = asyncio.create_task(engine.call())
    await settle()
    assert await code(engine.call(digest="other")) == "checkpoint_conflict"
    engine.turnstile.release()
    await asyncio.sleep(10)
    assert not first.done()
    resume(engine.participant)
    assert [await first, await second] == [1, 1]
    assert engine.generated == 1


async def test_a_call_without_a_position_waits_while_a_checkpoint_is_open_and_then_begins() -> None:
    """Its agent does not know what `admission_closed` means. It holds nothing up, and a retire meanwhile counts."""
    engine = Engine()
    prepare(engine.participant)
    held = [asyncio.create_task(engine.call("", episode=episode)) for episode in (R1, Episode("s", 0))]
    await asyncio.sleep(100)
    assert await code(engine.call("1.1", episode=R1)) == "admission_closed"
    assert engine.participant.survey().ready
    assert await commit(engine.participant) == {}
    assert engine.generated == 0
    engine.participant.gate.fence.mark("s", 0)
    resume(engine.participant)
    assert await held[0] == 1
    assert await code(held[1]) == "stale_attempt"
    fresh = Engine(started=False)
    assert await code(fresh.call("")) == "admission_closed"


async def test_calls_without_a_position_are_each_generated() -> None:
    engine = Engine()
    assert [await engine.call(""), await engine.call("")] == [1, 2]


async def test_new_calls_are_refused_while_closed_and_running_ones_do_not_block() -> None:
    engine = Engine()
    engine.hold()
    running = asyncio.create_task(engine.call())
    await settle()
    assert prepare(engine.participant)
    assert await code(engine.call("1.2")) == "admission_closed"
    engine.turnstile.release()
    await settle()
    assert await commit(engine.participant) == {}  # not delivered: it is issued again
    resume(engine.participant)
    await running
    ledger = await engine.participant.ledger("r")
    assert ledger is not None
    assert len(ledger.calls) == 1


async def test_a_ledger_reply_is_held_too() -> None:
    engine = Engine()
    await engine.call()
    prepare(engine.participant)
    repeated = asyncio.create_task(engine.call())
    await asyncio.sleep(10)
    assert not repeated.done()
    resume(engine.participant)
    assert await repeated == 1


async def test_a_failed_generation_is_not_kept_and_may_be_repeated() -> None:
    engine = Engine()

    async def fails(_: Call) -> CallRecord:
        raise ProtocolError("checkpoint_error", "the engine broke off")

    assert await code(engine.participant.call(R0, Asked("1.1", "d"), fails)) == "checkpoint_error"
    assert await engine.call("1.1") == 1


async def test_a_caller_that_leaves_does_not_lose_what_was_generated() -> None:
    engine = Engine()
    engine.hold()
    running = asyncio.create_task(engine.call())
    await settle()
    running.cancel()
    await settle()
    engine.turnstile.release()
    await settle()
    assert await engine.call() == 1
    assert engine.generated == 1


async def test_a_delivered_call_is_answered_after_a_restore_and_the_rest_is_generated() -> None:
    first = Engine()
    await first.call("1.1")
    await first.call("1.2")
    records = await checkpoint(first.participant)
    second = Engine(started=False)
    assert restore(second.participant, records, "r") == ["r-a1"]
    resume(second.participant, "restore")
    assert [await second.call("1.1", episode=R1), await second.call("1.2", episode=R1)] == [1, 2]
    assert second.generated == 0
    assert await second.call("1.3", episode=R1) == 1
    assert await code(second.call("1.1")) == "stale_attempt"
    third = Engine(started=False)
    assert restore(third.participant, await checkpoint(second.participant), "r-a1", cell_attempt=2) == ["r-a2"]
    resume(third.participant, "restore")
    assert await third.call("1.2", episode=R2) == 2
    assert third.generated == 0


async def test_what_the_scope_leaves_out_is_neither_written_nor_restored() -> None:
    engine = Engine()
    await engine.call()
    await engine.call(episode=Episode("o", 0))
    records = await checkpoint(engine.participant, "r")
    assert set(records) == {"r"}
    other = Engine(started=False)
    assert restore(other.participant, records) == []


async def test_retire_ends_calls_and_frees_ledgers_of_its_rollout_alone() -> None:
    engine = Engine()
    await engine.call("1.1")
    await engine.call("1.1", episode=Episode("o", 0))
    engine.hold()
    running = asyncio.create_task(engine.call("1.2"))
    await settle()
    engine.participant.gate.fence.mark("r", 0)
    await engine.participant.retire([R0])
    await engine.participant.retire([R0])
    assert await code(running) == "stale_attempt"
    assert await code(engine.call("1.1")) == "stale_attempt"
    assert await engine.participant.ledger("r") is None
    assert await engine.participant.ledger("o") is not None
    engine.participant.forget(["o"])
    assert engine.participant.survey().counts == {"calls": 0, "ledgers": 0}


@pytest.mark.parametrize("attempts", [(2, 0), (0, 2)])
async def test_a_retire_of_several_attempts_of_a_rollout_ends_the_highest_too(attempts: tuple[int, int]) -> None:
    engine = Engine()
    await engine.call("1.1", episode=R2)
    engine.hold()
    running = asyncio.create_task(engine.call("1.2", episode=R2))
    await settle()
    engine.participant.gate.fence.mark("r", 2)
    await engine.participant.retire([Episode("r", attempt) for attempt in attempts])
    assert engine.participant.survey().counts == {"calls": 0, "ledgers": 0}
    assert await code(running) == "stale_attempt"


async def test_a_call_that_was_held_while_its_attempt_was_replaced_is_not_delivered() -> None:
    engine = Engine()
    engine.hold()
    running = asyncio.create_task(engine.call())
    await settle()
    engine.participant.gate.fence.mark("r", 0)
    engine.turnstile.release()
    assert await code(running) == "stale_attempt"
    assert await engine.participant.ledger("r") is None


async def test_a_record_that_cannot_be_read_is_refused() -> None:
    engine = Engine(started=False)
    with pytest.raises(ProtocolError, match="record r"):
        restore(engine.participant, {"r": b"{}\n"}, "r")
    assert engine.participant.survey().counts["ledgers"] == 0
