"""The result files of a collection, in a directory or a bucket.

    rollouts.jsonl                       a row per rollout that ended, whichever attempt ended it
    rollouts_materialized_inputs.jsonl   a row per rollout that is to be collected
    rollouts_failures.jsonl              a row per failed attempt
    rollouts_aggregate_metrics.json      written at the end

Row identity is the rollout: a create-only object in a bucket (`rows/<rollout>.json`, merged into the files at the
end), an index over the file in a directory, where each row is synced as it ends.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from gym_servers.participants.collection import Rollout
from gym_servers.protocol.identity import Episode
from gym_servers.resources.metrics import aggregate
from gym_servers.storage.store import ObjectConflict, ObjectStore, StorageError

T = TypeVar("T")

ROWS = "rollouts.jsonl"
INPUTS = "rollouts_materialized_inputs.jsonl"
FAILURES = "rollouts_failures.jsonl"
METRICS = "rollouts_aggregate_metrics.json"


def identity(rollout: Rollout, attempt: int | None = None) -> dict[str, Any]:
    """The `_ng_*` fields that name a row's rollout."""
    fields: dict[str, Any] = {
        "_ng_rollout_id": rollout.id,
        "_ng_task_index": rollout.task_index,
        "_ng_rollout_index": rollout.repeat,
    }
    return fields if attempt is None else {**fields, "_ng_attempt_index": attempt}


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _row(data: bytes, where: str) -> dict[str, Any]:
    """A row as it was written. Raises StorageError for what is none: it is neither passed over nor replaced."""
    try:
        row = json.loads(data)
    except ValueError:
        row = None
    if not isinstance(row, dict) or not isinstance(row.get("_ng_rollout_id"), str):
        raise StorageError(f"{where} is no row of a collection: repair it, or move it away")
    return row


def _metrics(rows: Sequence[Mapping[str, Any]], expected: int, complete: bool) -> bytes:
    return json.dumps({**aggregate(rows), "expected": expected, "complete": complete}, indent=2).encode()


class DirectoryOutput:
    """Files in a directory; one process writes them at a time."""

    def __init__(self, directory: Path, rollouts: Sequence[Rollout]) -> None:
        self._directory, self._rollouts = directory, rollouts
        self._kept: dict[str, Mapping[str, Any]] = {}
        self._appending = threading.Lock()

    async def done(self) -> set[str]:
        return await self._usable(self._load)

    async def save(self, rollout: Rollout, episode: Episode, row: Mapping[str, Any]) -> None:
        if rollout.id not in self._kept:
            full = {**row, **identity(rollout, episode.attempt)}
            await self._usable(partial(self._append, ROWS, full))
            self._kept[rollout.id] = full  # only now: a row that could not be written is written again

    async def save_failure(self, rollout: Rollout, episode: Episode, failure: Mapping[str, Any]) -> None:
        await self._usable(partial(self._append, FAILURES, {**failure, **identity(rollout, episode.attempt)}))

    async def finish(self, complete: bool) -> None:
        text = _metrics(list(self._kept.values()), len(self._rollouts), complete)
        await self._usable(partial((self._directory / METRICS).write_bytes, text))

    async def _usable(self, work: Callable[[], T]) -> T:
        """Do blocking work. Raises StorageError where the directory cannot be used now."""
        try:
            return await asyncio.to_thread(work)
        except OSError as error:
            raise StorageError(
                f"cannot use {self._directory}: {error.strerror}; check its permissions and free space"
            ) from error

    def _load(self) -> set[str]:
        self._directory.mkdir(parents=True, exist_ok=True)
        inputs = ({**rollout.row, **identity(rollout)} for rollout in self._rollouts)
        (self._directory / INPUTS).write_bytes(_lines(inputs))
        path = self._directory / ROWS
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) != len(data):  # the last row was cut short by a crash: it was never acknowledged
            with path.open("r+b") as file:
                file.truncate(len(whole))
        rows = (_row(line, f"{path} line {number}") for number, line in enumerate(whole.splitlines(), 1))
        self._kept = {row["_ng_rollout_id"]: row for row in rows}
        return set(self._kept)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        line = _lines([row])
        with self._appending, (self._directory / name).open("ab", buffering=0) as file:
            start = file.tell()
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                file.truncate(start)  # half a row would spoil the next one
                raise


class BucketOutput:
    """Objects in a bucket. Safe with a second writer: the first row of a rollout stands."""

    def __init__(self, store: ObjectStore, rollouts: Sequence[Rollout]) -> None:
        self._store, self._rollouts = store, rollouts

    async def done(self) -> set[str]:
        return await asyncio.to_thread(self._load)

    async def save(self, rollout: Rollout, episode: Episode, row: Mapping[str, Any]) -> None:
        data = json.dumps({**row, **identity(rollout, episode.attempt)}).encode()
        with suppress(ObjectConflict):  # an earlier attempt's row was durable before its cell died: it stands
            await asyncio.to_thread(self._store.create, f"rows/{rollout.id}.json", data)

    async def save_failure(self, rollout: Rollout, episode: Episode, failure: Mapping[str, Any]) -> None:
        data = json.dumps({**failure, **identity(rollout, episode.attempt)}).encode()
        with suppress(ObjectConflict):  # the same attempt's failure, kept before
            await asyncio.to_thread(self._store.create, f"failures/{episode.key}.json", data)

    async def finish(self, complete: bool) -> None:
        await asyncio.to_thread(self._merge, complete)

    def _load(self) -> set[str]:
        inputs = ({**rollout.row, **identity(rollout)} for rollout in self._rollouts)
        self._store.replace(INPUTS, _lines(inputs))
        return {key.removeprefix("rows/").removesuffix(".json") for key in self._store.list("rows")}

    def _merge(self, complete: bool) -> None:
        rows = self._all("rows")
        self._store.replace(ROWS, _lines(rows))
        self._store.replace(FAILURES, _lines(self._all("failures")))
        self._store.replace(METRICS, _metrics(rows, len(self._rollouts), complete))

    def _all(self, prefix: str) -> list[Mapping[str, Any]]:
        keys = sorted(self._store.list(prefix))
        with ThreadPoolExecutor(16) as pool:
            found = pool.map(self._store.get, keys)
            return [_row(data, f"{self._store.uri}/{key}") for key, data in zip(keys, found, strict=True)]
