"""Generation cuts at the model participant: what is frozen, what goes on behind it, and what is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from gym_rig.verbs import checkpoint, commit, prepare, ready, restore, resume, start
from gym_rig.virtual import now, settle
from gym_servers.capture.arrays import float32, int32
from gym_servers.capture.inventory import InventoryCall
from gym_servers.capture.ledger import CallRecord, Ledger, Prefix, decode, encode
from gym_servers.capture.tokens import Frozen, Span
from gym_servers.participants.cutting import CutAtEngine
from gym_servers.participants.gate import Gate
from gym_servers.participants.model import ABANDONED_SECONDS, ModelParticipant
from gym_servers.participants.model_call import Asked, Call
from gym_servers.protocol.errors import ProtocolError
from gym_servers.protocol.identity import Episode

R0, R1, R2, O0 = Episode("r", 0), Episode("r", 1), Episode("r", 2), Episode("o", 0)
LENGTH = 10  # tokens of a reply


class Policy:
    """Says the numbers from 0 on, one when a test lets it; knows how often each call was begun."""

    def __init__(self, *, started: bool = True, cut_at_engine: CutAtEngine | None = None) -> None:
        self.participant = ModelParticipant(Gate(clock=now), cut_at_engine=cut_at_engine)
        if started:
            start(self.participant)
        self.begun: list[tuple[str, int]] = []  # capture key, and tokens that were there
        self.running: dict[str, Call] = {}
        self.stopped: list[str] = []
        self.version = "w1"
        self.leaving_seconds = 0.0  # how long a call that is stopped takes to end

    def ask(
        self, episode: Episode = R0, position: str = "1.1", digest: str = "d", **asked: Any
    ) -> asyncio.Task[CallRecord]:
        async def generate(call: Call) -> CallRecord:
            call.prompt = call.prompt if call.prompt is not None else int32([100])
            self.begun.append((call.key, len(call.tokens)))
            self.running[call.key] = call
            call.begin_stream(len(call.tokens))
            try:
                while call.tokens.finish is None:  # noqa: ASYNC110 - as an engine's stream would come
                    await asyncio.sleep(0.1)
            except asyncio.CancelledError:
                self.stopped.append(call.key)
                await asyncio.sleep(self.leaving_seconds)
                raise
            whole = call.tokens.frozen()
            response = {"said": whole.ids.tolist()}
            return CallRecord(
                position, digest, call.prompt, whole.ids, whole.logprobs, whole.spans, response, call.parent_chain
            )

        return asyncio.ensure_future(
            self.participant.call(episode, Asked(position, digest, budget=LENGTH, **asked), generate)
        )

    def say(self, count: int, episode: Episode = R0) -> None:
        """So many tokens more, the last of them ends the reply."""
        tokens = self.running[episode.key].tokens
        for _ in range(count):
            number = len(tokens)
            tokens.extend([number], [-number / 4], self.version)
            tokens.finish = "stop" if len(tokens) == LENGTH else None

    async def said(self, task: asyncio.Task[CallRecord]) -> list[int]:
        response = (await task).response
        found: list[int] = response["said"]
        return found

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.participant.survey().counts)


async def code(call: Awaitable[Any]) -> str:
    with pytest.raises(ProtocolError) as refused:
        await call
    return refused.value.code


def restored(records: dict[str, bytes], *keys: str, cell_attempt: int = 1) -> Policy:
    policy = Policy(started=False)
    restore(policy.participant, records, *keys, cell_attempt=cell_attempt)
    resume(policy.participant, "restore")
    return policy


async def cut_at(count: int, **asked: Any) -> tuple[Policy, dict[str, bytes]]:
    """A checkpoint after so many tokens."""
    policy = Policy()
    policy.ask(**asked)
    await settle()
    policy.say(count)
    return policy, await checkpoint(policy.participant)


async def test_a_live_generation_goes_on_after_a_checkpoint_without_being_begun_again() -> None:
    policy = Policy()
    asked = policy.ask()
    await settle()
    policy.say(4)
    await checkpoint(policy.participant)
    policy.say(6)
    assert await policy.said(asked) == list(range(LENGTH))
    assert policy.begun == [("r", 0)]


@pytest.mark.parametrize("count", range(1, LENGTH + 1))
async def test_a_restored_call_goes_on_behind_its_prefix(count: int) -> None:
    _, records = await cut_at(count)
    second = restored(records, "r")
    asked = second.ask(R1)
    await settle()
    if count < LENGTH:
        second.say(LENGTH - count, R1)
    assert await second.said(asked) == list(range(LENGTH))
    assert second.begun == [("r-a1", count)]
    assert second.participant.generations() == {"continued": 1, "continued_tokens": count}


async def test_what_is_generated_after_the_cut_is_not_in_the_checkpoint() -> None:
    """Readiness was reported: nothing that is exported changes from then on, though the engine does not stand."""
    policy = Policy()
    policy.ask()
    await settle()
    policy.say(3)
    assert prepare(policy.participant)
    policy.say(4)
    records = await commit(policy.participant)
    (prefix,) = decode("r", records["r"])[1].prefixes
    assert prefix.tokens.ids == int32([0, 1, 2])
    assert prefix.remaining == LENGTH - 3


async def test_c8_a_call_at_any_moment_is_in_the_cut_or_refused() -> None:
    """Closing and freezing are one step: there is no moment in between."""
    for moment in range(8):
        policy = Policy()
        accepted, refused = 0, 0
        closing = False

        async def client(number: int, policy: Policy = policy) -> None:
            nonlocal accepted, refused
            for _ in range(number):
                await asyncio.sleep(0)
            task = policy.ask(Episode(f"c{number}", 0))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if task.done() and isinstance(task.exception(), ProtocolError):
                refused += 1
            else:
                accepted += 1

        clients = [asyncio.ensure_future(client(number)) for number in range(8)]
        for _ in range(moment):
            await asyncio.sleep(0)
        closing = prepare(policy.participant)
        await asyncio.gather(*clients)
        assert closing
        covered = sum(policy.counts[f"cut_{what}"] for what in ("kept", "skipped", "failed", "empty"))
        assert (covered, refused) == (accepted, 8 - accepted), moment


async def test_a_cut_that_the_engine_answers_after_the_resume_is_of_no_checkpoint() -> None:
    """Not of the one that is over, and still less of the next: that one's calls have gone on."""

    async def cut(checkpoint_id: str, calls: Sequence[InventoryCall]) -> dict[str, Frozen | None]:
        asked.append(checkpoint_id)
        had = policy.running["r"].tokens.frozen()
        await asyncio.sleep(3)
        return {calls[0].ticket: had}

    policy, asked = Policy(cut_at_engine=cut), list[str]()
    policy.ask()
    await settle()
    policy.say(3)
    assert not prepare(policy.participant, "given up")
    await asyncio.sleep(1)
    resume(policy.participant, "given up")
    await asyncio.sleep(5)
    policy.say(2)
    assert not prepare(policy.participant, "second")
    await asyncio.sleep(4)
    assert ready(policy.participant)
    records = await commit(policy.participant)
    (prefix,) = decode("r", records["r"])[1].prefixes
    assert prefix.tokens.ids == int32(range(5))
    assert asked == ["given up", "second"]
    assert policy.participant.generations() == {"cut_kept": 1, "cut_tokens": 5}


