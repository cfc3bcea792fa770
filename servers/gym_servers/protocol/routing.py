"""Which cell a rollout runs in: the same for whoever asks, by its id and the number of cells alone.

Episodes never cross cells, so every attempt of a rollout goes where its first one went.
"""

from __future__ import annotations

from gym_servers.protocol.digests import sha256


def cell_of(rollout_id: str, cells: int) -> int:
    """The number of a rollout's cell. With one cell more, only rollouts that the new cell gets are elsewhere than
    before; with one less, only those it had. Raises ValueError for less than one cell."""
    return max(range(cells), key=lambda cell: sha256(f"{cell}/{rollout_id}".encode()))
