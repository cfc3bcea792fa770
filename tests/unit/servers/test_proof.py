"""The proof can fail: whatever is lost, doubled, repeated or wrong in a run is seen in its account."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gym_servers.proof.account import Account, account
from gym_servers.proof.history import Cut, sort_journal
from gym_servers.protocol.identity import Episode

ADDITIONS = (5, 7, 7, 2)  # two equal ones: a count by value alone would miss one that is lost for another


@dataclass
class Run:
    """A run as its rows, journals and checkpoints tell of it. Tests damage it."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    journal: list[dict[str, Any]] = field(default_factory=list)
    cuts: dict[int, Cut] = field(default_factory=dict)
    expected: int = 0

    def account(self) -> Account:
        return account(self.expected, self.rows, sort_journal(self.journal), self.cuts)

    def seed(self, episode: Episode) -> None:
        self.journal.append({"kind": "seed", "rollout": episode.rollout_id, "attempt": episode.attempt})

    def call(self, episode: Episode, number: int) -> None:
        """The model call and the tool effect of one step, counted from 1."""
        self.journal.append(
            {"kind": "tokens", "request": f"{episode.key}/1.{number}/x", "prompt": f"p{number}", "count": 10}
        )
        before = sum(ADDITIONS[: number - 1])
        self.journal.append(
            {
                "kind": "effect",
                "rollout": episode.rollout_id,
                "attempt": episode.attempt,
                "call_id": f"{episode.rollout_id}.{number}",
                "n": number,
                "before": before,
                "after": before + ADDITIONS[number - 1],
            }
        )

    def row(self, episode: Episode) -> None:
        words = " then ".join(f"add {number}" for number in ADDITIONS)
        self.expected += 1
        self.rows.append(
            {
                "_ng_rollout_id": episode.rollout_id,
                "_ng_attempt_index": episode.attempt,
                "reward": 1.0,
                "responses_create_params": {"input": [{"role": "user", "content": words}]},
                "response": {"usage": {"output_tokens": 40}},
            }
        )

    def effects(self, attempt: int) -> list[dict[str, Any]]:
        return [e for e in self.journal if e["kind"] == "effect" and e["attempt"] == attempt]


def cut(episode: Episode, calls: int) -> Cut:
    delivered = frozenset(_digest(number) for number in range(1, calls + 1))
    return Cut({episode.key: calls}, {episode.key: delivered}, frozenset({episode.key}))


def _digest(number: int) -> str:
    return f"p{number}"


def uninterrupted() -> Run:
    run, episode = Run(), Episode("r", 0)
    run.seed(episode)
    for number in range(1, 5):
        run.call(episode, number)
    run.row(episode)
    return run


def twice_continued() -> Run:
    """Steps 1-2 survive under attempt 0, step 3 was done twice but lost once, attempt 2 ends it."""
    run = Run()
    zero, one, two = (Episode("r", attempt) for attempt in range(3))
    run.seed(zero)
    for number in (1, 2, 3):
        run.call(zero, number)  # step 3 came after the cut: its process died with it
    run.cuts[1] = cut(zero, 2)
    run.call(one, 3)
    run.cuts[2] = cut(one, 3)
    run.call(one, 4)
    run.call(two, 4)
    run.row(two)
    return run


def started_over() -> Run:
    run, first, second = Run(), Episode("r", 0), Episode("r", 1)
    run.seed(first)
    run.call(first, 1)
    run.seed(second)
    for number in range(1, 5):
        run.call(second, number)
    run.row(second)
    return run


def test_an_uninterrupted_run_is_proved() -> None:
    counted = uninterrupted().account()
    assert counted.ok
    assert (counted.continued, counted.restarted, counted.calls_effective) == (0, 0, 4)
    assert (counted.tokens_generated, counted.tokens_needed) == (40, 40)


def test_a_chain_over_two_recoveries_is_proved_and_counted_as_continued() -> None:
    counted = twice_continued().account()
    assert counted.problems == []
    assert (counted.continued, counted.restarted) == (1, 0)
    assert (counted.calls_expected, counted.calls_effective) == (4, 4)
    assert counted.tokens_generated == 60
    assert counted.attempts == {"2": 1}


def test_a_run_that_started_over_is_proved_by_its_last_start_alone() -> None:
    counted = started_over().account()
    assert counted.ok
    assert (counted.continued, counted.restarted) == (0, 1)


RUNS: dict[str, Callable[[], Run]] = {
    "uninterrupted": uninterrupted,
    "twice continued": twice_continued,
    "started over": started_over,
}


