"""The command line: which verbs there are, and what they are told. Verbs are loaded when they are called."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from gym_operator.plugin.run import in_cluster, with_sources
from gym_operator.plugin.screen import Output

cli = typer.Typer(
    name="kubectl gym",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class AddressingStyle(StrEnum):
    """Whether a bucket's name is part of the path or of the host name."""

    AUTO = "auto"
    PATH = "path"
    VIRTUAL = "virtual"


Stack = Annotated[str, typer.Argument(metavar="STACK", help="Name of the GymStack.")]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace; that of the context, if not given.")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; its current one, if not given.")]
Kubeconfig = Annotated[
    Path | None, typer.Option(envvar="KUBECONFIG", help="Kubeconfig; ~/.kube/config, if not given.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Wait until it is done, and say on stderr how far it is.")]
Timeout = Annotated[str, typer.Option(help="How long to wait, such as 90s or 10m.")]
Wanted = Annotated[
    str, typer.Argument(metavar="URI|NAME", help="Folder of a checkpoint in storage, or name of a GymCheckpoint.")
]
Digest = Annotated[str | None, typer.Option(help="For a URI: SHA-256 that its checkpoint.json must have.")]
Endpoint = Annotated[
    str | None,
    typer.Option(envvar=["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"], help="For a URI: S3 server that is not AWS."),
]
Region = Annotated[
    str | None, typer.Option(envvar=["AWS_REGION", "AWS_DEFAULT_REGION"], help="For a URI: region of the bucket.")
]
Addressing = Annotated[
    AddressingStyle, typer.Option("--addressing-style", help="For a URI: where the bucket's name goes.")
]
Show = Annotated[Output, typer.Option("--output", "-o", help="How it is printed.")]


@cli.callback()
def commands() -> None:
    """Looks at stacks of Gym servers and their checkpoints, and asks for checkpoints and restores."""


@cli.command()
def status(
    stack: Stack,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show it again whenever it changes.")] = False,
    output: Show = Output.TABLE,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show a stack: its cells, their attempts, what they would continue from, and what holds checkpoints up."""
    from gym_operator.plugin.verbs.status import status as verb

    in_cluster(
        kubeconfig, context, namespace, lambda cluster, screen: verb(cluster, screen, stack, output, watch=watch)
    )


@cli.command()
def checkpoint(
    stack: Stack,
    name: Annotated[str | None, typer.Option(help="Name of the GymCheckpoint; stack and time, if not given.")] = None,
    label: Annotated[list[str] | None, typer.Option(help="Kept with it, such as step=120; more than once.")] = None,
    stop_after: Annotated[bool, typer.Option("--stop-after", help="Stop the stack once it is published.")] = False,
    wait: Wait = False,
    timeout: Timeout = "10m",
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Take a checkpoint of a stack."""
    from gym_operator.plugin.verbs.checkpoint import checkpoint as verb
    from gym_operator.plugin.views.requests import seconds_of

    seconds = seconds_of("--timeout", timeout)
    in_cluster(
        *(kubeconfig, context, namespace),
        lambda cluster, screen: verb(
            *(cluster, screen, stack),
            name=name,
            labels=label or [],
            stop_after=stop_after,
            wait=seconds if wait else None,
        ),
    )


@cli.command()
def checkpoints(
    stack: Stack,
    output: Show = Output.TABLE,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """List the checkpoints of a stack, the newest last."""
    from gym_operator.plugin.verbs.checkpoints import checkpoints as verb

    in_cluster(kubeconfig, context, namespace, lambda cluster, screen: verb(cluster, screen, stack, output))


@cli.command()
def restore(
    stack: Stack,
    wanted: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="CHECKPOINT|LABELS|URI",
            help="Name of a GymCheckpoint, labels such as step=120, or the URI of a checkpoint's folder.",
        ),
    ],
    digest: Annotated[str | None, typer.Option(help="For a URI: SHA-256 of its checkpoint.json.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the GymRestore; stack and time, if not given.")] = None,
    wait: Wait = False,
    timeout: Timeout = "10m",
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Bring a stack to a checkpoint. All its servers are replaced, and what it did since is done again."""
    from gym_operator.plugin.verbs.restore import restore as verb
    from gym_operator.plugin.views.requests import seconds_of

    seconds = seconds_of("--timeout", timeout)
    in_cluster(
        *(kubeconfig, context, namespace),
        lambda cluster, screen: verb(
            *(cluster, screen, stack, wanted), digest=digest, name=name, wait=seconds if wait else None
        ),
    )


@cli.command()
def inspect(
    wanted: Wanted,
    output: Show = Output.TABLE,
    digest: Digest = None,
    endpoint: Endpoint = None,
    region: Region = None,
    addressing_style: Addressing = AddressingStyle.AUTO,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show what is inside of a checkpoint: episodes, stages, sizes, and what starts over."""
    from gym_operator.plugin.verbs.inspect import inspect as verb

    bucket = (endpoint, region, addressing_style.value)
    with_sources(
        *(kubeconfig, context, namespace, wanted, digest, bucket),
        lambda screen, sources: verb(screen, wanted, sources, output, time.time),
    )


@cli.command()
def verify(
    wanted: Wanted,
    output: Show = Output.TABLE,
    digest: Digest = None,
    endpoint: Endpoint = None,
    region: Region = None,
    addressing_style: Addressing = AddressingStyle.AUTO,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Read a checkpoint again, all of it, and check every digest."""
    from gym_operator.plugin.verbs.verify import verify as verb

    bucket = (endpoint, region, addressing_style.value)
    with_sources(
        *(kubeconfig, context, namespace, wanted, digest, bucket),
        lambda screen, sources: verb(screen, wanted, sources, output),
    )


@cli.command()
def logs(
    stack: Stack,
    server: Annotated[str | None, typer.Option("--server", "-s", help="Of this server only.")] = None,
    cell: Annotated[int | None, typer.Option("--cell", min=0, help="Of this cell only.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on, also with pods that are yet to come.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Lines of each pod; all of a single one, ten of several, if not given.")
    ] = None,
    since: Annotated[str | None, typer.Option(help="Nothing older than this, such as 10m.")] = None,
    previous: Annotated[bool, typer.Option("--previous", "-p", help="Of the container before, if any.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Show the logs of a stack's servers."""
    from gym_operator.plugin.verbs.logs import Wanted as Whose
    from gym_operator.plugin.verbs.logs import logs as verb
    from gym_operator.plugin.views.requests import seconds_of

    age = seconds_of("--since", since) if since is not None else None
    whose = Whose(server, cell, tail, age, previous)
    in_cluster(
        kubeconfig, context, namespace, lambda cluster, screen: verb(cluster, screen, stack, whose, follow=follow)
    )


@cli.command()
def drill(
    stack: Stack,
    wanted: Annotated[
        str | None, typer.Option("--from", metavar="CHECKPOINT", help="GymCheckpoint; the newest, if not given.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the copy; the stack's and -drill, if not given.")] = None,
    own_classes: Annotated[
        bool, typer.Option("--own-classes", help="Also where servers are classes of your own image.")
    ] = False,
    timeout: Timeout = "15m",
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
) -> None:
    """Try whether a checkpoint can be restored: into a copy of the stack without a driver, which is deleted then."""
    from gym_operator.plugin.verbs.drill import drill as verb
    from gym_operator.plugin.views.requests import seconds_of

    seconds = seconds_of("--timeout", timeout)
    in_cluster(
        *(kubeconfig, context, namespace),
        lambda cluster, screen: verb(
            *(cluster, screen, stack), wanted=wanted, name=name, own_classes=own_classes, seconds=seconds
        ),
    )
