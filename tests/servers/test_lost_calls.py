"""Captured calls that are damaged where a model server keeps them: a whole cell goes on, and takes checkpoints; what
their rollouts have lost is done again from the input, and nothing else is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gym_rig.cell import Rig, cell
from gym_rig.ledgers import HURTS, hurt, spilled
from gym_servers.capture import segments, store
from gym_servers.capture.segments import Damaged, Place
from gym_servers.coordination.checkpoint import Progress
from gym_servers.engine.rows import counter_rows
from gym_servers.storage.manifest import Publication

ROLLOUTS = 3


@asynccontextmanager
async def spilling(folder: Path) -> AsyncIterator[Rig]:
    """A cell in the middle of its work, whose model server keeps all calls in files, one in each."""
    config = {"base_url": "http://engine", "cache_bytes": 0}
    counter = {"journal": str(folder / "journal.jsonl")}
    servers = [
        {"name": "env", "kind": "environment", "server": "single-agent-turn"},
        {"name": "policy", "kind": "model", "server": "scripted", "config": config},
        {"name": "agent", "kind": "agent", "server": "simple-agent"},
        {"name": "counter", "kind": "resources", "server": "counter", "config": counter},
    ]
    with mock.patch.object(store, "SEGMENT_BYTES", 1):
        async with cell(folder, counter_rows(ROLLOUTS, 2), servers=servers) as rig:
            await rig.until(lambda: rig.effects() >= ROLLOUTS)
            yield rig


async def lose(rig: Rig, how: str) -> None:
    """Damage the first call of the first rollout."""
    ledgers = rig.participant("policy")._ledgers
    await spilled(ledgers)
    assert hurt(ledgers, ledgers.calls("0-0")[0], how) == {"0-0"}


async def quiet(_: Progress) -> None:
    return None


async def taken(rig: Rig, name: str, **options: Any) -> Publication:
    taking = asyncio.ensure_future(rig.controller.take(f"{name}-id", name, quiet, **options))
    await rig.until(taking.done)
    return taking.result().publication


async def to_the_end(rig: Rig, continued: int) -> None:
    await rig.until(rig.complete)
    counted = rig.account(ROLLOUTS)
    assert counted.problems == []
    assert (counted.rows, counted.reward_mean, counted.continued) == (ROLLOUTS, 1.0, continued)


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("how", HURTS)
async def test_a_checkpoint_is_published_without_them_and_they_start_over_alone(
    tmp_path: Path, how: str, stop: bool
) -> None:
    async with spilling(tmp_path) as rig:
        await lose(rig, how)
        publication = await taken(rig, "cp", stop=stop, replacing="new servers" if stop else "")
        assert (publication.scope, publication.episodes) == (["0-0", "1-0", "2-0"], ["1-0", "2-0"])
        assert (publication.restarts, publication.not_started, publication.left_out) == (["0-0"], [], [])
        if not stop:
            rig.kill()
        await rig.until(lambda: rig.running(1))
        await to_the_end(rig, ROLLOUTS - 1)


async def test_each_later_checkpoint_says_it_again_and_the_rollouts_go_on_meanwhile(tmp_path: Path) -> None:
    async with spilling(tmp_path) as rig:
        await lose(rig, "removed")
        for number in range(3):
            assert (await taken(rig, f"cp-{number}")).restarts == ["0-0"]
        await to_the_end(rig, 0)


async def test_a_call_that_needs_what_is_lost_costs_its_attempt_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its conversation cannot go on from tokens that nobody has: another attempt begins from the input."""
    async with spilling(tmp_path) as rig:
        lost: list[Place] = []

        def once(place: Place) -> bytes:
            lost.append(place)
            if len(lost) == 1:
                raise Damaged("a ledger's file does not match its digest")
            return segments.read(place)

        monkeypatch.setattr(store, "read", once)
        await to_the_end(rig, 0)
        (failed,) = (tmp_path / "output/rollouts_failures.jsonl").read_text().splitlines()
        assert "captured calls are lost" in json.loads(failed)["failure_reason"]
        assert {entry["request"].partition("/")[0] for entry in rig.journal() if entry["kind"] == "tokens"} == {
            *("0-0", "1-0", "2-0"),
            f"{json.loads(failed)['_ng_rollout_id']}-a1",
        }
