"""What is to be done about a GymCheckpoint beside taking it, and for how long a storage may hold it up."""

from __future__ import annotations

from typing import Any

import pytest

from gym_operator.api.checkpoint import CheckpointCell, CheckpointStatus
from gym_operator.api.conditions import ConditionReason, ConditionType, get_condition
from gym_operator.api.names import DATA_FINALIZER
from gym_operator.rules import checkpoint_phases as phases
from gym_operator.rules import disposal as rules
from gym_operator.rules.checkpoint_entries import entry_of
from gym_operator.rules.disposal import Duty
from gym_servers.storage.removal import Claim
from gym_servers.storage.store import StorageProblem


def entry(policy: str = "Retain", phase: str = "Succeeded", tied: bool = False, **more: Any) -> Any:
    metadata = {
        "namespace": "team",
        "name": "one",
        "uid": "u",
        "generation": more.get("generation", 1),
        "finalizers": [DATA_FINALIZER, "other/one"] if tied else ["other/one"],
        "deletionTimestamp": "2027-01-15T08:00:00Z" if more.get("deleting") else None,
    }
    spec = {"stackRef": {"name": "demo"}, "deletionPolicy": policy}
    return entry_of({"metadata": metadata, "spec": spec, "status": {"phase": phase, "observedGeneration": 1}})


@pytest.mark.parametrize("phase", ["Pending", "Preparing", "Committing", "Publishing", "Succeeded", "Failed"])
def test_k15_a_finalizer_is_there_only_where_data_is_to_go(phase: str) -> None:
    assert rules.duty_of(entry("Retain", phase)) is None
    assert rules.duty_of(entry("Delete", phase)) == Duty.TIE
    assert rules.duty_of(entry("Delete", phase, tied=True)) is None
    assert rules.duty_of(entry("Retain", phase, tied=True)) == Duty.LOOSE
    assert rules.duty_of(entry("Delete", phase, deleting=True)) is None, "none can be added any more"


@pytest.mark.parametrize("policy", ["Retain", "Delete"])
def test_what_is_deleted_is_disposed_of_once_it_is_over(policy: str) -> None:
    for phase in ("Succeeded", "Failed", "Deleting"):
        assert rules.duty_of(entry(policy, phase, tied=True, deleting=True)) == Duty.DISPOSE
        assert rules.duty_of(entry(policy, phase, deleting=True)) is None
    for phase in ("Pending", "Preparing", "Committing", "Publishing"):
        assert rules.duty_of(entry(policy, phase, tied=True, deleting=True)) is None


def test_a_change_of_a_finished_one_is_said_to_be_seen() -> None:
    assert rules.duty_of(entry(generation=2)) == Duty.OBSERVE
    assert rules.duty_of(entry("Delete", generation=2)) == Duty.TIE
    assert rules.duty_of(entry(phase="Preparing", generation=2)) is None
    status = phases.failed(CheckpointStatus(), "Any", "why", phases.At(1, 0.0))
    seen = phases.observed(status, 2)
    assert (seen.observed_generation, {each.observed_generation for each in seen.conditions}) == (2, {2})
    assert phases.observed(seen, 1) == status


def test_a_claim_is_what_the_status_says() -> None:
    cells = (
        CheckpointCell(index=0, uri="s3://b/0", digest="d0"),
        CheckpointCell(index=1, uri="s3://b/1"),
        CheckpointCell(index=2),
    )
    status = CheckpointStatus(stack_uid="s", checkpoint_id="c").model_copy(update={"cells": cells})
    assert rules.claims_of(status, "u") == [
        ("s3://b/0", Claim("s", "c", "d0", "u")),
        ("s3://b/1", Claim("s", "c", None, "u")),
    ]
    assert rules.claims_of(CheckpointStatus(cells=cells[:1]), "u") == []


def test_k2_a_storage_that_fails_holds_nothing_for_ever() -> None:
    for problem in StorageProblem:
        patience = 60 if problem is StorageProblem.CREDENTIALS_MISSING else 600
        assert not rules.gives_up(patience - 1, problem)
        assert rules.gives_up(patience, problem)


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_what_came_of_a_checkpoint_stays_said_while_it_goes(phase: str) -> None:
    final = CheckpointStatus(phase=phase, digest="d", conditions=())  # type: ignore[arg-type]
    failed = phases.failed(CheckpointStatus(), "Any", "why", phases.At(1, 0.0))
    going = phases.deleting(failed, ConditionReason.REMOVING, "its data is being removed", 3)
    assert (going.phase, going.reason, going.observed_generation) == ("Deleting", "Removing", 3)
    condition = get_condition(going.conditions, ConditionType.SUCCEEDED)
    assert condition is not None and (condition.status, condition.reason) == ("False", "Any")
    assert phases.deleting(final, ConditionReason.HELD, "", 1).digest == "d"
    assert phases.deleting(going, ConditionReason.HELD, "", 3).reason == "Held"
    for open_phase in ("Pending", "Preparing", "Publishing"):
        with pytest.raises(ValueError, match="does not go from"):
            phases.deleting(CheckpointStatus(phase=open_phase), ConditionReason.HELD, "", 1)  # type: ignore[arg-type]
