"""Clusters to test against: one brought up in Docker (kind), one from plain processes (local), or a given one.

`ensure` is the entry: it hands back a cluster that answers, whichever provider it comes from, with a kubeconfig, a
way in for images, and the address at which pods reach a server of this machine. `find` is for looking only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from gym_kit.cluster import current, kind
from gym_kit.cluster.base import Cluster, Provider
from gym_kit.cluster.local import provider as local_provider
from gym_kit.progress import Progress

__all__ = ["Choice", "Cluster", "Provider", "choose", "ensure", "find"]

Choice = Literal["auto", "kind", "local", "current"]


def choose(choice: Choice, kubeconfig_given: bool, docker_answers: bool) -> Provider:
    """The provider that `auto` stands for: the cluster somebody pointed us at, else kind, else plain processes."""
    if choice != "auto":
        return choice
    if kubeconfig_given:
        return "current"
    return "kind" if docker_answers else "local"


def ensure(choice: Choice, progress: Progress, kubeconfig: Path | None = None) -> Cluster:
    """A cluster that answers: the one already up under this provider, or a new one.

    `kubeconfig` (or the variable KUBECONFIG) names a given cluster. Raises KitError with what is missing.
    """
    given = kubeconfig or _from_environment()
    if choice == "auto" and given is not None and (mine := find()) is not None and mine.kubeconfig == given.resolve():
        # Somebody exported KUBECONFIG after `up`: it still is the cluster whose nodes we reach.
        return mine
    # The engine is asked only when its answer counts: `docker info` can take seconds to fail.
    docker = choice == "auto" and given is None and kind.docker_answers()
    provider = choose(choice, given is not None, docker)
    if provider == "current":
        return current.take(given)
    if provider == "kind":
        return kind.ensure(progress)
    return local_provider.ensure(progress)


def find() -> Cluster | None:
    """The cluster an earlier `ensure` brought up, if it still answers; starts and builds nothing."""
    return local_provider.find() or kind.find()


def _from_environment() -> Path | None:
    value = os.environ.get("KUBECONFIG")
    return Path(value) if value else None
