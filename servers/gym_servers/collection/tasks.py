"""Tasks: rows of a JSONL file, each repeated into rollouts."""

from __future__ import annotations

from typing import Any

from gym_servers.participants.collection import Rollout, TasksError
from gym_servers.protocol.strict_json import read_json
from gym_servers.stack.settings import S3Settings
from gym_servers.storage.locate import open_store


def load_tasks(uri: str, s3: S3Settings | None) -> list[dict[str, Any]]:
    """The rows at `uri`, an `s3://` object or a file. Blocks. Raises TasksError, StorageError."""
    folder, _, name = uri.rpartition("/")
    return parse_tasks(open_store(folder or ".", s3).get(name), uri)


def parse_tasks(data: bytes, source: str) -> list[dict[str, Any]]:
    """Rows of a JSONL text; blank lines are skipped. Raises TasksError with the first wrong line's number."""
    rows = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = read_json(line)
        except ValueError as error:
            raise TasksError(f"{source} line {number} is not JSON: {error}") from error
        if not isinstance(row, dict) or not isinstance(row.get("responses_create_params"), dict):
            raise TasksError(f"{source} line {number} has no object `responses_create_params`")
        rows.append(row)
    if not rows:
        raise TasksError(f"{source} has no rows")
    return rows


def rollouts(rows: list[dict[str, Any]], repeats: int) -> list[Rollout]:
    """Every row `repeats` times, as rollouts `<task>-<repeat>`."""
    return [
        Rollout(f"{task}-{repeat}", row, task, repeat) for task, row in enumerate(rows) for repeat in range(repeats)
    ]
