"""`python -m gym_kit`: the cluster and the image from a shell.

People read standard error; with `--json` standard output holds one JSON document and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gym_kit import image, kept
from gym_kit.cluster import Cluster, ensure, find, kind
from gym_kit.cluster.local import provider as local
from gym_kit.cluster.local.build import build_kubernetes
from gym_kit.errors import KitError
from gym_kit.progress import Progress

Answer = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 when the kit says why not, 2 for a wrong command line, 130 when interrupted."""
    options = _parser().parse_args(argv)
    progress = Progress.silent() if options.quiet else Progress.to_stderr()
    run: Callable[[argparse.Namespace, Progress], Answer] = options.run
    try:
        answer = run(options, progress)
    except KitError as refused:
        print(f"gym_kit: {refused}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("gym_kit: interrupted", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(answer))
    else:
        for name, value in answer.items():
            print(f"{name.replace('_', ' ')}: {value}")
    return 0


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON document for programs")
    common.add_argument("--quiet", action="store_true", help="show no progress")
    parser = argparse.ArgumentParser(prog="python -m gym_kit", description="The cluster and image tests stand on.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace, Progress], Answer], about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, parents=[common], help=about, description=about)
        command.set_defaults(run=run)
        return command

    up = add("up", _up, "bring a cluster up, or find the one that is")
    up.add_argument("--cluster", choices=("auto", "kind", "local", "current"), default="auto")
    up.add_argument("--kubeconfig", type=Path, help="of a given cluster (default: the variable KUBECONFIG)")
    add("down", _down, "remove the clusters this kit brought up, and the S3 servers it left up")
    add("status", _status, "show the cluster this kit brought up")
    build = add("image", _image, "build the project's image unless it is built")
    build.add_argument("--load", action="store_true", help="also load it into the running cluster")
    add("build-kubernetes", _build_kubernetes, "build the local node's programs into the cache")
    return parser


def _up(options: argparse.Namespace, progress: Progress) -> Answer:
    return _described(ensure(options.cluster, progress, options.kubeconfig))


def _down(_: argparse.Namespace, progress: Progress) -> Answer:
    removed = ["local"] if local.down(progress) else []
    if kind.remove():
        removed.append("kind")
    if kept.end_all():
        removed.append("S3")
    return {"removed": removed}


def _status(_: argparse.Namespace, __: Progress) -> Answer:
    found = find()
    return {"running": False} if found is None else {"running": True, **_described(found)}


def _image(options: argparse.Namespace, progress: Progress) -> Answer:
    built = image.build(progress)
    if options.load:
        cluster = find()
        if cluster is None:
            raise KitError("no cluster of this kit is running: `up` first")
        with progress.step("loading the image"):
            cluster.load_image(built.archive)
    return {"reference": built.reference, "archive": str(built.archive)}


def _build_kubernetes(_: argparse.Namespace, progress: Progress) -> Answer:
    return {"folder": str(build_kubernetes(progress))}


def _described(cluster: Cluster) -> Answer:
    return {
        "provider": cluster.provider,
        "name": cluster.name,
        "kubeconfig": str(cluster.kubeconfig),
        "kubernetes_version": cluster.kubernetes_version,
        "host_address": cluster.host_address,
        "started": cluster.started,
    }


if __name__ == "__main__":
    sys.exit(main())
