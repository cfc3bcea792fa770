"""`gym-operator`: runs the operator."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from gym_servers.log_level import log_as_told
from gym_servers.stack.settings import SettingsError

cli = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)


@cli.callback()
def commands() -> None:
    """Keeps stacks of Gym servers running and their rollouts alive."""


@cli.command()
def run(
    namespace: Annotated[
        list[str] | None, typer.Option(help="Namespace to work in; can be given several times. All, if not given.")
    ] = None,
    health_port: Annotated[int, typer.Option(min=1, max=65535, help="Where /healthz is served.")] = 8080,
    kubeconfig: Annotated[
        Path | None, typer.Option(help="Kubeconfig of the cluster. Inside a cluster its own is used.")
    ] = None,
    operator_namespace: Annotated[
        str,
        typer.Option(
            envvar="GYM_OPERATOR_NAMESPACE",
            help="Namespace the operator's pod is in: stacks let control traffic in from there only.",
        ),
    ] = "gym-system",
) -> None:
    """Run the operator until it is told to end."""
    from gym_operator.handlers.running import run as operate

    operate(namespace or [], health_port, str(kubeconfig) if kubeconfig else None, operator_namespace)


def main() -> None:
    """Errors that a user can mend are one line, without a trace."""
    from gym_operator.effects.kube import KubeConfigError
    from gym_operator.handlers.running import StartError

    # In a thread of its own it warns each time that signals are not its matter.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    try:
        log_as_told("%(asctime)s %(levelname)s %(name)s: %(message)s")
        cli()
    except (StartError, KubeConfigError, SettingsError) as error:
        print(f"gym-operator: {error}", file=sys.stderr)
        sys.exit(2)
