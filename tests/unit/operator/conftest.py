"""Builders of stacks: a small valid one, and whatever a test changes about it; and an API server to have them at."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from gym_operator.rules.workloads import StackContext
from gym_rig.fake_kube import FakeKube
from gym_servers.stack.settings import StackIdentity
from gym_servers.stack.spec import parse_spec

UID = "7d9c8f5e-0000-4000-8000-000000000001"

SPEC: dict[str, Any] = {
    "image": "registry.example/gym:1",
    "servers": [
        {"name": "env", "kind": "environment", "server": "single-agent-turn"},
        {"name": "policy", "kind": "model", "server": "vllm", "config": {"base_url": "http://llm:8000"}},
        {"name": "agent", "kind": "agent", "server": "simple-agent"},
        {"name": "counter", "kind": "resources", "server": "counter"},
    ],
    "collection": {"tasks": "s3://bucket/tasks.jsonl", "output": "s3://bucket/rows"},
    "checkpoints": {"storage": {"s3": {"bucket": "bucket", "prefix": "team/run", "credentialsSecret": "s3-keys"}}},
}


@pytest.fixture
def spec_document() -> dict[str, Any]:
    """The `spec` of a valid stack with a collection; tests may change it."""
    return copy.deepcopy(SPEC)


@pytest.fixture
def identity() -> StackIdentity:
    return StackIdentity(namespace="team", name="demo", uid=UID)


@pytest.fixture
def context(identity: StackIdentity) -> Callable[[dict[str, Any]], StackContext]:
    """A stack's context out of its spec's document."""
    return lambda document: StackContext(identity, parse_spec(document), operator_namespace="gym-system")


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube(lambda: 1_800_000_000.0)
