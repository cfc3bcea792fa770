"""A real engine, real processes, SIGKILL inside of generations: every rollout ends as if nothing had died.

Decoding is greedy, so a killed run can be compared with an uninterrupted one token for token. Where the two likeliest
tokens are closer than what another order of floating-point additions changes, either may be said; that is counted.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from gym_servers.capture.ledger import Ledger
from gym_vllm.collect import Collection, Turn, collecting, generated_again, ledgers_of, not_kept, trajectories
from gym_vllm.engine import NAME, Engine
from gym_vllm.journal import Generated
from gym_vllm.language import ROWS, rows_of_tests

ROUNDS = 2
RUNS = 1 + int(os.environ.get("N", "0")) // ROUNDS
SEED = int(os.environ.get("SEED") or time.time_ns())
PLACES = ("server", "engine")
CLOSE = 1e-4
NOISE = 1e-3  # of a log-probability, by the order of additions
MARGINS = 2 * ROWS  # questions for a margin, at most, which are no streams
LOST = ("regenerated", "begun_anew", "cut_skipped", "cut_failed", "cut_engine_failed")
"""What a policy server counts where tokens of a call are generated again, or would be."""
VICTIMS = (("policy",), ("agent",), ("env",), ("counter",), ("policy", "agent", "env", "counter", "collection"))

pytestmark = pytest.mark.timeout(2400)  # the first waits for the engine to start


@pytest.fixture(scope="module")
def expected(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Turn]]:
    """The trajectories of a run that nobody interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"

    async def run() -> None:
        async with collecting(folder, engine, rows_of_tests()) as whole:
            await whole.until("the end", lambda: whole.runner.progress().get("ended"))
            proved(whole)

    asyncio.run(run())
    return trajectories(folder)


def proved(run: Collection) -> None:
    counted = run.account()
    assert counted.problems == []
    assert (counted.rows, counted.reward_mean, counted.restarted) == (ROWS, 1.0, 0)
    assert (counted.calls_lost, counted.calls_duplicated) == (0, 0)


@dataclass(frozen=True)
class Compared:
    """`close`: rollouts that went another way at a close call. `apart`: how far the log-probabilities of equal tokens
    are apart, at most."""

    close: int
    apart: float


def compared(engine: Engine, expected: Mapping[str, list[Turn]], found: Mapping[str, list[Turn]]) -> Compared:
    """Any difference that neither a close call nor another order of additions makes fails."""
    close, apart = 0, 0.0
    assert set(found) == set(expected)
    for rollout, turns in expected.items():
        for one, other in zip(turns, found[rollout], strict=False):
            assert one.prompt == other.prompt, rollout
            if one.ids != other.ids:
                at = next(n for n, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)) if a != b)
                gap = margin(engine, [*one.prompt, *one.ids[:at]])
                assert gap < CLOSE, f"{rollout} says {other.ids[at]} for {one.ids[at]}, {gap} apart"
                close += 1
                break
            assert other.logprobs == pytest.approx(one.logprobs, abs=NOISE), rollout
            apart = max([apart, *(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))])
        else:
            assert len(turns) == len(found[rollout]), rollout
    return Compared(close, apart)


