"""The proof can fail on real storage: what is damaged in the bucket is seen, named and passed over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gym_kit.bucket import SeaweedFS

pytestmark = pytest.mark.timeout(300)


def objects(s3: SeaweedFS, prefix: str, name: str, part: str) -> list[str]:
    """Keys of a checkpoint's objects that contain `part`."""
    client = s3.client()
    try:
        listed = client.list_objects_v2(Bucket="gym", Prefix=f"{prefix}/")
        return [o["Key"] for o in listed["Contents"] if f"-{name}-" in o["Key"] and part in o["Key"]]
    finally:
        client.close()


def flip(s3: SeaweedFS, key: str) -> None:
    client = s3.client()
    try:
        data = client.get_object(Bucket="gym", Key=key)["Body"].read()
        client.put_object(Bucket="gym", Key=key, Body=bytes([data[0] ^ 1]) + data[1:])
    finally:
        client.close()


def drop(s3: SeaweedFS, key: str) -> None:
    client = s3.client()
    try:
        client.delete_object(Bucket="gym", Key=key)
    finally:
        client.close()


async def test_a_damaged_checkpoint_is_passed_over_and_without_any_the_input_is_used(
    collecting: Callable[..., Any], s3: SeaweedFS
) -> None:
    async with collecting(rollouts=2, steps=12) as run:
        await run.progress(2)
        for name in ("first", "second", "third"):
            await run.take(name)
            await run.progress(2)

        (pack, *_) = objects(s3, run.prefix, "third", "counter/pack")
        await asyncio.to_thread(flip, s3, pack)
        (pack, *_) = objects(s3, run.prefix, "second", "agent/pack")
        await asyncio.to_thread(drop, s3, pack)
        run.kill("agent")
        await run.in_service(1)
        assert run.sources() == ["first"]
        passed_over = [text for reason, text in run.said if reason == "CheckpointUnusable"]
        assert len(passed_over) == 2
        assert "third is passed over: pack resources/counter/pack0000-" in passed_over[0]
        assert "does not match its digest" in passed_over[0]
        assert "second is passed over: pack agent/agent/pack0000-" in passed_over[1]
        assert "is missing" in passed_over[1]

        await run.progress(2)
        (manifest, *_) = objects(s3, run.prefix, "first", "env/manifest.json")
        await asyncio.to_thread(flip, s3, manifest)
        run.kill("env")
        await run.in_service(2)
        assert run.sources() == ["first", None]
        assert any("continues from the input" in text for reason, text in run.said if reason == "Recovering")
        counted = await run.end()
        assert counted.problems == []
        assert (counted.rows, counted.reward_mean, counted.restarted) == (2, 1.0, 2)