async def test_c9_a_cut_that_did_not_happen_is_counted_and_holds_nothing_up() -> None:
    policy = Policy()
    for episode in (R0, O0):
        policy.ask(episode)
    await settle()
    policy.say(2, R0)
    policy.say(2, O0)
    policy.running["o"].tokens.ids.append(7)  # an id without its log-probability
    assert prepare(policy.participant)
    records = await commit(policy.participant)
    assert {name: n for name, n in policy.counts.items() if n} == {
        "calls": 2,
        "cut_kept": 1,
        "cut_failed": 1,
        "cut_tokens": 2,
    }
    resume(policy.participant)
    assert policy.counts == {"calls": 2, "ledgers": 0}
    second = restored(records, "r", "o")
    for episode in (R1, Episode("o", 1)):
        second.ask(episode)
    await settle()
    assert sorted(second.begun) == [("o-a1", 0), ("r-a1", 2)]
    assert second.participant.generations()["regenerated_failed"] == 1


async def test_c10_the_budget_counts_what_was_generated_before_and_the_request_is_not_touched() -> None:
    _, records = await cut_at(4)
    (prefix,) = decode("r", records["r"])[1].prefixes
    assert prefix.remaining == LENGTH - 4
    second = restored(records, "r")
    asked = Asked("1.1", "d", budget=LENGTH)
    seen: list[int] = []

    async def generate(call: Call) -> CallRecord:
        seen.extend((call.budget, len(call.tokens), call.asked.budget))
        raise ProtocolError("checkpoint_error", "enough")

    assert await code(second.participant.call(R1, asked, generate)) == "checkpoint_error"
    assert seen == [LENGTH, 4, LENGTH]
    assert asked == Asked("1.1", "d", budget=LENGTH)


