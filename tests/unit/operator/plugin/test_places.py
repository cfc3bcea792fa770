"""Where a checkpoint is, and how its storage is reached."""

from __future__ import annotations

from typing import Any

import pytest

from gym_operator.plugin.exits import Unusable
from gym_operator.plugin.views.places import folder_of, is_place, places_of, s3_of, storage_of

S3 = {"s3": {"bucket": "now"}}
BEFORE = {"s3": {"bucket": "before"}}


def checkpoint(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "one"}, "spec": {"stackRef": {"name": "demo"}}, "status": status}


def stack(storage: dict[str, Any] | None) -> dict[str, Any]:
    return {"spec": {"checkpoints": {"storage": storage} if storage else {}}}


def test_a_place_is_told_by_its_slash() -> None:
    assert is_place("s3://bucket/x") and is_place("./x") and not is_place("one.two")


@pytest.mark.parametrize("uri", ["s3://bucket/x", "s3://bucket/x/", "s3://bucket/x/checkpoint.json"])
def test_the_document_stands_for_its_folder(uri: str) -> None:
    assert folder_of(uri) == "s3://bucket/x"


@pytest.mark.parametrize("uri", ["/", "//", "s3://", "s3:///", "/checkpoint.json", "s3:///checkpoint.json"])
def test_what_is_no_folder_is_told(uri: str) -> None:
    with pytest.raises(Unusable, match="is no checkpoint's folder"):
        folder_of(uri)


def test_what_is_published_has_a_place_whatever_became_of_the_rest() -> None:
    good = {"index": 1, "uri": "s3://bucket/1", "digest": "d"}
    (place,) = places_of(checkpoint(phase="Failed", cells=[{"index": 0, "uri": "s3://bucket/0"}, good]))
    assert (place.uri, place.digest, place.cell) == ("s3://bucket/1", "d", 1)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ({}, "it is Pending"),
        ({"phase": "Preparing", "cells": [{"index": 0, "uri": "u"}]}, "it is Preparing"),
        (
            {"phase": "Failed", "reason": "PrepareTimeout", "message": "too slow"},
            "it failed: PrepareTimeout: too slow",
        ),
    ],
)
def test_where_nothing_is_published_it_says_why(status: dict[str, Any], says: str) -> None:
    with pytest.raises(Unusable, match=f"GymCheckpoint one has nothing in storage: {says}"):
        places_of(checkpoint(**status))


@pytest.mark.parametrize(("now", "bucket"), [(stack(S3), "now"), (stack(None), "before"), (None, "before")])
def test_the_stack_as_it_is_says_how_its_storage_is_reached(now: dict[str, Any] | None, bucket: str) -> None:
    found = storage_of(checkpoint(storage=BEFORE), now).s3
    assert found is not None and found.bucket == bucket


def test_where_nobody_says_so_the_user_is_told_what_else_to_give() -> None:
    with pytest.raises(Unusable, match="give its URI in place of its name"):
        storage_of(checkpoint(), None)


def test_a_bucket_that_no_object_describes() -> None:
    assert s3_of("/folder/x", "http://s3:9000", None, "auto") is None
    found = s3_of("s3://bucket/x", "http://s3:9000", "eu-west-1", "path")
    assert found is not None
    assert (found.endpoint, found.region, found.addressing_style) == ("http://s3:9000", "eu-west-1", "path")
    bare = s3_of("s3://bucket/x", None, None, "auto")
    assert bare is not None and (bare.endpoint, bare.region) == (None, "us-east-1")
    with pytest.raises(Unusable, match="--endpoint s3:9000 is no address"):
        s3_of("s3://bucket/x", "s3:9000", None, "auto")
