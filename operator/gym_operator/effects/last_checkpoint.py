"""Takes the checkpoint that stops a cell before its pods go: no GymCheckpoint asked for it."""

from __future__ import annotations

import secrets
from typing import Final

from gym_operator.effects.checkpoints import Checkpoints
from gym_operator.effects.kube import KubeError
from gym_operator.effects.status_writers import Gone, Superseded
from gym_operator.rules.unasked import PREFIXES
from gym_servers.coordination.checkpoint import CheckpointFailed, Progress
from gym_servers.coordination.controller import CellController
from gym_servers.storage.store import StorageError

FAILURES: Final = (CheckpointFailed, StorageError, KubeError, Superseded, Gone)
"""Why there is none."""


async def take_last(
    controller: CellController, checkpoints: Checkpoints, index: int, name: str, replacing: str = ""
) -> None:
    """Of cell `index`; `name` is one of `PREFIXES`. `replacing` is why its pods are to be replaced, where they are.
    Raises what is in `FAILURES`."""

    async def tell(progress: Progress) -> None:
        pass

    id = f"{PREFIXES[name]}{controller.record.attempt}-{secrets.token_hex(4)}"
    outcome = await controller.take(id, name, tell, stop=True, replacing=replacing)
    checkpoints.published(index, name, outcome)
