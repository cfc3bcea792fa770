"""What GitOps tools make of our objects: Argo CD by its scripts, Flux by the rules of kstatus."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lupa.lua51
import pytest
import yaml

from gym_operator import crds
from gym_operator.api.checkpoint import CheckpointStatus
from gym_operator.api.conditions import ConditionReason
from gym_operator.api.restore import RestoredCheckpoint, RestoreStatus
from gym_operator.api.schedule import ScheduleStatus
from gym_operator.api.stack import StackStatus
from gym_operator.rules import checkpoint_phases
from gym_operator.rules import restores as restore_rules
from gym_operator.rules import schedules as schedule_rules
from gym_operator.rules.observed import CellSeen, Observed, Storage
from gym_operator.rules.spec_check import Problem
from gym_operator.rules.stack_status import stack_status
from gym_servers.coordination.record import CellRecord, Recovery, Stage, Stopped
from gym_servers.storage.store import StorageProblem

ARGO = Path(__file__).parents[3] / "docs" / "gitops" / "argocd"
NOW = 1_800_000_000.0
GENERATION = 3

GOOD = Storage(True, ConditionReason.STORAGE_REACHABLE, "it works")
FULL = Storage(False, StorageProblem.FULL, "free space")
RUNNING = CellRecord(stage=Stage.RUNNING)
HALT = Stopped(uri="s3://b/c", digest="d", checkpoint_id="halt-1", name="halt")
STOPPED = CellRecord(stage=Stage.STOPPED, stopped=HALT)
DIED = Recovery(attempt=1, reason="agent is gone", checkpoint=None, started_at=NOW)


def observed(**seen: Any) -> dict[str, Any]:
    """The status that the operator writes for what it has seen."""
    cell = CellSeen(0, record=seen.pop("record", RUNNING))
    found = {"generation": GENERATION, "participants": (), "cells": (cell,), "storage": GOOD, **seen}
    return stack_status(StackStatus(), Observed(**found), NOW).document()


FRESH: dict[str, Any] = {"observedGeneration": -1}
"""What the API server writes when an object is made."""

STACKS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    # what happened: status, what else of the object, health by Argo CD, status by kstatus
    "nobody has looked": (FRESH, {}, "Progressing", "InProgress"),
    "it was changed": ({**observed(), "observedGeneration": GENERATION - 1}, {}, "Progressing", "InProgress"),
    "its servers start": (observed(record=CellRecord()), {}, "Progressing", "InProgress"),
    "it runs": (observed(), {}, "Healthy", "Current"),
    "it recovers": (
        observed(record=CellRecord(stage=Stage.REPLACING, attempt=1, recoveries=[DIED])),
        {},
        "Progressing",
        "InProgress",
    ),
    "it has given up": (
        observed(record=CellRecord(stage=Stage.STALLED, failures=6, recoveries=[DIED])),
        {},
        "Degraded",
        "Failed",
    ),
    "its spec is wrong": (
        observed(problem=Problem(ConditionReason.INVALID_SPEC, "no such server")),
        {},
        "Degraded",
        "Failed",
    ),
    "its storage is full": (observed(storage=FULL), {}, "Degraded", "Current"),
    "it is suspended": (observed(suspended=True), {"spec": {"suspend": True}}, "Suspended", "InProgress"),
    "a checkpoint has stopped it": (observed(record=STOPPED), {}, "Suspended", "InProgress"),
    "it is being deleted": (
        observed(),
        {"metadata": {"generation": GENERATION, "deletionTimestamp": "2027-01-15T08:00:00Z"}},
        "Progressing",
        "Terminating",
    ),
}


def checkpoint(phase: str) -> dict[str, Any]:
    at = checkpoint_phases.At(GENERATION, NOW)
    which = checkpoint_phases.Which(0)
    waiting = checkpoint_phases.waiting(CheckpointStatus(), which, ConditionReason.QUEUED, "waits", at)
    match phase:
        case "Pending":
            return waiting.document()
        case "Failed":
            return checkpoint_phases.failed(waiting, "PrepareTimeout", "not ready", at).document()
        case _:
            condition = {"type": "Succeeded", "status": "True", "reason": "Published", "message": "3 rollouts"}
            return {**waiting.document(), "phase": "Succeeded", "conditions": [condition]}


CHECKPOINTS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "nobody has looked": (FRESH, {}, "Progressing", "InProgress"),
    "it waits": (checkpoint("Pending"), {}, "Progressing", "Current"),
    "it failed": (checkpoint("Failed"), {}, "Degraded", "Failed"),
    "it succeeded": (checkpoint("Succeeded"), {}, "Healthy", "Current"),
}


def schedule(skipped: ConditionReason | None = None, *, suspended: bool = False) -> dict[str, Any]:
    status = ScheduleStatus()
    if skipped is not None:
        status = schedule_rules.skipped(status, schedule_rules.Skip(NOW, skipped, "why"))
    return schedule_rules.told(status, GENERATION, NOW, suspended, NOW).document()


def restore(phase: str) -> dict[str, Any]:
    waiting = restore_rules.waiting(RestoreStatus(), ConditionReason.QUEUED, "waits", GENERATION, NOW)
    chosen = RestoredCheckpoint(name="one", id="one-1")
    begun = restore_rules.restoring(waiting, chosen, (), GENERATION, NOW)
    return {
        "Pending": waiting,
        "Restoring": begun,
        "Succeeded": restore_rules.succeeded(begun, (), GENERATION, NOW),
        "Failed": restore_rules.failed(begun, ConditionReason.RECORDS_REFUSED, "why", GENERATION, NOW),
    }[phase].document()


RESTORES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "nobody has looked": (FRESH, {}, "Progressing", "InProgress"),
    "it waits": (restore("Pending"), {}, "Progressing", "Current"),
    "it is under way": (restore("Restoring"), {}, "Progressing", "Current"),
    "it failed": (restore("Failed"), {}, "Degraded", "Failed"),
    "it succeeded": (restore("Succeeded"), {}, "Healthy", "Current"),
}


UNUSABLE = schedule_rules.refused(ScheduleStatus(), "there is no such time zone", GENERATION, NOW).document()

SCHEDULES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "nobody has looked": (FRESH, {}, "Progressing", "InProgress"),
    "it keeps its times": (schedule(), {}, "Healthy", "Current"),
    "one would have overlapped": (schedule(ConditionReason.OVERLAP), {}, "Healthy", "Current"),
    "it is suspended": (schedule(suspended=True), {"spec": {"suspend": True}}, "Suspended", "Current"),
    "its spec is wrong": (UNUSABLE, {}, "Degraded", "Failed"),
    "a name is taken": (schedule(ConditionReason.NAME_CONFLICT), {}, "Degraded", "InProgress"),
}


def argo(kind: str, body: Mapping[str, Any]) -> tuple[str, str]:
    """Health and message by the script, in a Lua like Argo CD's."""
    lua = lupa.lua51.LuaRuntime(unpack_returned_tuples=True)
    lua.globals().obj = lua.table_from(body, recursive=True)
    found = lua.execute((ARGO / f"{kind.lower()}.lua").read_text())
    return str(found["status"]), str(found["message"])


