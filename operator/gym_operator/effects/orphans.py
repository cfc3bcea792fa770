"""Ends GymCheckpoints that were being taken when their stack went. What storage says stands: a publication may have
landed, and else a tombstone lands before anything is final."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from gym_operator.api.checkpoint import TERMINAL
from gym_operator.effects import checkpoint_part as parts
from gym_operator.effects.accesses import Accesses
from gym_operator.effects.checkpoint_part import Part
from gym_operator.effects.kube import Kube
from gym_operator.effects.status_writers import CheckpointWriter
from gym_operator.effects.storage import StackStorage
from gym_operator.rules import checkpoint_phases as phases
from gym_servers.coordination.checkpoint import CheckpointFailed
from gym_servers.stack.spec import StorageSpec

PATIENCE_SECONDS: Final = 60.0
"""How long a storage that does not answer is waited for: with a namespace, its credentials may be gone for good."""


class Orphans:
    """`end` is called again and again for each until it is final."""

    def __init__(
        self, kube: Kube, wall: Callable[[], float], monotonic: Callable[[], float], accesses: Accesses
    ) -> None:
        self._kube, self._wall, self._monotonic, self._accesses = kube, wall, monotonic, accesses
        self._since: dict[str, float] = {}

    async def end(self, writer: CheckpointWriter, reason: str, message: str) -> bool:
        """Whether it is final now. Raises Gone, Superseded, KubeError."""
        storage = await self._storage(writer)
        among = [part.index for part in writer.status.cells]
        settled = True
        for index in among:
            found = phases.part_of(writer.status, index)
            if storage is None or found.phase in TERMINAL or found.uri is None:
                continue
            id = writer.status.checkpoint_id or phases.checkpoint_id(writer.name, writer.uid)
            part = Part(writer, index, among, id, self._wall)
            match await parts.resolve(part, storage.open, CheckpointFailed(reason, message)):
                case parts.Published(publication, uri, digest, pause):
                    ended = partial(
                        phases.part_succeeded,
                        which=part.which,
                        publication=publication,
                        uri=uri,
                        digest=digest,
                        pause_seconds=pause,
                        at=part.at,
                    )
                    await writer.write(ended)
                case parts.Failed(why, said, _):
                    await writer.write(
                        partial(phases.part_failed, which=part.which, reason=why, message=said, at=part.at)
                    )
                case _:
                    settled = False
        since = self._since.setdefault(writer.uid, self._monotonic())
        if not settled and self._monotonic() - since < PATIENCE_SECONDS:
            return False
        self._since.pop(writer.uid, None)
        if writer.status.phase not in TERMINAL:
            at = phases.At(writer.generation, self._wall())
            await writer.write(partial(phases.failed, reason=reason, message=message, at=at))
        return True

    async def _storage(self, writer: CheckpointWriter) -> StackStorage | None:
        """As the checkpoint's status says that it is reached; None where it does not say so in a form we read."""
        storage = StackStorage(self._kube, writer.namespace, accesses=self._accesses)
        try:
            await storage.read(StorageSpec.model_validate(writer.status.storage or {}, by_alias=True, by_name=False))
        except ValueError:
            return None
        return storage
