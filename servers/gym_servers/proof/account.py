"""The account of a run: rollouts, tool effects and tokens, as numbers that a program can check."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from gym_servers.proof.history import Cut, History, Journals, surviving
from gym_servers.protocol.identity import Episode

_ADD = re.compile(r"add (-?\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Account:
    """What a run did. `problems` names every rollout and why; an empty list is the proof."""

    expected: int
    rows: int
    reward_mean: float | None
    continued: int
    restarted: int
    attempts: Mapping[str, int]
    calls_expected: int
    calls_effective: int
    calls_duplicated: int
    calls_lost: int
    tokens_generated: int
    tokens_needed: int
    tokens_kept: int
    problems: list[str]

    @property
    def ok(self) -> bool:
        return not self.problems

    def document(self) -> dict[str, Any]:
        """The counts as the reports of the demonstrations show them."""
        return {
            "rollouts": {
                "expected": self.expected,
                "rows": self.rows,
                "reward_mean": self.reward_mean,
                "continued": self.continued,
                "restarted": self.restarted,
                "attempts": dict(self.attempts),
            },
            "tool_calls": {
                "expected": self.calls_expected,
                "effective": self.calls_effective,
                "duplicated": self.calls_duplicated,
                "lost": self.calls_lost,
            },
            "model": {
                "tokens_generated": self.tokens_generated,
                "tokens_needed_without_kill": self.tokens_needed,
                "tokens_kept_of_calls_in_progress": self.tokens_kept,
            },
        }


def account(
    expected: int,
    rows: Sequence[Mapping[str, Any]],
    journals: Journals,
    restored: Mapping[int, Cut],
) -> Account:
    """Count a run from its rows and journals. `restored`: cell attempt -> the checkpoint it continued from."""
    problems: list[str] = []
    by_rollout = Counter(str(row["_ng_rollout_id"]) for row in rows)
    problems += [f"rollout {r} has {n} rows" for r, n in by_rollout.items() if n > 1]
    if len(by_rollout) != expected:
        problems.append(f"{len(by_rollout)} of {expected} rollouts have a row")
    totals = Counter[str]()
    for row in rows:
        episode = Episode(str(row["_ng_rollout_id"]), int(row["_ng_attempt_index"]))
        if row.get("reward") != 1.0:
            problems.append(f"rollout {episode.rollout_id} has reward {row.get('reward')}")
        history = surviving(episode, journals, restored)
        wanted = wanted_effects(row)
        lost, doubled = _compare(wanted, history)
        totals.update(
            expected=len(wanted),
            effective=len(history.effects),
            lost=lost,
            duplicated=doubled,
            continued=history.continued and not history.repeated,
            restarted=not history.continued and episode.attempt > 0 and _ran_before(episode, journals),
            tokens=int(row["response"]["usage"]["output_tokens"]),
            kept=history.kept_tokens,
        )
        if lost or doubled:
            problems.append(f"rollout {episode.key} lost {lost} and doubled {doubled} tool effects")
        if history.repeated:
            problems.append(f"rollout {episode.key} repeated work of before the cut")
    rewards = [float(row["reward"]) for row in rows if row.get("reward") is not None]
    return Account(
        expected=expected,
        rows=len(rows),
        reward_mean=fmean(rewards) if rewards else None,
        continued=totals["continued"],
        restarted=totals["restarted"],
        attempts=dict(sorted(Counter(str(row["_ng_attempt_index"]) for row in rows).items())),
        calls_expected=totals["expected"],
        calls_effective=totals["effective"],
        calls_duplicated=totals["duplicated"],
        calls_lost=totals["lost"],
        tokens_generated=journals.tokens,
        tokens_needed=totals["tokens"],
        tokens_kept=totals["kept"],
        problems=problems,
    )


def wanted_effects(row: Mapping[str, Any]) -> list[int]:
    """The additions a counter row asks for, from its own words."""
    given = row["responses_create_params"]["input"]
    text = given if isinstance(given, str) else json.dumps(given)
    return [int(match.group(1)) for match in _ADD.finditer(text)]


def _compare(wanted: Sequence[int], history: History) -> tuple[int, int]:
    """Effects that are missing, and effects that are there more often than asked for or by one call twice."""
    done = Counter(int(entry["after"]) - int(entry["before"]) for entry in history.effects)
    asked = Counter(wanted)
    calls = Counter(entry["call_id"] for entry in history.effects)
    doubled = max(sum((done - asked).values()), sum(n - 1 for n in calls.values()))
    return sum((asked - done).values()), doubled


def _ran_before(episode: Episode, journals: Journals) -> bool:
    return any(seed.rollout_id == episode.rollout_id and seed.attempt < episode.attempt for seed in journals.seeds)