def survivors(run: Run) -> list[dict[str, Any]]:
    """The journal's effects that belong to the surviving history."""
    last = run.rows[0]["_ng_attempt_index"]
    if not run.cuts:
        return run.effects(last)
    return [*run.effects(0)[:2], *run.effects(1)[:1], *run.effects(2)]


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("which", range(4))
def test_an_effect_that_was_lost_is_seen(name: str, which: int) -> None:
    run = RUNS[name]()
    run.journal.remove(survivors(run)[which])
    counted = run.account()
    assert not counted.ok
    assert counted.calls_lost >= 1 or counted.calls_duplicated >= 1
    assert "rollout r" in counted.problems[0]


@pytest.mark.parametrize("name", RUNS)
def test_an_effect_that_was_done_again_under_the_last_attempt_is_seen(name: str) -> None:
    for effect in survivors(RUNS[name]()):
        run = RUNS[name]()
        last = run.rows[0]["_ng_attempt_index"]
        run.journal.append({**effect, "attempt": last, "n": 99})
        assert not run.account().ok
        assert run.account().calls_duplicated >= 1


@pytest.mark.parametrize("name", RUNS)
def test_a_doubled_effect_is_seen_also_under_another_call_id(name: str) -> None:
    run = RUNS[name]()
    effect = survivors(run)[-1]
    run.journal.append({**effect, "call_id": "another", "n": 99})
    counted = run.account()
    assert (counted.calls_duplicated, counted.ok) == (1, False)


@pytest.mark.parametrize("name", RUNS)
def test_an_effect_of_another_size_is_seen(name: str) -> None:
    run = RUNS[name]()
    effect = survivors(run)[-1]
    effect["after"] += 1
    counted = run.account()
    assert (counted.calls_lost, counted.calls_duplicated, counted.ok) == (1, 1, False)


@pytest.mark.parametrize("name", RUNS)
def test_a_missing_row_is_seen(name: str) -> None:
    run = RUNS[name]()
    run.rows.clear()
    counted = run.account()
    assert counted.problems == ["0 of 1 rollouts have a row"]
    assert counted.reward_mean is None


@pytest.mark.parametrize("name", RUNS)
def test_a_doubled_row_is_seen(name: str) -> None:
    run = RUNS[name]()
    run.rows.append(copy.deepcopy(run.rows[0]))
    assert "rollout r has 2 rows" in run.account().problems


def test_a_doubled_row_does_not_hide_a_missing_one() -> None:
    run = uninterrupted()
    run.rows.append(copy.deepcopy(run.rows[0]))
    run.expected = 2
    assert "1 of 2 rollouts have a row" in run.account().problems


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("reward", [0.0, None, 0.5])
def test_a_wrong_reward_is_seen(name: str, reward: float | None) -> None:
    run = RUNS[name]()
    if reward is None:
        del run.rows[0]["reward"]
    else:
        run.rows[0]["reward"] = reward
    counted = run.account()
    assert f"rollout r has reward {reward}" in counted.problems


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_model_call_that_was_delivered_before_the_cut_and_generated_again_is_seen(number: int) -> None:
    run = twice_continued()
    run.journal.append({"kind": "tokens", "request": "r-a2/1.9/x", "prompt": f"p{number}", "count": 10})
    if number == 3:  # delivered under attempt 1, which the second cut holds
        assert run.account().problems == ["rollout r-a2 repeated work of before the cut"]
    else:
        run.journal.append({"kind": "tokens", "request": "r-a1/1.9/x", "prompt": f"p{number}", "count": 10})
        assert "rollout r-a2 repeated work of before the cut" in run.account().problems


def test_a_continuation_without_a_checkpoint_proves_nothing() -> None:
    run = twice_continued()
    del run.cuts[1]
    assert not run.account().ok
    assert run.account().continued == 0


def test_a_checkpoint_that_counts_more_effects_than_the_journal_is_seen() -> None:
    run = twice_continued()
    zero = Episode("r", 0)
    run.cuts[1] = Cut({zero.key: 4}, run.cuts[1].calls, run.cuts[1].episodes)
    assert not run.account().ok


def test_a_checkpoint_of_a_later_attempt_cannot_be_a_source() -> None:
    run = twice_continued()
    run.cuts[2] = Cut({"r-a2": 3}, {}, frozenset({"r-a2"}))
    assert not run.account().ok


def test_other_rollouts_do_not_cover_for_one() -> None:
    run = uninterrupted()
    other = uninterrupted()
    for entry in other.journal:
        if entry["kind"] == "tokens":
            entry["request"] = entry["request"].replace("r/", "s/")
        else:
            entry["rollout"] = "s"
    other.rows[0]["_ng_rollout_id"] = "s"
    run.journal += other.journal
    run.rows += other.rows
    run.expected = 2
    assert run.account().ok
    run.journal.remove(run.effects(0)[-1])
    counted = run.account()
    assert [problem.split()[1] for problem in counted.problems] == ["s"]
