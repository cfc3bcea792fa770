"""A fake bucket over directories: its writes fail as a test wants, before they landed or after.

One `Bucket` serves everybody of a cell; each process opens it through a `BucketView` of its own, and a dead process
reaches nothing any more. Files of rows go through `FaultyOutput` the same way.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from gym_rig.network import Alive
from gym_servers.participants.collection import Output, Rollout
from gym_servers.protocol.identity import Episode
from gym_servers.storage.directory import DirectoryStore
from gym_servers.storage.store import StorageError

T = TypeVar("T")


@dataclass(eq=False)
class WriteFault:
    """What happens to the next `writes` writes of keys that hold `key`.

    before   it does not land, and says so     after   it lands, and its answer is lost
    spoil    it lands with other bytes, and nobody is told
    """

    kind: Literal["before", "after", "spoil"]
    key: str = ""
    writes: int = 1


class Bucket:
    """`away`: until it is healed, nothing can be read or written. `on_write` sees what has landed."""

    def __init__(self) -> None:
        self.faults: list[WriteFault] = []
        self.away = False
        self.on_write: Callable[[str, bytes], None] = lambda key, data: None

    def heal(self) -> None:
        self.away = False
        self.faults.clear()

    def write(self, key: str, data: bytes, land: Callable[[bytes], None]) -> None:
        """Write as the faults have it. Raises StorageError."""
        self.read()
        met = next((fault for fault in self.faults if fault.key in key), None)
        if met is not None:
            met.writes -= 1
            if met.writes == 0:
                self.faults.remove(met)
        kind = met.kind if met is not None else None
        if kind == "before":
            raise StorageError(f"the bucket did not take {key}")
        landing = data[:-1] + bytes([data[-1] ^ 1]) if kind == "spoil" and data else data
        land(landing)
        self.on_write(key, landing)
        if kind == "after":
            raise StorageError(f"the bucket took {key}, but its answer was lost")

    def read(self) -> None:
        """Raises StorageError where the bucket is away."""
        if self.away:
            raise StorageError("the bucket does not answer")


class BucketView:
    """The bucket below `uri`, as one process sees it."""

    def __init__(self, bucket: Bucket, uri: str, alive: Alive) -> None:
        self._bucket, self._alive = bucket, alive
        self._store = DirectoryStore(Path(uri))

    @property
    def uri(self) -> str:
        return self._store.uri

    def create(self, key: str, data: bytes) -> None:
        self._living()
        self._bucket.write(f"{self.uri}/{key}", data, lambda landing: self._store.create(key, landing))

    def replace(self, key: str, data: bytes) -> None:
        self._living()
        self._bucket.write(f"{self.uri}/{key}", data, lambda landing: self._store.replace(key, landing))

    def get(self, key: str) -> bytes:
        self._living()
        self._bucket.read()
        return self._store.get(key)

    def fingerprint(self, key: str) -> tuple[int, str]:
        self._living()
        self._bucket.read()
        return self._store.fingerprint(key)

    def list(self, prefix: str) -> dict[str, int]:
        self._living()
        self._bucket.read()
        return self._store.list(prefix)

    def delete(self, key: str) -> None:
        self._living()
        self._bucket.read()
        self._store.delete(key)

    def _living(self) -> None:
        if self._alive.died.is_set():
            raise StorageError("whoever is dead reaches no storage")


class FaultyOutput:
    """The driver's rows, with the bucket's faults: their keys are `rows` and `failures`."""

    def __init__(self, output: Output, bucket: Bucket, alive: Alive) -> None:
        self._output, self._bucket, self._alive = output, bucket, alive

    async def done(self) -> set[str]:
        self._living()
        self._bucket.read()
        return await self._output.done()

    async def save(self, rollout: Rollout, episode: Episode, row: Mapping[str, Any]) -> None:
        await self._write("rows", lambda: self._output.save(rollout, episode, row))

    async def save_failure(self, rollout: Rollout, episode: Episode, failure: Mapping[str, Any]) -> None:
        await self._write("failures", lambda: self._output.save_failure(rollout, episode, failure))

    async def finish(self, complete: bool) -> None:
        self._living()
        self._bucket.read()
        await self._output.finish(complete)

    async def _write(self, key: str, write: Callable[[], Awaitable[None]]) -> None:
        self._living()
        landed = False

        def land(_: bytes) -> None:
            nonlocal landed
            landed = True

        try:
            self._bucket.write(key, b"row", land)
        finally:
            if landed:
                await write()

    def _living(self) -> None:
        if self._alive.died.is_set():
            raise StorageError("whoever is dead reaches no storage")
