"""What random faults have found (`make faults`), each as short as it can be said."""

from __future__ import annotations

from pathlib import Path

from gym_rig.cell import cell
from gym_rig.virtual import now
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
