"""What a GymRestore restores, whether it fits, how far it is, and what its status says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from gym_operator.api.conditions import ConditionReason, ConditionType, get_condition
from gym_operator.api.restore import GymRestore, RestoredCheckpoint, RestoreStatus
from gym_operator.rules import restores as rules
from gym_servers.coordination.record import CellRecord, Choice, Chosen, Stage
from gym_servers.stack.spec import Participant, SpecError
from gym_servers.storage.manifest import CodeIdentity, Member, Publication

NOW = 1_800_000_000.0
METADATA = {"name": "back", "namespace": "team", "uid": "grst-uid", "creationTimestamp": "2027-01-15T08:00:00Z"}
STACK_UID = "stack-uid"
DIGEST = "d" * 64


def spec(**changes: Any) -> dict[str, Any]:
    whole = {"stackRef": {"name": "demo"}, "checkpointRef": {"name": "one"}, **changes}
    return {key: value for key, value in whole.items() if value is not None}


def restore(**changes: Any) -> GymRestore:
    return GymRestore.parse({"metadata": METADATA, "spec": spec(**changes)})


def checkpoint(name: str, phase: str | None = "Succeeded", order: int = 1, **changes: Any) -> dict[str, Any]:
    uri = f"s3://b/{STACK_UID}/cell-0/checkpoints/000000-{order:06d}-{name}"
    status = {
        "phase": phase,
        "stackUID": changes.get("stack_uid", STACK_UID),
        "completionTime": changes.get("ended", "2027-01-15T08:00:00Z"),
        "cells": [{"index": 0, "uri": uri, "digest": DIGEST}],
    }
    return {
        "metadata": {"namespace": "team", "name": name, "uid": name, **changes.get("metadata", {})},
        "spec": {"stackRef": {"name": changes.get("stack", "demo")}, "labels": changes.get("labels", {})},
        "status": status if phase else {},
    }


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"checkpointRef": None}, "exactly one of checkpointRef"),
        ({"uri": "s3://bkt/x", "digest": DIGEST}, "exactly one of checkpointRef"),
        ({"labels": {"step": "7"}}, "exactly one of checkpointRef"),
        ({"checkpointRef": None, "uri": "s3://bkt/x"}, "uri needs digest"),
        ({"digest": DIGEST}, "uri needs digest"),
        ({"checkpointRef": None, "uri": "s3://bkt/x", "digest": "abc"}, "64 hex digits"),
        ({"checkpointRef": None, "labels": {}}, "labels"),
        ({"stackRef": {"name": "Demo"}}, "lower-case"),
        ({"backoffLimit": -1}, "backoffLimit"),
    ],
)
def test_what_cannot_be_used_says_what_to_write(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        restore(**changes)


def test_a_place_is_taken_as_it_is() -> None:
    placed = restore(checkpointRef=None, uri="s3://bkt/x/", digest=DIGEST)
    assert rules.by_place(placed.spec) == rules.Found((rules.Place("s3://bkt/x", DIGEST),))
    assert rules.by_place(restore().spec) is None


def test_k9_a_checkpoint_that_is_not_complete_is_waited_for() -> None:
    for phase in (None, "Pending", "Preparing", "Committing", "Publishing"):
        found = rules.by_checkpoint(checkpoint("one", phase), "one")
        assert isinstance(found, rules.Wait)
        assert (found.reason, found.patient) == (ConditionReason.CHECKPOINT_NOT_READY, True)
    uri = checkpoint("one")["status"]["cells"][0]["uri"]
    assert rules.by_checkpoint(checkpoint("one"), "one") == rules.Found((rules.Place(uri, DIGEST, 0),))


def test_a_checkpoint_that_is_not_there_is_waited_for_a_while_only() -> None:
    found = rules.by_checkpoint(None, "one")
    assert isinstance(found, rules.Wait)
    assert (found.reason, found.patient) == (ConditionReason.CHECKPOINT_NOT_FOUND, False)


def test_k4_what_has_failed_or_is_being_deleted_is_refused() -> None:
    deleted = checkpoint("one", metadata={"deletionTimestamp": "2027-01-15T08:00:00Z"})
    nowhere = checkpoint("one")
    nowhere["status"]["cells"] = []
    for body, reason in (
        (checkpoint("one", "Failed"), ConditionReason.CHECKPOINT_FAILED),
        (deleted, ConditionReason.CHECKPOINT_DELETED),
        (nowhere, ConditionReason.SOURCE_INVALID),
    ):
        found = rules.by_checkpoint(body, "one")
        assert isinstance(found, rules.Refuse)
        assert found.reason == reason


def chosen_by_labels(*bodies: dict[str, Any], labels: dict[str, str] | None = None) -> str:
    """Of these, one page each."""
    search = rules.Labelled(labels or {"step": "7"}, "demo", STACK_UID)
    for body in bodies:
        search = search.seen([body])
    found = search.found()
    assert found == rules.Labelled(search.labels, "demo", STACK_UID).seen(bodies).found(), "whatever the pages"
    assert isinstance(found, rules.Found), found
    return found.places[0].uri.rsplit("-", 1)[1]


def test_k12_of_several_with_the_label_the_newest_of_the_stack_is_chosen() -> None:
    seven = {"labels": {"step": "7", "run": "a"}}
    older, newer = checkpoint("older", order=1, **seven), checkpoint("newer", order=2, **seven)
    others = [
        checkpoint("failed", "Failed", order=9, **seven),
        checkpoint("eight", order=9, labels={"step": "8"}),
        checkpoint("elsewhere", order=9, stack="other", **seven),
        checkpoint("going", order=9, metadata={"deletionTimestamp": "x"}, **seven),
        checkpoint("predecessor", order=9, stack_uid="before", ended="2028-01-01T00:00:00Z", **seven),
    ]
    assert chosen_by_labels(newer, *others, older) == "newer"
    assert chosen_by_labels(older, *others) == "older"
    assert chosen_by_labels(older, newer, labels={"step": "7", "run": "a"}) == "newer"


def test_k8_a_stack_that_was_made_again_finds_what_the_one_before_it_took() -> None:
    early = checkpoint("early", order=9, stack_uid="before", labels={"step": "7"}, ended="2027-01-01T00:00:00Z")
    late = checkpoint("late", order=1, stack_uid="before2", labels={"step": "7"}, ended="2027-01-02T00:00:00Z")
    assert chosen_by_labels(early, late) == "late"


def test_without_a_checkpoint_of_the_label_it_says_so_or_waits_for_one_that_is_coming() -> None:
    labels = {"step": "7"}
    search = rules.Labelled(labels, "demo", STACK_UID)
    nothing = search.seen([checkpoint("x", "Failed", labels=labels)]).found()
    assert isinstance(nothing, rules.Wait)
    assert (nothing.reason, nothing.patient) == (ConditionReason.CHECKPOINT_NOT_FOUND, False)
    assert "step: 7" in nothing.message
    coming = search.seen([checkpoint("x", "Preparing", labels=labels)]).seen([]).found()
    assert isinstance(coming, rules.Wait)
    assert (coming.reason, coming.patient) == (ConditionReason.CHECKPOINT_NOT_READY, True)


# ---- fitting --------------------------------------------------------------------------------------------------


def publication(*members: tuple[str, str, str], **changes: Any) -> Publication:
    def member(kind: str, instance: str, server: str) -> Member:
        code = CodeIdentity(image="", server=server, config_digest="", record_format=1)
        return Member(kind=kind, instance=instance, session="s", manifest_digest="m", records=1, bytes=1, code=code)

    whole = {
        "state": "published",
        "checkpoint_id": "id",
        "name": "one",
        "stack_uid": STACK_UID,
        "cell": 0,
        "cell_attempt": 2,
        "sequence": 1,
        "created": NOW,
        "members": [member(*each) for each in members],
    }
    return Publication.model_validate({**whole, **changes})


ENV, AGENT = ("environment", "env", "single-agent-turn"), ("agent", "agent", "simple-agent")
HERE = [Participant("env", "environment", "single-agent-turn"), Participant("agent", "agent", "simple-agent")]


def test_k11_records_fit_where_each_has_its_server_and_each_server_has_its_records() -> None:
    assert rules.misfit(publication(ENV, AGENT), HERE) == ""
    assert "no records of agent" in rules.misfit(publication(ENV), HERE)
    extra = publication(ENV, AGENT, ("resources", "counter", "counter"))
    assert "no server for the records of counter" in rules.misfit(extra, HERE)
    other = publication(ENV, ("agent", "agent", "scratch-agent"))
    assert "agent is simple-agent and was scratch-agent" in rules.misfit(other, HERE)
    kind = publication(ENV, ("resources", "agent", "simple-agent"))
    assert rules.misfit(kind, HERE)


def test_a_driver_may_be_another_one() -> None:
    driven = publication(ENV, AGENT, ("collection", "collection", "collection"))
    assert rules.misfit(driven, HERE) == ""
    wants = [*HERE, Participant("collection", "collection", "collection")]
    assert "no records of collection" in rules.misfit(publication(ENV, AGENT), wants)


def test_what_continues_is_above_what_was_used() -> None:
    wide = publication(episodes=["a", "b-a7", "c-a3"], restarts=["d-a9"], not_started=["e"])
    assert rules.highest_attempt_of(wide) == 9
    assert rules.highest_attempt_of(publication()) == 2
    going_on = rules.continued(wide, 5, 1)
    assert [(each.rollout, each.attempt, each.cell) for each in going_on] == [("a", 5, 1), ("b", 8, 1), ("c", 5, 1)]


# ---- progress -------------------------------------------------------------------------------------------------


def record(stage: Stage, by: str | None = "grst-uid", tries: int = 1) -> CellRecord:
    choice = Choice(uri="u", digest="d", checkpoint_id="c", name="n")
    chosen = Chosen(choice=choice, by=by, attempt=4) if by else None
    return CellRecord(stage=stage, attempt=3 + tries, chosen=chosen, failures=tries - 1)


@pytest.mark.parametrize(
    ("found", "begun", "outcome"),
    [
        (CellRecord(), False, "Pending"),
        (record(Stage.RUNNING, by="another"), False, "Pending"),
        (record(Stage.REPLACING), True, "Restoring"),
        (record(Stage.STARTING), False, "Restoring"),
        (record(Stage.STARTING, tries=4), True, "Restoring"),
        (record(Stage.RUNNING, tries=9), True, "Succeeded"),
        (record(Stage.STOPPED), True, "Succeeded"),
        (record(Stage.STARTING, tries=5), True, ConditionReason.BACKOFF_LIMIT_EXCEEDED),
        (record(Stage.STALLED), True, ConditionReason.BACKOFF_LIMIT_EXCEEDED),
        (record(Stage.RUNNING, by=None), True, ConditionReason.RECORDS_REFUSED),
        (record(Stage.STARTING, by="another"), True, ConditionReason.SUPERSEDED),
    ],
)
def test_how_far_a_cell_is(found: CellRecord, begun: bool, outcome: str) -> None:
    standing = rules.progress(found, "grst-uid", begun, 3)
    assert (standing[0] if isinstance(standing, tuple) else standing) == outcome


def test_the_unfinished_ones_of_a_stack_come_in_order_of_creation() -> None:
    def body(
        name: str, created: str, stack: str = "demo", phase: str | None = None, **metadata: Any
    ) -> dict[str, Any]:
        return {
            "metadata": {"name": name, "namespace": "team", "creationTimestamp": created, **metadata},
            "spec": {"stackRef": {"name": stack}, "checkpointRef": {"name": f"of-{name}"}},
            "status": {"phase": phase, "cells": [{"uri": f"s3://{name}"}]} if phase else {},
        }

    given = [
        body("b", "2027-01-15T08:00:01Z"),
        body("c", "2027-01-15T08:00:00Z", phase="Restoring"),
        body("a", "2027-01-15T08:00:01Z"),
        body("done", "2027-01-15T08:00:00Z", phase="Succeeded"),
        body("failed", "2027-01-15T08:00:00Z", phase="Failed"),
        body("other", "2027-01-15T08:00:00Z", stack="other"),
        body("going", "2027-01-15T08:00:00Z", deletionTimestamp="x"),
    ]
    assert [each["metadata"]["name"] for each in rules.in_order(given, "demo")] == ["c", "a", "b"]
    uris, names = rules.held_by(given)
    assert uris == {"s3://c"}
    assert names == {("team", f"of-{name}") for name in ("a", "b", "c", "other", "going")}


# ---- status ---------------------------------------------------------------------------------------------------


def test_its_status_goes_one_way_and_says_what_continues() -> None:
    pending = rules.waiting(RestoreStatus(), ConditionReason.QUEUED, "waits", 1, NOW)
    place = rules.Place("s3://b/x", DIGEST, 0)
    chosen = RestoredCheckpoint(name="one", id="id", stack_uid=STACK_UID)
    begun = rules.restoring(pending, chosen, [place], 1, NOW)
    on_the_way = rules.begun(begun, {0: 3})
    assert (begun.cells[0].attempt, on_the_way.cells[0].attempt) == (None, 3)
    wide = publication(episodes=[f"r-{n}" for n in range(150)])
    done = rules.succeeded(on_the_way, rules.continued(wide, 3, 0), 1, NOW + 9)
    assert (done.phase, done.continued_count, len(done.continued)) == ("Succeeded", 150, 100)
    condition = get_condition(done.conditions, ConditionType.SUCCEEDED)
    assert condition is not None and condition.status == "True"
    lost = rules.failed(on_the_way, ConditionReason.RECORDS_REFUSED, "why", 1, NOW)
    stalled = get_condition(lost.conditions, ConditionType.STALLED)
    assert stalled is not None and stalled.status == "True"
    for final in (done, lost):
        for move in (
            lambda s: rules.waiting(s, "Any", "", 1, NOW),
            lambda s: rules.restoring(s, chosen, [place], 1, NOW),
            lambda s: rules.failed(s, "Any", "", 1, NOW),
            lambda s: rules.succeeded(s, [], 1, NOW),
        ):
            with pytest.raises(ValueError, match="does not go from"):
                move(final)
    with pytest.raises(ValueError, match="Pending to Succeeded"):
        rules.succeeded(pending, [], 1, NOW)


def test_a_restore_without_a_stack_waits_a_while() -> None:
    ages = [rules.without_stack(RestoreStatus(), "demo", age, 1, NOW).phase for age in (0.0, 59.0, 61.0)]
    assert ages == ["Pending", "Pending", "Failed"]
    assert all(one != "Failed" or other == "Failed" for one, other in pairwise(ages))
    begun = RestoreStatus(phase="Restoring")
    assert rules.without_stack(begun, "demo", 0.0, 1, NOW).phase == "Failed"