async def test_c11_c14_log_probabilities_and_weight_versions_survive_with_their_tokens() -> None:
    first = Policy()
    first.ask()
    await settle()
    first.say(2)
    first.version = "w2"
    first.say(3)
    records = await checkpoint(first.participant)
    second = restored(records, "r")
    second.version = "w3"
    asked = second.ask(R1)
    await settle()
    second.say(5, R1)
    record = await asked
    assert record.ids == int32(range(LENGTH))
    assert record.logprobs == float32([-number / 4 for number in range(LENGTH)])
    assert record.spans == (Span("w1", 0, 2), Span("w2", 2, 5), Span("w3", 5, 10))
    third = restored(await checkpoint(second.participant), "r-a1", cell_attempt=2)
    ledger = await third.participant.ledger("r-a2")
    assert ledger is not None
    assert ledger.calls[0] == record


async def test_c13_a_restored_call_keeps_the_prompt_it_was_begun_with() -> None:
    _, records = await cut_at(4)
    second = restored(records, "r")
    seen: list[Any] = []

    async def generate(call: Call) -> CallRecord:
        seen.append(call.prompt)
        raise ProtocolError("checkpoint_error", "enough")

    await code(second.participant.call(R1, Asked("1.1", "d"), generate))
    assert seen == [int32([100])]


@pytest.mark.parametrize("why", ["constrained", "penalties", "seed", "stop_texts"])
async def test_what_cannot_be_continued_faithfully_is_generated_anew_and_counted(why: str) -> None:
    policy, records = await cut_at(4, unfaithful=why)
    assert policy.participant.generations() == {"cut_skipped": 1, f"cut_skipped_{why}": 1}
    (prefix,) = decode("r", records["r"])[1].prefixes
    assert (len(prefix.tokens.ids), len(prefix.prompt_ids)) == (0, 0)
    second = restored(records, "r")
    second.ask(R1, unfaithful=why)
    await settle()
    assert second.begun == [("r-a1", 0)]
    assert second.participant.generations() == {"regenerated": 1, f"regenerated_{why}": 1}


async def test_what_a_record_of_another_version_does_not_keep_is_counted_as_other() -> None:
    """The words by which is counted are few, whatever a record says."""
    nothing = Prefix("1.1", "d", "", int32(), Frozen(int32(), float32()), LENGTH, "a reason to come")
    second = restored({"r": encode("r", Ledger(prefixes=[nothing]))}, "r")
    second.ask(R1)
    await settle()
    assert second.begun == [("r-a1", 0)]
    assert second.participant.generations() == {"regenerated": 1, "regenerated_other": 1}


async def test_c17_a_prefix_is_of_its_own_request_alone() -> None:
    _, records = await cut_at(4)
    second = restored(records, "r")
    second.ask(R1, digest="another")
    await settle()
    assert second.begun == [("r-a1", 0)]
    assert second.participant.generations() == {"regenerated": 1, "regenerated_another_request": 1}


