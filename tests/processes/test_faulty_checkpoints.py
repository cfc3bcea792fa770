"""Checkpoints of real processes while a real S3 server fails under them, in each way we know of: each is given up and
says why, no rollout notices, and the next one works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gym_kit import faulty_s3 as faults
from gym_kit.faulty_s3 import Asked, FaultyS3, reading, refusing
from gym_servers.coordination.checkpoint import CheckpointFailed

pytestmark = pytest.mark.timeout(300)


def of_checkpoints(asked: Asked) -> bool:
    """Of the cell's checkpoints; rows and attempt numbers are let through."""
    return "/checkpoints/" in asked.key


def records(asked: Asked) -> bool:
    return of_checkpoints(asked) and asked.method == "PUT"


FAULTS: list[tuple[str, faults.Fault, str]] = [
    ("busy", refusing(503, "SlowDown", records), "asks for fewer requests"),
    ("full", refusing(507, "InsufficientStorage", records), "free space or raise the quota"),
    ("gone", refusing(404, "NoSuchBucket", of_checkpoints), "the bucket does not exist"),
    ("keys", refusing(403, "InvalidAccessKeyId", of_checkpoints), "the access key is unknown"),
    ("corrupted", faults.changing(lambda body: bytes([body[0] ^ 1]) + body[1:], reading("/pack")), "its digest"),
    ("truncated", faults.changing(lambda body: body[:-3], reading("/pack")), "its digest"),
]


async def test_a_checkpoint_whose_storage_fails_is_given_up_and_says_why_and_the_next_one_works(
    collecting: Callable[..., Any], faulty: FaultyS3
) -> None:
    async with collecting(rollouts=2, steps=60, rate=60.0, endpoint=faulty.endpoint) as run:
        await run.progress()
        await run.take("good")
        for name, fault, words in FAULTS:
            faulty.fault = fault
            with pytest.raises(CheckpointFailed, match=words):
                await run.take(name)
            await run.progress(1)  # the rollouts go on meanwhile
            faulty.heal()
            await run.settled()
        run.kill("agent")
        await run.in_service(1)
        assert run.sources() == ["good"], "nothing of those that were given up is restored"
        await run.take("next")
        run.kill("counter")
        await run.in_service(2)
        assert run.sources() == ["good", "next"]


async def test_a_slow_storage_costs_a_checkpoint_time_and_the_rollouts_none(
    collecting: Callable[..., Any], faulty: FaultyS3
) -> None:
    async with collecting(rollouts=2, steps=20, endpoint=faulty.endpoint) as run:
        await run.progress()
        faulty.fault = faults.late(2.0, records)
        parked: list[int] = []
        await run.take("slow", at="Committing", then=lambda: parked.append(run.effects()))
        assert run.effects() > parked[0], "they went on while it was being written"
        faulty.heal()
        run.kill("agent")
        await run.in_service(1)
        assert run.sources() == ["slow"]
        assert (await run.end()).problems == []
