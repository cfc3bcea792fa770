"""What `make demo` is told, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from gym_kit.demo.options import Options, from_environment
from gym_kit.errors import KitError


def test_without_variables_it_is_the_default_demonstration() -> None:
    assert from_environment({}) == Options()


def test_empty_variables_are_as_good_as_none() -> None:
    assert from_environment({"KILL": "", "ROLLOUTS": "", "TASKS": "", "KEEP": "0"}) == Options()


@pytest.mark.parametrize(
    "name, value",
    [
        ("KILL", "everything"),
        ("HOW", "gently"),
        ("CLUSTER", "gke"),
        ("ROLLOUTS", "0"),
        ("ROLLOUTS", "-3"),
        ("DURING", "x"),
        ("ENGINE", "x"),
    ],
)
def test_a_wrong_value_is_named(name: str, value: str) -> None:
    with pytest.raises(KitError, match=f"{name}={value}"):
        from_environment({name: value})


def test_a_missing_tasks_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KitError, match=r"nothing\.jsonl cannot be read: No such file"):
        from_environment({"TASKS": str(tmp_path / "nothing.jsonl")})


@pytest.mark.parametrize(
    "text, says",
    [("", "has no rows"), ('{"a": 1}\n', "line 1 has no object"), ("\nnot JSON\n", "line 2 is not JSON")],
)
def test_tasks_that_cannot_be_used_are_refused_before_anything_is_begun(tmp_path: Path, text: str, says: str) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(text)
    with pytest.raises(KitError, match=says):
        from_environment({"TASKS": str(tasks)})


def test_all_means_every_participant() -> None:
    assert set(Options(kill="all").servers) == {"env", "policy", "agent", "counter", "collection"}
    assert Options(kill="operator").servers == ["agent"]


def test_vllm_has_rows_of_its_own() -> None:
    assert from_environment({"POLICY": "vllm"}).policy == "vllm"
    for given in ({"ROLLOUTS": "10"}, {"TASKS": __file__}):
        with pytest.raises(KitError, match=r"leave TASKS and ROLLOUTS out|is not JSON"):
            from_environment({"POLICY": "vllm", **given})
    with pytest.raises(KitError, match="POLICY=gpt"):
        from_environment({"POLICY": "gpt"})


def test_where_the_engine_is_can_be_said_only_where_there_is_a_vllm() -> None:
    assert from_environment({"POLICY": "vllm", "ENGINE": "pod"}).engine == "pod"
    with pytest.raises(KitError, match="add POLICY=vllm"):
        from_environment({"ENGINE": "pod"})
