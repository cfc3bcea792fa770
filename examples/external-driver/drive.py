"""A driver outside of the stack: sends every task to its cell, writes a row for each, and lives through recoveries.

    python drive.py --environment http://driven-env-0:8000 tasks.jsonl rows.jsonl       on Kubernetes, one per cell
    python drive.py --addresses gym-local/addresses.json tasks.jsonl rows.jsonl         beside `gym-servers up`

It may be ended and started again at any time: what has its row is not sent, what still runs is joined.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from gym_servers.client import RolloutClient

TRIES = 3  # of a rollout that ends in a failure


def task_of(row: dict[str, Any]) -> dict[str, Any]:
    """The environment's task: the model's parameters, and everything else as the verifier's data."""
    data = {name: value for name, value in row.items() if name != "responses_create_params"}
    return {"task_input": {"responses_create_params": row["responses_create_params"], "task_data": data}}


async def collect(client: RolloutClient, rollout: str, row: dict[str, Any], output: TextIO) -> int | None:
    """One rollout to its row; the cell that it came from, None where it got none."""
    done = None
    for _ in range(TRIES):
        answer = await client.run(rollout, task_of(row), done=done)
        if answer.result is not None:
            named = {**answer.result, "_ng_rollout_id": rollout, "_ng_attempt_index": answer.attempt}
            output.write(json.dumps(named) + "\n")
            output.flush()
            return answer.cell
        print(f"{rollout} failed under attempt {answer.attempt}: {answer.failure}", file=sys.stderr)
        done = answer.attempt
    return None


def left_to_do(tasks: Path, rows: Path) -> dict[str, dict[str, Any]]:
    """Every task by its rollout's id, without those that have a row."""
    todo = {f"{number}-0": json.loads(line) for number, line in enumerate(tasks.read_text().splitlines())}
    for line in rows.read_text().splitlines() if rows.exists() else ():
        todo.pop(json.loads(line)["_ng_rollout_id"], None)
    return todo


async def drive(
    environments: list[str], todo: Mapping[str, dict[str, Any]], output: TextIO, concurrency: int
) -> bool:
    """Every task to its row; whether all got one."""
    limit = asyncio.Semaphore(concurrency)
    async with RolloutClient(environments) as client:

        async def one(rollout: str, row: dict[str, Any]) -> int | None:
            async with limit:
                return await collect(client, rollout, row, output)

        cells = await asyncio.gather(*(one(rollout, row) for rollout, row in todo.items()))
        for cell in set(cells) - {None}:
            await client.forget((rollout for rollout, at in zip(todo, cells, strict=True) if at == cell), cell=cell)
        return None not in cells


def main(
    tasks: Annotated[Path, typer.Argument(help="Rows to run, one JSON object a line.")],
    rows: Annotated[Path, typer.Argument(help="Where finished rows go.")],
    environment: Annotated[
        list[str] | None, typer.Option(help="Address of a cell's environment; once for each cell, in their order.")
    ] = None,
    addresses: Annotated[Path | None, typer.Option(help="addresses.json of a local stack, instead.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Rollouts under way at the same time.")] = 16,
) -> None:
    """Drive a stack from outside."""
    environments = list(environment or ())
    if addresses is not None:
        environments = [json.loads(addresses.read_text())["env"]]
    if not environments:
        raise typer.BadParameter("give --environment for each cell, or --addresses")
    todo = left_to_do(tasks, rows)
    with rows.open("a") as output:
        complete = asyncio.run(drive(environments, todo, output, concurrency))
    if not complete:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
