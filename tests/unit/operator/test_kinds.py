"""Reading the kinds as the API server holds them, and writing their status."""

from __future__ import annotations

from typing import Any

import pytest

from gym_operator.api.checkpoint import CheckpointCell, CheckpointParticipant, CheckpointStatus, GymCheckpoint
from gym_operator.api.stack import CellStatus, GymStack, StackParticipant, StackStatus
from gym_servers.stack.spec import SpecError

METADATA = {
    "name": "demo",
    "namespace": "team",
    "uid": "uid-1",
    "generation": 4,
    "resourceVersion": "17",
    "managedFields": [],
}


def test_a_fresh_stack_has_not_been_looked_at(spec_document: dict[str, Any]) -> None:
    stack = GymStack.parse({"metadata": METADATA, "spec": spec_document, "status": {"observedGeneration": -1}})
    assert stack.status.observed_generation == -1
    assert (stack.identity.namespace, stack.identity.name, stack.identity.uid) == ("team", "demo", "uid-1")
    assert (stack.metadata.generation, stack.metadata.resource_version) == (4, "17")


def test_a_status_of_a_newer_operator_can_be_read(spec_document: dict[str, Any]) -> None:
    status = {"observedGeneration": 4, "phase": "Running", "newField": {"a": 1}}
    stack = GymStack.parse({"metadata": METADATA, "spec": spec_document, "status": status})
    assert stack.status.phase == "Running"


def test_a_stack_whose_names_do_not_fit_is_refused(spec_document: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="choose shorter names"):
        GymStack.parse({"metadata": {**METADATA, "name": "a" * 50}, "spec": spec_document})


def test_a_status_is_written_in_the_api_s_spelling() -> None:
    participant = StackParticipant(name="env", kind="environment", pod="demo-env-0", pod_uid="u", session="s")
    status = StackStatus(
        observed_generation=4,
        phase="Running",
        cells=(CellStatus(index=0, phase="Running", record={"open": {"x": 1}}, participants=(participant,)),),
    )
    document = status.document()
    assert document["cells"][0]["participants"][0]["podUID"] == "u"
    assert document["cells"][0]["record"] == {"open": {"x": 1}}
    assert "lastCheckpoint" not in document
    assert StackStatus.model_validate(document) == status


def test_a_checkpoint_and_its_status() -> None:
    checkpoint = GymCheckpoint.parse(
        {
            "metadata": METADATA,
            "spec": {"stackRef": {"name": "demo"}, "labels": {"step": "7"}, "timeouts": {"prepare": "30s"}},
        }
    )
    assert checkpoint.spec.labels == {"step": "7"}
    assert checkpoint.spec.timeouts is not None and checkpoint.spec.timeouts.commit is None
    participant = CheckpointParticipant(name="env", kind="environment", records=3)
    status = CheckpointStatus(checkpoint_id="c1", cells=(CheckpointCell(index=2, participants=(participant,)),))
    assert status.document()["checkpointID"] == "c1"
    assert CheckpointStatus.model_validate(status.document()) == status


def test_a_checkpoint_s_scope_stop_and_driver_state() -> None:
    spec = {
        "stackRef": {"name": "demo"},
        "episodes": ["12-0", "12-1-a3"],
        "driverState": {"value": {"step": 7, "nothing": None}},
        "stopAfter": True,
    }
    read = GymCheckpoint.parse({"metadata": METADATA, "spec": spec}).spec
    assert (read.episodes, read.stop_after) == (("12-0", "12-1-a3"), True)
    assert read.driver_state is not None
    assert read.driver_state.document() == {"value": {"step": 7, "nothing": None}}
    plain = GymCheckpoint.parse({"metadata": METADATA, "spec": {"stackRef": {"name": "demo"}}}).spec
    assert (plain.episodes, plain.stop_after, plain.driver_state) == (None, False, None)


def test_what_is_adopted_is_not_taken() -> None:
    source = {"uri": "s3://bucket/team/x", "digest": "0" * 64}
    spec: dict[str, Any] = {"stackRef": {"name": "demo"}, "source": source}
    assert GymCheckpoint.parse({"metadata": METADATA, "spec": spec}).spec.source is not None
    assert not GymCheckpoint.parse({"metadata": METADATA, "spec": {**spec, "stopAfter": False}}).spec.stop_after
    for wrong, says in (
        ({"timeouts": {"prepare": "30s"}}, "leave timeouts out"),
        ({"episodes": ["12-0"]}, "leave episodes out"),
        ({"driverState": {"value": {"step": 7}}}, "leave driverState out"),
        ({"stopAfter": True}, "leave stopAfter out, and set spec.suspend"),
        ({"source": {**source, "digest": "abc"}}, "64 hex digits"),
        ({"source": {"uri": source["uri"]}}, "digest"),
        ({"deletionPolicy": "Keep"}, "deletionPolicy"),
    ):
        with pytest.raises(SpecError, match=says):
            GymCheckpoint.parse({"metadata": METADATA, "spec": {**spec, **wrong}})


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"stackRef": {"name": "Demo"}},
        {"stackRef": {"name": "demo"}, "ttl": "1 week"},
        {"stackRef": {"name": "demo"}, "episodes": []},
        {"stackRef": {"name": "demo"}, "episodes": ["a/b"]},
        {"stackRef": {"name": "demo"}, "episodes": [f"{n}-0" for n in range(1001)]},
        {"stackRef": {"name": "demo"}, "driverState": {}},
        {"stackRef": {"name": "demo"}, "driverState": {"uri": "s3://b/k", "digest": "md5"}},
        None,
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_refused(spec: Any) -> None:
    with pytest.raises(SpecError, match="spec is not valid"):
        GymCheckpoint.parse({"metadata": METADATA, "spec": spec})
