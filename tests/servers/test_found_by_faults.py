"""What random faults have found (`make faults`), each as short as it can be said."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gym_rig.cell import cell
from gym_rig.network import Fault, Seen
from gym_rig.virtual import now
from gym_servers.coordination.record import CellRecord, Stage
from gym_servers.engine.rows import counter_rows
from gym_servers.protocol import messages as m


async def test_after_a_retire_was_answered_no_seed_of_its_episode_comes_into_the_journal(tmp_path: Path) -> None:
    """The journal takes a while, and the seed was answered for only when it had the entry."""
    async with cell(tmp_path, counter_rows(1, 1)) as rig:
        rig.journal_file.seconds = 2.0
        await rig.until(lambda: rig.effects() == 0 and rig.participant("env")._live)
        request = m.RetireRequest(checkpoint_id="retire", deadline_ts=now() + 20, episode_ids=["0-0"])
        await rig.client("counter").call("retire", request, m.RetireReply)

        def seeds() -> int:
            return sum(entry["kind"] == "seed" and entry["attempt"] == 0 for entry in rig.journal())

        answered = seeds()
        await rig.until(rig.complete)
        assert seeds() == answered


async def test_a_resume_that_is_repeated_does_not_open_the_process_that_took_the_place_of_the_one_it_was_meant_for(
    tmp_path: Path,
) -> None:
    """A container that starts again keeps its address: its driver would send the same attempts once more."""
    async with cell(tmp_path, counter_rows(2, 1)) as rig:
        await rig.until(lambda: rig.effects() >= 1)
        senders: dict[tuple[str, int], set[str]] = {}

        def note(seen: Seen) -> None:
            if seen.path == "/run":
                episode = json.loads(seen.body)["episode_id"]
                senders.setdefault((episode["rollout_id"], episode["attempt"]), set()).add(seen.caller)

        rig.network.on_request = note
        rig.kill("agent")
        await rig.until(lambda: rig.controller.record.stage is Stage.STARTING and rig.controller.record.pins)
        rig.network.faults.append(Fault("lose reply", "collection-control", "resume", calls=3))
        while not any(attempt == 1 for _, attempt in senders):  # noqa: ASYNC110 - another's traffic
            await asyncio.sleep(0.01)
        rig.kill("collection")
        rig.start("collection")
        await rig.until(rig.complete)
        assert all(len(drivers) == 1 for drivers in senders.values()), senders
        assert rig.account(2).problems == []


@pytest.mark.parametrize("landed", [True, False])
async def test_a_recovery_whose_beginning_is_persisted_again_is_the_same_one(tmp_path: Path, landed: bool) -> None:
    """The answer to the write was lost. Nobody may find two recoveries under one attempt, nor a number used up."""
    async with cell(tmp_path, counter_rows(1, 1)) as rig:
        await rig.until(lambda: rig.effects() >= 1)
        save = rig.save

        async def cut_off(record: CellRecord) -> None:
            if landed:
                await save(record)
            raise ConnectionError("no answer")

        rig.kill("agent")
        rig.save = cut_off  # type: ignore[method-assign]
        with pytest.raises(ConnectionError):
            await rig.until(lambda: rig.controller.record.attempt)
        await asyncio.sleep(5)
        rig.save = save  # type: ignore[method-assign]
        await rig.until(lambda: rig.running(attempt=1))
        began = {one.started_at for record in rig.saved for one in record.recoveries}
        assert (len(began), rig.controller.record.attempt) == (1, 1)


@pytest.mark.parametrize("server", ["env", "agent", "counter", "policy"])
async def test_what_was_retired_in_a_restore_that_was_given_up_does_not_come_back_with_the_next(
    tmp_path: Path, server: str
) -> None:
    """A coordinator dies before it has resumed what it has restored; the next one restores under the same attempt."""
    async with cell(tmp_path, counter_rows(2, 1)) as rig:
        await rig.until(lambda: rig.effects() >= 2)
        taken = await rig.checkpoint("one")
        rig.kill(server)
        rig.start(server)

        async def restore(checkpoint_id: str) -> list[str]:
            request = m.RestoreRequest(
                checkpoint_id=checkpoint_id,
                deadline_ts=now() + 20,
                checkpoint_dir=taken.uri,
                episode_ids=taken.publication.episodes,
                cell_attempt=1,
            )
            return (await rig.client(server).call("restore", request, m.RestoreReply)).restored

        first, other = await restore("first")
        retire = m.RetireRequest(checkpoint_id="first", deadline_ts=now() + 20, episode_ids=[first])
        await rig.client(server).call("retire", retire, m.RetireReply)
        await asyncio.sleep(200)
        assert await restore("second") == [other]