def margin(engine: Engine, prompt: list[int]) -> float:
    """How far the two likeliest next tokens are from each other."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 2}
    reply = httpx.post(f"{engine.url}/v1/completions", json=body, timeout=60.0, trust_env=False).json()
    first, second = sorted(reply["choices"][0]["logprobs"]["top_logprobs"][0].values(), reverse=True)[:2]
    return float(first - second)


@pytest.mark.parametrize("number", range(RUNS))
@pytest.mark.parametrize("where", PLACES)
async def test_kills_inside_of_generations_change_nothing_and_cost_nothing_that_was_kept(
    engine: Engine, expected: Mapping[str, list[Turn]], folder: Path, where: str, number: int
) -> None:
    """`where` cuts are made: at the policy server, or beside the engine."""
    print(f"SEED={SEED} repeats these moments and victims")
    source = random.Random(f"{SEED} {where} {number}")
    killed, total = 0, sum(len(turn.ids) for turns in expected.values() for turn in turns)
    before: dict[str, Ledger] = {}
    on_its_way = 0

    def said(stream: Generated) -> list[int]:
        """What a cut is to have of it: what had arrived at the policy server, or all that there is."""
        return stream.ids if where == "engine" or stream.ended else stream.but_last_message

    async with AsyncExitStack() as stack:
        engine.pause()  # nothing is generated before it is looked at
        stack.callback(engine.go_on)
        stack.enter_context(engine.one_behind())
        cell = collecting(folder, engine, rows_of_tests(), cut_at_engine=where == "engine")
        run = await stack.enter_async_context(cell)
        for round_ in range(1, ROUNDS + 1):
            async with _in_the_middle(run, source.uniform(0.05, 0.2) * total):
                await run.arrived()
                taken = await run.runner.checkpoint(f"cut-{round_}")
                assert taken.publication.state == "published"
                streams = [one for one in run.own() if one.key in taken.publication.episodes]
                ledgers = ledgers_of(taken.uri)
                assert not_kept(ledgers, before, streams, said) == []
                on_its_way += sum(len(one.ids) - len(one.but_last_message) for one in streams if not one.ended)
                before = ledgers
            async with _in_the_middle(run, source.uniform(0.01, 0.05) * total):
                await run.kill(_victims(where, number, round_))
                killed += 1
            await run.in_service(round_)
        await run.until("the end", lambda: run.runner.progress().get("ended"))
        proved(run)
        cuts = run.cuts()
        assert len(cuts) == killed == ROUNDS
        prefixes = [prefix for ledgers in cuts.values() for ledger in ledgers.values() for prefix in ledger.prefixes]
        assert not [prefix for prefix in prefixes if prefix.skipped]
        kept = sum(len(prefix.tokens.ids) for prefix in prefixes)
        assert kept > 0
        assert generated_again(cuts, run.own()) == []
        counted = await run.generations()
        assert not [name for name in counted if name.startswith(LOST)]
    found = trajectories(folder)
    every_token_has_its_log_probability(found)
    every_prompt_begins_with_the_turn_before(found)
    seen = compared(engine, expected, found)
    print(
        f"{where}: {len(prefixes)} calls cut, {kept} tokens kept, {on_its_way} on their way then, "
        f"{seen.close} close calls, log-probabilities {seen.apart:.1g} apart"
    )


def _victims(where: str, number: int, round_: int) -> tuple[str, ...]:
    """In the order that the seed gives them, round for round, each as often as any other."""
    order = random.Random(SEED).sample(VICTIMS, len(VICTIMS))
    return order[((PLACES.index(where) * RUNS + number) * ROUNDS + round_) % len(order)]


def _in_the_middle(run: Collection, tokens: float) -> AbstractAsyncContextManager[None]:
    """Once so many tokens more were generated, and while some generation stands in its middle."""
    return run.engine.held_once(round(tokens), over=lambda: run.runner.progress().get("ended"))


def test_the_journal_has_all_tokens_that_the_engine_has_counted(
    engine: Engine, expected: Mapping[str, list[Turn]]
) -> None:
    """So what is proved from it is proved of the engine. Streams that were broken off may lack their last tokens."""
    streams = engine.generated()
    told = sum(len(one.ids) for one in streams)
    counted = engine.own_count()
    broken = sum(one.finish is None for one in streams)
    assert told <= counted
    assert counted - told <= 8 * broken + MARGINS
    assert sum(len(turn.ids) for turns in expected.values() for turn in turns) <= told


def every_prompt_begins_with_the_turn_before(found: Mapping[str, list[Turn]]) -> None:
    turns = 0
    for rollout in found.values():
        for before, after in pairwise(rollout):
            whole = [*before.prompt, *before.ids]
            assert after.prompt[: len(whole)] == whole
            turns += 1
    assert turns >= ROWS


def test_c13_every_prompt_begins_with_the_tokens_of_the_turn_before(expected: Mapping[str, list[Turn]]) -> None:
    every_prompt_begins_with_the_turn_before(expected)


def every_token_has_its_log_probability(found: Mapping[str, list[Turn]]) -> None:
    for turns in found.values():
        for turn in turns:
            assert len(turn.ids) == len(turn.logprobs)
            assert all(logprob <= 0 for logprob in turn.logprobs)


def test_c11_every_token_has_its_log_probability(expected: Mapping[str, list[Turn]]) -> None:
    every_token_has_its_log_probability(expected)


async def test_a_generation_goes_on_behind_any_prefix_as_if_it_had_not_been_cut(
    engine: Engine, expected: Mapping[str, list[Turn]]
) -> None:
    """By the engine alone: the tokens that follow, and how likely they were, do not depend on where it was cut."""
    turn = max((turn for turns in expected.values() for turn in turns), key=lambda turn: len(turn.ids))
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        for cut in range(0, len(turn.ids), 5):
            body = {
                "model": NAME,
                "prompt": [*turn.prompt, *turn.ids[:cut]],
                "max_tokens": len(turn.ids) - cut,
                "temperature": 0,
                "logprobs": 0,
                "return_token_ids": True,
            }
            choice = (await client.post(f"{engine.url}/v1/completions", json=body)).json()["choices"][0]
            assert choice["token_ids"] == turn.ids[cut:], cut
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(turn.logprobs[cut:], abs=NOISE)
