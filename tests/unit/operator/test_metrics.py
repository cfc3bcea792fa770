"""The numbers Prometheus gets: each says what it is called after."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gym_operator.api import names
from gym_operator.api.event_reasons import Afterwards
from gym_operator.effects.cache import Key
from gym_operator.effects.events import Events, Subject
from gym_operator.effects.metrics import Metrics
from gym_operator.rules.generations import counts_of
from gym_rig.fake_kube import FakeKube

OPERATIONS = Path(__file__).parents[3] / "docs" / "operations.md"
HEALTHY: Mapping[str, Any] = {"ok": True, "stacks": 0, "stuck": [], "silentWatches": []}


def stack(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"namespace": "team", "name": name}, "status": status}


def lines(metrics: Metrics) -> set[str]:
    return {line for line in metrics.text().decode().splitlines() if not line.startswith("#")}


def test_statuses_are_shown_as_they_stand() -> None:
    conditions = [
        {"type": "Ready", "status": "True"},
        {"type": "StorageReady", "status": "False"},
        {"type": "Checkpointing", "status": "True"},
        {"type": "Stalled", "status": "Unknown"},
    ]
    last = {"name": "one", "time": "2027-01-15T08:00:00Z"}
    stacks = [
        stack("a", phase="Running", attempt=3, conditions=conditions, lastCheckpoint=last),
        stack("b", phase="Running"),
        stack("c"),
        stack("done", phase="Completed", lastCheckpoint=last),
        stack("off", phase="Suspended", lastCheckpoint=last),
        stack("halted", phase="Stopped", lastCheckpoint=last),
    ]
    metrics = Metrics()
    metrics.watch(lambda: iter(stacks), lambda: HEALTHY, lambda: iter(()))
    found = lines(metrics)
    assert {
        'gym_stacks{phase="Running"} 2.0',
        'gym_stacks{phase="Pending"} 1.0',
        'gym_stack_condition{condition="Ready",namespace="team",stack="a"} 1.0',
        'gym_stack_condition{condition="StorageReady",namespace="team",stack="a"} 0.0',
        'gym_stack_condition{condition="Stalled",namespace="team",stack="a"} 0.0',
        'gym_stack_attempt{namespace="team",stack="a"} 3.0',
        'gym_stack_last_checkpoint_timestamp_seconds{namespace="team",stack="a"} 1.8e+09',
        "gym_operator_stuck_stacks 0.0",
        "gym_operator_silent_watches 0.0",
    } <= found
    assert not any("Checkpointing" in line for line in found)
    aged = [line for line in found if line.startswith("gym_stack_last_checkpoint")]
    assert len(aged) == 1, "a stack that is at rest misses no checkpoint"
    stacks.clear()
    assert not any(line.startswith("gym_stack") for line in lines(metrics) if "recoveries" not in line)


def test_an_operator_that_is_not_well_says_so() -> None:
    metrics = Metrics()
    ill = {**HEALTHY, "stuck": ["team/a"], "silentWatches": ["pods", "gymstacks"]}
    metrics.watch(lambda: iter(()), lambda: ill, lambda: iter(()))
    assert {"gym_operator_stuck_stacks 1.0", "gym_operator_silent_watches 2.0"} <= lines(metrics)


async def test_recoveries_and_ends_of_checkpoints_are_counted_once_each() -> None:
    metrics = Metrics()
    events = Events(FakeKube(lambda: 0.0), lambda: 0.0, metrics.said)
    demo = Subject("GymStack", "team", "demo", "uid")
    for attempt in (1, 1, 2):
        events.say(demo, "Warning", "Recovering", f"agent is gone; attempt {attempt} continues from the input")
    events.say(demo, "Normal", "Recovered", "attempt 2 runs")
    events.say(Subject("GymCheckpoint", "team", "one", "1"), "Normal", "Published", "3 rollouts continue from it")
    events.say(Subject("GymCheckpoint", "team", "two", "2"), "Warning", "PrepareTimeout", "agent was not ready")
    assert {
        'gym_stack_recoveries_total{namespace="team"} 2.0',
        'gym_checkpoints_total{namespace="team",result="succeeded"} 1.0',
        'gym_checkpoints_total{namespace="team",result="failed"} 1.0',
    } <= lines(metrics)


def test_only_unexpected_answers_of_the_api_server_are_errors() -> None:
    metrics = Metrics()
    for status in (404, 409, 403, 500, 0, 0):
        metrics.refused("GET", status)
    found = {line for line in lines(metrics) if line.startswith("gym_operator_api_errors_total")}
    assert found == {
        'gym_operator_api_errors_total{status="403",verb="GET"} 1.0',
        'gym_operator_api_errors_total{status="500",verb="GET"} 1.0',
        'gym_operator_api_errors_total{status="0",verb="GET"} 2.0',
    }


def test_passes_are_measured() -> None:
    metrics = Metrics()
    metrics.passed(0.2)
    metrics.passed(20.0)
    assert {
        "gym_operator_pass_seconds_count 2.0",
        'gym_operator_pass_seconds_bucket{le="0.25"} 1.0',
    } <= lines(metrics)


def test_two_operators_in_one_process_do_not_share_numbers() -> None:
    one, other = Metrics(), Metrics()
    one.passed(1.0)
    assert "gym_operator_pass_seconds_count 0.0" in lines(other)


def test_what_becomes_of_a_checkpoint_after_its_end_is_no_second_end() -> None:
    metrics = Metrics()
    for reason in Afterwards:
        for level in ("Normal", "Warning"):
            metrics.said(names.CHECKPOINT_KIND, "team", level, reason)
    assert not [line for line in lines(metrics) if line.startswith("gym_checkpoints_total")]
    metrics.said(names.CHECKPOINT_KIND, "team", "Normal", "Published")
    assert 'gym_checkpoints_total{namespace="team",result="succeeded"} 1.0' in lines(metrics)


def test_what_policy_servers_count_is_shown_by_stack_as_calls_and_as_tokens() -> None:
    said = {"cut_kept": 3, "cut_tokens": 40, "cut_skipped": 2, "cut_skipped_seed": 2, "begun_anew": 1}
    stacks = {Key("team", "demo"): counts_of(said), Key("team", "young"): {}}
    metrics = Metrics()
    metrics.watch(lambda: iter(()), lambda: HEALTHY, lambda: iter(stacks.items()))
    found = lines(metrics)
    assert {
        'gym_generations_total{namespace="team",reason="",stack="demo",what="cut_kept"} 3.0',
        'gym_generations_total{namespace="team",reason="",stack="demo",what="cut_failed"} 0.0',
        'gym_generations_total{namespace="team",reason="seed",stack="demo",what="cut_skipped"} 2.0',
        'gym_generations_total{namespace="team",reason="penalties",stack="demo",what="cut_skipped"} 0.0',
        'gym_generations_total{namespace="team",reason="other",stack="demo",what="begun_anew"} 1.0',
        'gym_generation_tokens_total{namespace="team",stack="demo",what="cut_tokens"} 40.0',
    } <= found
    shown = [line for line in found if line.startswith("gym_generation")]
    assert len(shown) == len(counts_of({})), "each count once: no sum beside its parts"
    assert not any("young" in line for line in shown), "nothing was heard of its policy servers yet"
    stacks.clear()
    assert not any(line.startswith("gym_generation") for line in lines(metrics))


def test_every_number_is_explained() -> None:
    metrics = Metrics()
    metrics.watch(lambda: iter(()), lambda: HEALTHY, lambda: iter(()))
    types = [line.split()[2] for line in metrics.text().decode().splitlines() if line.startswith("# TYPE")]
    names = [name for name in types if not name.endswith("_created")]  # the client library's own
    page = OPERATIONS.read_text()
    assert len(names) >= 12
    assert [name for name in names if f"`{name}`" not in page and f"`{name}{{" not in page] == []
    assert f"A stack has {len(counts_of({}))} such numbers" in page
