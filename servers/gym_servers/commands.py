"""`gym-servers`: serve one process, run a stack locally, and the parts a demonstration needs."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from gym_servers.loading import loading
from gym_servers.local.children import Told, end_with_parent, until_told
from gym_servers.log_level import log_as_told
from gym_servers.stack.settings import SettingsError, load_settings
from gym_servers.stack.spec import SpecError
from gym_servers.storage.store import StorageError

T = TypeVar("T")

ERRORS = (SettingsError, SpecError, StorageError)  # what a user can mend: told in one line
_FORMAT = "%(levelname)s %(name)s: %(message)s"

cli = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@cli.command()
def serve(
    settings: Annotated[Path, typer.Option(help="Settings file, JSON or YAML.")],
    cell: Annotated[int | None, typer.Option(envvar="GYM_CELL", help="Number of this process's cell.")] = None,
) -> None:
    """Run one server process until it is told to end."""
    with loading():
        from gym_servers.serve import prepare, run

        listeners, server = prepare(load_settings(settings, cell))
    asyncio.run(run(listeners, server))


@cli.command()
def engine(
    host: str = "127.0.0.1",
    port: int = 8000,
    tokens_per_second: Annotated[float, typer.Option(min=1, help="Rate of each generation.")] = 200.0,
    journal: Annotated[str | None, typer.Option(help="Journal of generated tokens: a URL or a file.")] = None,
) -> None:
    """Run the scripted inference engine."""
    from gym_servers.engine.app import create_app
    from gym_servers.journal.client import open_journal
    from gym_servers.serve import listener, run

    asyncio.run(run([listener(create_app(tokens_per_second, open_journal(journal)), host, port)]))


@cli.command()
def journal(
    file: Annotated[Path, typer.Option(help="Where entries are kept, one JSON object a line.")],
    host: str = "127.0.0.1",
    port: int = 8000,
) -> None:
    """Run a journal server."""
    from gym_servers.journal.server import create_app
    from gym_servers.serve import listener, run

    asyncio.run(run([listener(create_app(file), host, port)]))


@cli.command()
def rows(
    count: Annotated[int, typer.Option(min=1)] = 64,
    seed: Annotated[int, typer.Option(help="The same seed gives the same rows.")] = 1,
) -> None:
    """Print counter rows as JSONL."""
    from gym_servers.engine.rows import counter_rows

    for row in counter_rows(count, seed):
        print(json.dumps(row))


@cli.command()
def up(
    stack: Annotated[Path, typer.Argument(help="A GymStack manifest.")],
    folder: Annotated[Path, typer.Option(help="Keeps settings, logs and the cell's record.")] = Path("gym-local"),
    every: Annotated[str | None, typer.Option(help="Take a checkpoint each so often, such as 30s or 2m.")] = None,
) -> None:
    """Run a stack as local processes until its collection has ended."""
    from gym_servers.local.folder import alone
    from gym_servers.local.runner import up as run
    from gym_servers.local.stack import local_stack, read_manifest
    from gym_servers.stack.durations import parse_duration

    manifest = read_manifest(stack)
    try:
        interval = parse_duration(every) if every else None
    except ValueError as error:
        raise SettingsError(f"--every {every}: {error}") from error
    with alone(folder):
        complete = _until_told(run(local_stack(manifest, folder), folder, _announce, interval), folder)
    if not complete:
        raise typer.Exit(1)


@cli.command()
def demo(
    folder: Annotated[Path | None, typer.Option(help="Where the run is kept; a temporary folder otherwise.")] = None,
    rollouts: Annotated[int, typer.Option(min=1)] = 16,
    kill: Annotated[
        str, typer.Option(help="Server to kill: env, policy, agent, counter, collection or all.")
    ] = "agent",
    kills: Annotated[int, typer.Option(min=1, help="How many times.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the generated rows.")] = 1,
    tasks: Annotated[Path | None, typer.Option(help="JSONL rows of the counter environment.")] = None,
) -> None:
    """Show the whole loop on this machine: checkpoint, SIGKILL, continuation. Prints the report as JSON."""
    import tempfile

    from gym_servers.local.demo import DemoFailed, DemoOptions
    from gym_servers.local.demo import demo as run
    from gym_servers.local.folder import alone

    where = folder or Path(tempfile.mkdtemp(prefix="gym-demo-"))
    options = DemoOptions(rollouts=rollouts, kill=kill, kills=kills, tasks=tasks, seed=seed)
    try:
        with alone(where):
            report = _until_told(run(where, options, _announce), where, DemoFailed)
    except DemoFailed as error:
        print(f"gym-servers: {error}; logs are in {where}", file=sys.stderr)
        raise typer.Exit(1) from error
    print(json.dumps(report, indent=2))
    if not report["ok"]:
        raise typer.Exit(1)


def _until_told(work: Coroutine[Any, Any, T], folder: Path, *expected: type[Exception]) -> T:
    """Do a runner's work in `folder`. The screen is for what people can act on: what is logged, and the trace of an
    error that is none of the `expected` ones, goes to a file beside the servers' logs."""
    log = folder / "runner.log"
    log_as_told(_FORMAT, file=log)
    logging.raiseExceptions = False  # a full disk is told by those who need it
    try:
        return asyncio.run(until_told(work))
    except Told as told:
        raise typer.Exit(128 + told.number) from None
    except Exception as error:
        if isinstance(error, (*ERRORS, *expected)):
            raise
        logging.getLogger("gym_servers").exception("the runner failed")
        print(f"gym-servers: a fault of ours ({type(error).__name__}) ended the run; see {log}", file=sys.stderr)
        raise typer.Exit(1) from None


def _announce(level: str, reason: str, message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {level:7} {reason}: {message}", file=sys.stderr, flush=True)


def main() -> None:
    """Errors that a user can mend are one line, without a trace."""
    end_with_parent()
    try:
        log_as_told(_FORMAT)
        cli()
    except ERRORS as error:
        print(f"gym-servers: {error}", file=sys.stderr)
        sys.exit(2)
