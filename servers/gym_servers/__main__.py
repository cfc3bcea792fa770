"""`gym-servers`: serve one process, run a stack locally, and the parts a demonstration needs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gym_servers.stack.settings import SettingsError, load_settings

cli = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@cli.command()
def serve(
    settings: Annotated[Path, typer.Option(help="Settings file, JSON or YAML.")],
    cell: Annotated[int | None, typer.Option(envvar="GYM_CELL", help="Number of this process's cell.")] = None,
) -> None:
    """Run one server process until it is told to end."""
    from gym_servers.serve import serve as run

    run(load_settings(settings, cell))


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


def main() -> None:
    """Entry point: errors that a user can mend are one line, without a trace."""
    logging.basicConfig(level=os.environ.get("GYM_LOG_LEVEL", "INFO"), format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        cli()
    except SettingsError as error:
        print(f"gym-servers: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
