"""Which rollouts are which cell's, where a stack has several: a map that is kept in the output.

The tasks are dealt into shares by their index. A share is the cell's that has claimed it, durably and before any of
its rollouts is sent, so that no two drivers work on one. A cell claims those shares whose number, modulo the number
of cells, is its own, and only when it has room for more: cells that join later find work. What was restored into a
cell it claims at once, whatever its number. Nothing that is claimed ever moves, unless its cell is taken away: once
no process of it is left, whoever's it is by the same rule claims it anew. A cell that is to go claims nothing else,
since the rule is by the number of those that are to stay.

    cells/<stack>/<share>/<n>     the n-th claim of a share; the highest stands
    cells/<stack>/<share>/ended   each of its rollouts has a row, or was given up
    cells/<stack>/merged          the result files are written

All of them are written once and never changed. Two drivers that both believe that a share is theirs, as when one was
told late that it is not, do no harm: the first row of a rollout stands.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Sequence
from typing import Final

from pydantic import BaseModel, ConfigDict

from gym_servers.participants.collection import Rollout
from gym_servers.protocol.digests import canonical
from gym_servers.stack.cells import Cells
from gym_servers.storage.store import ObjectConflict, ObjectStore

SHARES: Final = 64
"""As many as a stack may have cells."""
ENDED: Final = "ended"
MERGED: Final = "merged"


class Claim(BaseModel):
    """`attempt` is the lowest number its rollouts may run under: one that the cell before has not used."""

    model_config = ConfigDict(frozen=True)

    cell: int
    attempt: int = 0


def share_of(rollout: Rollout) -> int:
    return rollout.task_index % SHARES


class Shares:
    """Implements gym_servers.participants.collection.Assignment for the driver of one cell.

    `count` reads which cells there are now, `unused` gives an attempt number that a cell has not used, and never
    will. Both block.
    """

    def __init__(
        self,
        store: ObjectStore,
        stack_uid: str,
        rollouts: Sequence[Rollout],
        cell: int,
        count: Callable[[], Cells],
        unused: Callable[[int], int],
    ) -> None:
        self._store, self._prefix, self._cell = store, f"cells/{stack_uid}", cell
        self._count, self._unused = count, unused
        self._rollouts: dict[int, list[Rollout]] = {}
        for rollout in rollouts:
            self._rollouts.setdefault(share_of(rollout), []).append(rollout)
        self._claims: dict[int, list[Claim]] = {share: [] for share in self._rollouts}
        self._ended: set[int] = set()
        self._cells = Cells(1, 1)
        self.merged = False

    @property
    def shared(self) -> bool:
        return True

    @property
    def merges(self) -> bool:
        """Whether this driver writes the result files: the first cell's, which is always there."""
        return self._cell == 0

    @property
    def over(self) -> bool:
        """Whether every share has ended."""
        return self._ended >= set(self._rollouts)

    def holds(self, rollout: Rollout) -> bool:
        claim = self._claim(share_of(rollout))
        return claim is not None and claim.cell == self._cell

    def expects(self, rollout: Rollout) -> bool:
        share, claim = share_of(rollout), self._claim(share_of(rollout))
        # Where nothing is left to do, those that stay count it all: they may be asked when the others are gone.
        there = self._cells.wanted if self.over else self._cells.present
        return claim.cell == self._cell if claim is not None and claim.cell < there else self._is_ours(share)

    def lowest(self, rollout: Rollout) -> int:
        claim = self._claim(share_of(rollout))
        return claim.attempt if claim is not None else 0

    def lost(self, rollout: Rollout) -> bool:
        claim = self._claim(share_of(rollout))
        return claim is not None and claim.cell != self._cell

    async def take(self, rollouts: Collection[Rollout]) -> None:
        await asyncio.to_thread(self._take, {share_of(rollout) for rollout in rollouts})

    async def leaves(self) -> bool:
        self._cells = await asyncio.to_thread(self._count)
        return self._cell >= self._cells.wanted

    async def look(self) -> None:
        await asyncio.to_thread(self._look)

    async def claim(self) -> tuple[Sequence[Rollout], bool]:
        return await asyncio.to_thread(self._next)

    async def end(self, ended: Collection[str]) -> None:
        await asyncio.to_thread(self._end, ended)

    async def set_merged(self) -> None:
        await asyncio.to_thread(self._store.create, f"{self._prefix}/{MERGED}", b"{}")
        self.merged = True

    # ---- blocking -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._cells = self._count()
        for key in sorted(self._store.list(self._prefix)):
            parts = key.removeprefix(f"{self._prefix}/").split("/")
            if parts == [MERGED]:
                self.merged = True
            elif len(parts) == 2 and parts[0].isdecimal() and int(parts[0]) in self._claims:
                share = int(parts[0])
                if parts[1] == ENDED:
                    self._ended.add(share)
                elif parts[1].isdecimal():
                    self._learn(share, int(parts[1]))

    def _learn(self, share: int, number: int) -> None:
        """Read the claims of a share up to a number."""
        known = self._claims[share]
        while len(known) <= number:
            known.append(Claim.model_validate(json.loads(self._store.get(self._key(share, len(known))))))

    def _next(self) -> tuple[Sequence[Rollout], bool]:
        self._cells = self._count()
        for share in sorted(self._claims):
            while self._claimable(share):
                before, number = self._claim(share), len(self._claims[share])
                self._put(share, 0 if before is None else max(before.attempt, self._unused(before.cell)))
                if self._holds(share):
                    return self._rollouts[share], number > 0
        return (), False

    def _take(self, shares: Collection[int]) -> None:
        for share in sorted(shares):
            if self._claim(share) is None:
                self._put(share, 0)

    def _put(self, share: int, attempt: int) -> None:
        """Claim a share, unless somebody is faster."""
        claim, number = Claim(cell=self._cell, attempt=attempt), len(self._claims[share])
        try:
            self._store.create(self._key(share, number), canonical(claim.model_dump()))
        except ObjectConflict:
            self._learn(share, number)  # somebody else's; or our own, whose answer was lost
        else:
            self._claims[share].append(claim)

    def _end(self, ended: Collection[str]) -> None:
        for share, rollouts in self._rollouts.items():
            mine = share not in self._ended and self._holds(share)
            if mine and all(rollout.id in ended for rollout in rollouts):
                self._store.create(f"{self._prefix}/{share}/{ENDED}", b"{}")
                self._ended.add(share)

    # ---- the map ------------------------------------------------------------------------------------------

    def _claim(self, share: int) -> Claim | None:
        claims = self._claims.get(share)
        return claims[-1] if claims else None

    def _holds(self, share: int) -> bool:
        claim = self._claim(share)
        return claim is not None and claim.cell == self._cell

    def _is_ours(self, share: int) -> bool:
        """Whether it is this cell's by the rule, were it nobody's."""
        return share % self._cells.wanted == self._cell

    def _claimable(self, share: int) -> bool:
        """Whether it is this cell's by the rule, and nobody's who is there."""
        claim = self._claim(share)
        vacant = claim is None or claim.cell >= self._cells.present
        return vacant and share not in self._ended and self._is_ours(share)

    def _key(self, share: int, number: int) -> str:
        return f"{self._prefix}/{share}/{number}"
