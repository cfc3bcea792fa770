"""What the operator keeps in memory of what there may be thousands of."""

from __future__ import annotations

import gc
import json
import sys
from types import ModuleType
from typing import Any, Final

import httpx
import pytest

from gym_bench import objects
from gym_operator.effects.cache import Cache, lean
from gym_operator.effects.transport import PodTransport
from gym_operator.rules.checkpoint_entries import entry_of

MOST: Final = 900
"""Bytes for each finished checkpoint."""
COUNT: Final = 300


def told(number: int) -> dict[str, Any]:
    """A finished GymCheckpoint as it comes off the wire: its strings are nobody else's."""
    body = objects.checkpoint(number, objects.stack_name(number % 20), f"{number % 5:036}")
    body["status"] = objects.checkpoint_status(number, f"{number % 20:036}", "http://s3:8333")
    fields = {f"f:{field}": {} for field in body["status"]} | {"f:cells": {"k:{}": {f"f:{n}": {} for n in range(50)}}}
    body["metadata"] |= {
        "uid": f"{number:036}",
        "resourceVersion": str(10_000 + number),
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "generation": 1,
        "managedFields": [{"manager": "operator", "operation": "Update", "fieldsV1": fields}],
    }
    whole: dict[str, Any] = json.loads(json.dumps(body))
    return whole


def size_of(kept: object) -> int:
    """The bytes of an object and of all that it alone leads to."""
    found: dict[int, object] = {}
    left = [kept]
    while left:
        one = left.pop()
        if id(one) not in found and not isinstance(one, type | ModuleType) and not callable(one):
            found[id(one)] = one
            left += gc.get_referents(one)
    return sum(sys.getsizeof(one) for one in found.values())


def cache() -> Cache:
    return Cache(PodTransport(httpx.MockTransport(lambda request: httpx.Response(500))))


def test_a_finished_checkpoint_is_kept_in_a_kilobyte() -> None:
    few, many = cache(), cache()
    for number in range(COUNT // 10):
        few.put_checkpoint(told(number))
    for number in range(COUNT):
        many.put_checkpoint(told(number))
    assert many.checkpoints == {}
    assert len(many.entries()) == COUNT
    each = (size_of(many) - size_of(few)) / (COUNT - COUNT // 10)
    assert 200 < each < MOST, "all that is kept of it is in its entry"


def test_what_is_said_alike_is_kept_once() -> None:
    one, other = entry_of(told(1)), entry_of(told(101))
    for field in ("namespace", "stack", "stack_uid", "schedule_uid", "phase", "policy"):
        assert getattr(one, field) is getattr(other, field), field


@pytest.mark.parametrize("kept", [objects.stack(1, "http://s3:8333"), objects.schedule(1)])
def test_what_only_an_api_server_reads_is_not_kept(kept: dict[str, Any]) -> None:
    fields = {"managedFields": [{"manager": "kubectl"}], "labels": {"team": "a"}}
    body = {**kept, "metadata": {**kept["metadata"], **fields}, "status": {"phase": "Running"}}
    stripped = lean(body)
    assert stripped == {**body, "metadata": {**kept["metadata"], "labels": {"team": "a"}}}
    assert "managedFields" in body["metadata"], "whoever told of it still has it whole"
