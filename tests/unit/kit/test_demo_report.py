"""What a demonstration has to show beyond its account: cuts that kept something, and that were made at the engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from gym_kit.demo.options import Options
from gym_kit.demo.report import EngineCut, _missed, _not_cut, engine_cuts, report
from gym_kit.demo.scenario import Played
from gym_rig.stack_storage import written
from gym_servers.capture.arrays import float32, int32
from gym_servers.capture.ledger import Ledger, Prefix, encode
from gym_servers.capture.staging import pack
from gym_servers.capture.tokens import Frozen, Span
from gym_servers.proof.account import Account
from gym_servers.storage.cells import directory_name, settle
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.leftovers import CUTS

SUCCEEDED = {"phase": "Succeeded"}
VLLM = Options(policy="vllm")
ACCOUNT = Account(
    expected=1,
    rows=1,
    reward_mean=1.0,
    continued=1,
    restarted=0,
    attempts={"1": 1},
    calls_expected=1,
    calls_effective=1,
    calls_duplicated=0,
    calls_lost=0,
    tokens_generated=9,
    tokens_needed=9,
    tokens_kept=5,
    problems=[],
)
NOTHING_KEPT = replace(ACCOUNT, tokens_kept=0)


def missed(counted: Account, options: Options) -> list[str]:
    return _missed(counted, options, Played(bare_restart_seconds=10.0), SUCCEEDED, [10.0])


def test_vllm_is_cut_in_the_middle_of_a_generation_and_something_of_it_is_kept() -> None:
    assert missed(ACCOUNT, VLLM) == []
    assert missed(NOTHING_KEPT, VLLM) == ["no token was kept of a call that was under way at a cut"]


@pytest.mark.parametrize("options", [Options(), replace(VLLM, during="checkpoint")])
def test_a_checkpoint_at_any_moment_may_find_nothing_to_keep(options: Options) -> None:
    assert missed(NOTHING_KEPT, options) == []


def test_an_engine_that_is_to_cut_has_cut_and_all_of_it_is_held() -> None:
    kept, empty, less = EngineCut("one", 7, 7), EngineCut("two", 0, 0), EngineCut("three", 7, 4)
    assert _not_cut([kept, empty]) == []
    assert _not_cut([]) == _not_cut([empty]) == ["no checkpoint was cut at the engine"]
    assert _not_cut([kept, less]) == ["the engine had 7 tokens at the cut of checkpoint three, which holds 4"]


class Bucket:
    """A folder in the place of the demonstration's bucket."""

    expected = 1

    def __init__(self, root: Path) -> None:
        self._root = root

    def store(self, prefix: str) -> DirectoryStore:
        return DirectoryStore(self._root / prefix)


def tokens(count: int) -> Frozen:
    return Frozen(int32([5] * count), float32([0.0] * count), (Span("", 0, count),))


def test_what_was_staged_for_a_checkpoint_is_held_against_what_it_has(tmp_path: Path) -> None:
    bucket = Bucket(tmp_path)
    store = bucket.store(f"cell/{directory_name(0, 1, 'taken')}")
    in_progress = Prefix("1.1", "digest", "", int32([1, 2]), tokens(4), 10)
    settle(store, written(store, name="taken", records={"r": encode("r", Ledger(prefixes=[in_progress]))}))
    bucket.store("cell").create(f"{CUTS}/taken/digest", pack({"a": tokens(4), "b": tokens(3)}, {}))
    bucket.store("cell").create(f"{CUTS}/given-up/digest", pack({"a": tokens(9)}, {}))
    assert engine_cuts(bucket, "cell") == [EngineCut("taken", 7, 4)]


@pytest.mark.parametrize(("engine", "told"), [("pod", True), ("beside", False)])
def test_only_a_pod_of_the_operator_s_has_to_cut(
    tmp_path: Path, engine: Literal["pod", "beside"], told: bool
) -> None:
    bucket = Bucket(tmp_path)
    cluster = SimpleNamespace(provider="local", kubernetes_version="1")
    stage = SimpleNamespace(
        grounds=SimpleNamespace(cluster=cluster), expected=1, entries=lambda: [], store=bucket.store
    )
    checkpoint = {"metadata": {"name": "demo-1"}, "status": SUCCEEDED}
    stack = {"metadata": {"namespace": "team", "name": "demo", "uid": "u"}, "status": {"cells": [{}]}}
    counted = report(cast(Any, stage), replace(VLLM, engine=engine), Played(checkpoint=checkpoint, stack=stack))
    assert ("no checkpoint was cut at the engine" in counted["problems"]) is told
