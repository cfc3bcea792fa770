"""The coordinator's verbs on a participant alone: its gate is moved as the control plane would move it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gym_servers.participants.base import Participant, Scope, plan_restore
from gym_servers.protocol.phases import Input, Phase, moved


def prepare(participant: Participant, checkpoint_id: str = "cp", restarts: frozenset[str] = frozenset()) -> bool:
    """Close admission; whether it is ready already."""
    gate = participant.gate
    gate.move(moved(gate.control, Input.PREPARE, checkpoint_id))
    participant.closing(restarts)
    return ready(participant)


def ready(participant: Participant) -> bool:
    if participant.gate.phase is Phase.PREPARING and participant.survey().ready:
        participant.gate.move(moved(participant.gate.control, Input.READY))
    return participant.gate.phase is Phase.PREPARED


async def commit(participant: Participant, *keys: str) -> dict[str, bytes]:
    """The frozen records of these episodes; of all where none is named."""
    records = await participant.export(Scope(frozenset(keys) if keys else None))
    participant.gate.move(moved(participant.gate.control, Input.COMMIT))
    return records


def resume(participant: Participant, checkpoint_id: str = "cp") -> None:
    gate = participant.gate
    gate.move(moved(gate.control, Input.RESUME, checkpoint_id))
    participant.resumed()


async def checkpoint(participant: Participant, *keys: str) -> dict[str, bytes]:
    """All of one checkpoint of a participant that is ready."""
    assert prepare(participant), participant.survey()
    records = await commit(participant, *keys)
    resume(participant)
    return records


def restore(
    participant: Participant,
    records: Mapping[str, bytes],
    *keys: str,
    cell_attempt: int = 1,
    attempts: Mapping[str, int] | None = None,
) -> list[str]:
    """Install records in a fresh participant; `resume` puts it into service."""
    gate = participant.gate
    plan = plan_restore(keys, cell_attempt, attempts or {})
    staged: Any = participant.read(records, plan)
    gate.fence.raise_floor(cell_attempt)
    gate.fence.restore(plan.marks())
    restored = participant.install(staged)
    gate.move(moved(gate.control, Input.RESTORE, "restore"))
    return restored


async def restore_built(
    participant: Participant, records: Mapping[str, bytes], *keys: str, cell_attempt: int = 1
) -> list[str]:
    """`restore` for a participant whose records describe what has to be built first."""
    gate = participant.gate
    plan = plan_restore(keys, cell_attempt, {})
    staged: Any = await participant.build(participant.read(records, plan))
    gate.fence.raise_floor(cell_attempt)
    gate.fence.restore(plan.marks())
    restored = participant.install(staged)
    gate.move(moved(gate.control, Input.RESTORE, "restore"))
    return restored


def start(participant: Participant, cell_attempt: int = 0) -> None:
    """Put a fresh participant into service without a restore."""
    participant.gate.fence.raise_floor(cell_attempt)
    resume(participant, "start")