async def test_c17_a_failure_is_no_reply_and_a_reply_is_bound_to_its_request() -> None:
    policy = Policy()

    async def fails(_: Call) -> CallRecord:
        raise ProtocolError("checkpoint_error", "the engine broke")

    for _ in range(2):
        assert await code(policy.participant.call(R0, Asked("1.1", "d"), fails)) == "checkpoint_error"
    assert [failure.reason for failure in policy.participant.failures("r")] == [
        "checkpoint_error: the engine broke",
        "checkpoint_error: the engine broke",
    ]
    assert await checkpoint(policy.participant) == {}
    asked = policy.ask()
    await settle()
    policy.say(LENGTH)
    await asked
    assert await code(policy.ask(digest="another")) == "checkpoint_conflict"
    second = restored(await checkpoint(policy.participant), "r")
    assert await code(second.ask(R1, digest="another")) == "checkpoint_conflict"
    assert await second.said(second.ask(R1)) == list(range(LENGTH))


async def test_c20_a_call_that_is_repeated_by_whoever_stands_between_runs_once() -> None:
    policy = Policy()
    asked = [policy.ask() for _ in range(3)]
    await settle()
    policy.say(LENGTH)
    replies = [await policy.said(one) for one in asked]
    asked.append(policy.ask())
    replies.append(await policy.said(asked[-1]))
    assert replies == [list(range(LENGTH))] * 4
    assert policy.begun == [("r", 0)]


async def test_calls_without_a_position_are_matched_by_parent_and_request_each_once() -> None:
    first = Policy()
    for _ in range(2):
        asked = first.ask(position="")
        await settle()
        first.say(LENGTH)
        await asked
    third = first.ask(position="")
    await settle()
    first.say(4)
    second = restored(await checkpoint(first.participant), "r")
    third.cancel()
    for _ in range(2):  # both were delivered, and may not have arrived
        assert await second.said(second.ask(R1, position="")) == list(range(LENGTH))
    assert second.begun == []
    asked = second.ask(R1, position="")
    await settle()
    assert second.begun == [("r-a1", 4)]
    second.say(6, R1)
    await asked
    second.ask(R1, position="")
    await settle()
    assert second.begun == [("r-a1", 4), ("r-a1", 0)]  # a deliberate repeat
    assert second.participant.generations() == {"answered": 2, "continued": 1, "continued_tokens": 4}


async def test_a_prefix_that_nobody_has_claimed_yet_is_part_of_the_next_checkpoint() -> None:
    _, records = await cut_at(4)
    second = restored(records, "r")
    assert second.counts["prefixes"] == 1
    third = restored(await checkpoint(second.participant), "r-a1", cell_attempt=2)
    third.ask(R2)
    await settle()
    assert third.begun == [("r-a2", 4)]
    assert "prefixes" not in third.counts


async def test_a_prefix_grows_from_checkpoint_to_checkpoint() -> None:
    _, records = await cut_at(3)
    second = restored(records, "r")
    second.ask(R1)
    await settle()
    second.say(3, R1)
    third = restored(await checkpoint(second.participant), "r-a1", cell_attempt=2)
    asked = third.ask(R2)
    await settle()
    assert third.begun == [("r-a2", 6)]
    third.say(4, R2)
    assert await third.said(asked) == list(range(LENGTH))


@pytest.mark.parametrize("end", ["retire", "forget", "uninstall", "delete"])
async def test_prefixes_are_freed_with_their_episode(end: str) -> None:
    _, records = await cut_at(4)
    second = restored(records, "r")
    participant = second.participant
    ends: dict[str, Callable[[], Any]] = {
        "retire": lambda: participant.retire([R1]),
        "forget": lambda: participant.forget(["r"]),
        "uninstall": participant.uninstall,
        "delete": lambda: participant.delete("r-a1"),
    }
    done = ends[end]()
    if done is not None and not isinstance(done, bool):
        await done
    assert second.counts == {"calls": 0, "ledgers": 0}
    # A restore that is given up loses nothing: its checkpoint has them still.
    lost = {} if end == "uninstall" else {"dropped": 1, "dropped_unclaimed": 1}
    assert participant.generations() == lost
    second.ask(R1)
    await settle()
    assert second.begun == [("r-a1", 0)]


async def test_what_was_not_kept_is_not_dropped_once_more() -> None:
    _, records = await cut_at(4, unfaithful="seed")
    participant = restored(records, "r").participant
    await participant.retire([R1])
    assert participant.generations() == {}


