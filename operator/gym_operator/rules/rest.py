"""Whether a stack is at rest: suspended or stopped, and nothing of it is there that would have to be looked after.

Such a stack costs nothing: whatever could happen to it is told by a watch.
"""

from __future__ import annotations

from collections.abc import Collection

from gym_operator.api.conditions import ConditionReason, ConditionType
from gym_operator.api.stack import StackStatus
from gym_operator.rules.cell_record import stopped_by
from gym_operator.rules.observed import Storage
from gym_servers.coordination.record import CellRecord, tried_again


def at_rest(*, suspended: bool, records: Collection[CellRecord | None], has_pods: bool, waiting: bool) -> bool:
    """`records` are those of the cells, None where a cell was never in service; `waiting`: somebody wants something
    of the stack, such as a checkpoint."""
    if has_pods or waiting:
        return False
    if suspended:
        return all(record is None or _is_put_down(record) for record in records)
    return bool(records) and all(stopped_by(record) is not None for record in records)


def _is_put_down(record: CellRecord) -> bool:
    """Whether nothing is left to do about a cell of a suspended stack."""
    return record.open is None and stopped_by(record) is None and tried_again(record, 0, suspended=True) is None


def was_at_rest(status: StackStatus, generation: int) -> bool:
    """Whether the status says of this generation of the spec that the stack is at rest."""
    return status.observed_generation == generation and status.phase in ("Suspended", "Stopped")


def storage_told(status: StackStatus, generation: int) -> Storage | None:
    """What the status says of the storage that this generation of the spec names; None unless it was proved."""
    for each in status.conditions:
        proved = each.type == ConditionType.STORAGE_READY and each.status == "True"
        if proved and each.observed_generation == generation:
            return Storage(True, ConditionReason.STORAGE_REACHABLE, each.message)
    return None
