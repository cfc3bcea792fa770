"""The objects that verbs make of what people write."""

from __future__ import annotations

from typing import Any

import pytest

from gym_operator.plugin.exits import Unusable
from gym_operator.plugin.views.requests import (
    dated_name,
    labels_of,
    new_checkpoint,
    new_restore,
    seconds_of,
    source_of,
)

DIGEST = "a" * 64


def test_names_tell_when_they_were_made() -> None:
    assert dated_name("demo", 1_800_000_000.9) == "demo-20270115080000"


def test_labels_are_pairs_and_values_may_hold_anything() -> None:
    assert labels_of(["step=120", "note=a=b", "empty="]) == {"step": "120", "note": "a=b", "empty": ""}
    for wrong in ("step", "=120", ""):
        with pytest.raises(Unusable, match="such as step=120"):
            labels_of([wrong])


def test_a_time_to_wait_is_a_duration() -> None:
    assert seconds_of("--timeout", "10m") == 600
    with pytest.raises(Unusable, match=r"--timeout soon: write a whole number and a unit"):
        seconds_of("--timeout", "soon")


def test_a_checkpoint_says_what_was_asked_for_and_no_more() -> None:
    bare = new_checkpoint("one", "demo", {}, stop_after=False)
    assert bare == {"metadata": {"name": "one"}, "spec": {"stackRef": {"name": "demo"}}}
    full = new_checkpoint("one", "demo", {"step": "7"}, stop_after=True)
    assert full["spec"] == {"stackRef": {"name": "demo"}, "labels": {"step": "7"}, "stopAfter": True}


@pytest.mark.parametrize(("stack", "labels"), [("Demo!", {}), ("demo", {str(i): "x" for i in range(17)})])
def test_what_the_api_server_would_refuse_is_refused_before(stack: str, labels: dict[str, str]) -> None:
    with pytest.raises(Unusable, match="spec is not valid"):
        new_checkpoint("one", stack, labels, stop_after=False)


@pytest.mark.parametrize(
    ("wanted", "digest", "source"),
    [
        ("one", None, {"checkpointRef": {"name": "one"}}),
        ("step=7,run=a", None, {"labels": {"step": "7", "run": "a"}}),
        ("s3://bucket/x/", DIGEST, {"uri": "s3://bucket/x", "digest": DIGEST}),
        ("s3://bucket/x/checkpoint.json", DIGEST, {"uri": "s3://bucket/x", "digest": DIGEST}),
    ],
)
def test_a_source_is_told_by_how_it_looks(wanted: str, digest: str | None, source: dict[str, Any]) -> None:
    assert source_of(wanted, digest) == source
    assert new_restore("back", "demo", source)["spec"] == {"stackRef": {"name": "demo"}, **source}


def test_a_place_needs_its_digest_and_nothing_else_takes_one() -> None:
    with pytest.raises(Unusable, match="kubectl gym inspect s3://bucket/x shows it"):
        source_of("s3://bucket/x", None)
    for wanted in ("one", "step=7"):
        with pytest.raises(Unusable, match="--digest is for a place"):
            source_of(wanted, DIGEST)


def test_a_restore_that_the_api_server_would_refuse_is_refused_before() -> None:
    with pytest.raises(Unusable, match="64 hex digits"):
        new_restore("back", "demo", source_of("s3://bucket/x", "abc"))