async def test_a_retired_call_is_stopped_in_the_engine_too() -> None:
    policy = Policy()
    asked = policy.ask()
    await settle()
    policy.say(2)
    policy.participant.gate.fence.mark("r", 0)
    await policy.participant.retire([R0])
    assert policy.stopped == ["r"]
    assert await code(asked) == "stale_attempt"
    assert policy.counts == {"calls": 0, "ledgers": 0}


async def test_a_call_whose_callers_have_gone_is_stopped_and_goes_on_when_it_is_asked_for_again() -> None:
    policy = Policy()
    gone = policy.ask()
    await settle()
    policy.say(4)
    gone.cancel()
    await asyncio.sleep(ABANDONED_SECONDS - 1)
    back = policy.ask()  # in time: it joins
    await settle()
    back.cancel()
    assert policy.stopped == []
    await asyncio.sleep(ABANDONED_SECONDS + 1)
    assert policy.stopped == ["r"]
    asked = policy.ask()
    await settle()
    assert policy.begun == [("r", 0), ("r", 4)]
    policy.say(6)
    assert await policy.said(asked) == list(range(LENGTH))


async def given_up(position: str) -> Policy:
    """A call that nobody waited for has said 4 numbers, was told to end, and has not ended yet."""
    policy = Policy()
    policy.leaving_seconds = 10.0
    gone = policy.ask(position=position)
    await settle()
    policy.say(4)
    gone.cancel()
    await asyncio.sleep(ABANDONED_SECONDS + 1)
    assert (policy.stopped, policy.counts["calls"]) == (["r"], 1)
    return policy


@pytest.mark.parametrize("position", ["1.1", ""])
async def test_a_call_that_is_being_given_up_is_in_a_checkpoint_once(position: str) -> None:
    """A second copy would be left over when the first is claimed, or a deliberate repeat would go on behind it."""
    first = await given_up(position)
    records = await checkpoint(first.participant)
    (prefix,) = decode("r", records["r"])[1].prefixes
    assert prefix.tokens.ids == int32(range(4))
    assert first.participant.generations() == {"abandoned": 1}
    second = restored(records, "r")
    asked = second.ask(R1, position)
    await settle()
    second.say(6, R1)
    assert await second.said(asked) == list(range(LENGTH))
    await second.participant.retire([R1])
    assert second.participant.generations() == {"continued": 1, "continued_tokens": 4}


async def test_a_call_that_is_being_given_up_is_no_repeat_of_the_one_that_goes_on_for_it() -> None:
    """Or its reply would have another id than where it is restored."""
    policy = await given_up("")
    policy.ask(position="")
    await settle()
    assert policy.begun == [("r", 0), ("r", 4)]
    assert policy.running["r"].repeat == 0


@pytest.mark.parametrize("why", ["constrained", "penalties", "seed", "stop_texts", "failed"])
async def test_what_is_dropped_when_its_callers_have_gone_is_counted_by_reason(why: str) -> None:
    policy = Policy()
    gone = policy.ask(unfaithful="" if why == "failed" else why)
    await settle()
    policy.say(4)
    if why == "failed":
        policy.running["r"].tokens.ids.append(7)  # an id without its log-probability
    gone.cancel()
    await asyncio.sleep(ABANDONED_SECONDS + 1)
    assert policy.participant.generations() == {"abandoned": 1, "dropped": 1, f"dropped_{why}": 1}
    policy.ask()
    await settle()
    assert policy.begun == [("r", 0), ("r", 0)]


async def test_a_call_is_not_given_up_while_a_checkpoint_holds_its_reply() -> None:
    policy = Policy()
    asked = policy.ask()
    await settle()
    policy.say(LENGTH)
    assert prepare(policy.participant)
    asked.cancel()
    await asyncio.sleep(3 * ABANDONED_SECONDS)
    records = await commit(policy.participant)
    assert decode("r", records["r"])[1].prefixes[0].tokens.finish == "stop"
    resume(policy.participant)
    await asyncio.sleep(1)
    assert await policy.said(policy.ask()) == list(range(LENGTH))
    assert policy.begun == [("r", 0)]