def kstatus(body: Mapping[str, Any]) -> str:
    """What Flux takes the object for: the rules for kinds it does not know."""
    metadata, status = body["metadata"], body.get("status") or {}
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    if status.get("observedGeneration", metadata["generation"]) != metadata["generation"]:
        return "InProgress"
    found = {each["type"]: each["status"] for each in status.get("conditions") or ()}
    if found.get("Stalled") == "True":
        return "Failed"
    if found.get("Reconciling") == "True" or found.get("Ready", "True") != "True":
        return "InProgress"
    return "Current"


CASES = [
    pytest.param(kind, *case, id=f"{kind}, {name}")
    for kind, cases in (
        ("GymStack", STACKS),
        ("GymCheckpoint", CHECKPOINTS),
        ("GymCheckpointSchedule", SCHEDULES),
        ("GymRestore", RESTORES),
    )
    for name, case in cases.items()
]


@pytest.mark.parametrize(("kind", "status", "more", "health", "state"), CASES)
def test_k14_tools_judge_an_object_by_what_the_operator_wrote(
    kind: str, status: dict[str, Any], more: dict[str, Any], health: str, state: str
) -> None:
    body = {"kind": kind, "metadata": {"generation": GENERATION}, "spec": {}, "status": status, **more}
    found, message = argo(kind, body)
    assert found == health
    assert message and message != "nil"
    assert kstatus(body) == state


@pytest.mark.parametrize("kind", [kind.kind for kind in crds.KINDS])
def test_an_object_without_a_status_is_not_healthy(kind: str) -> None:
    assert argo(kind, {"kind": kind, "metadata": {"generation": 1}, "spec": {}})[0] == "Progressing"


def test_every_kind_has_its_script_where_the_kustomization_says() -> None:
    generator = yaml.safe_load((ARGO / "kustomization.yaml").read_text())["configMapGenerator"]
    files = dict(entry.split("=") for entry in generator[0]["files"])
    assert {path.name for path in ARGO.glob("*.lua")} == set(files.values())
    for kind in crds.KINDS:
        script = files[f"resource.customizations.health.gymops.dev_{kind.kind}"]
        assert script == f"{kind.kind.lower()}.lua"
