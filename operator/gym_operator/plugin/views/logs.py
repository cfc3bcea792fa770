"""Which pods' logs are meant, and how a line of one is told from another's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from gym_operator.plugin.exits import Unusable
from gym_operator.plugin.views.text import some_of
from gym_operator.rules.pod_state import NO_CELL, PodState, observe

TAIL_OF_SEVERAL: Final = 10
"""Lines of each pod that are shown where there are several and nobody says how many."""


def chosen(pods: Iterable[Mapping[str, Any]], server: str | None, cell: int | None) -> list[PodState]:
    """The pods of a server or of all, of a cell or of all, in order of cells. Raises Unusable where a stack has pods
    and none of these."""
    found = sorted((observe(pod) for pod in pods), key=lambda pod: (pod.cell, pod.server, pod.name))
    wanted = [pod for pod in found if server in (None, pod.server) and cell in (None, pod.cell)]
    if found and not wanted:
        raise Unusable(_none_of(found, server, cell))
    return wanted


def _none_of(found: Sequence[PodState], server: str | None, cell: int | None) -> str:
    # Of pods, and not of the spec: a server that it has may be without one for a moment.
    servers = sorted({pod.server for pod in found})
    if server is not None and server not in servers:
        return f"no server {server} in this stack has a pod: there are {some_of(servers)}"
    cells = sorted({pod.cell for pod in found if server in (None, pod.server) and pod.cell != NO_CELL})
    whose = "this stack" if server is None else f"server {server}"
    if not cells:  # the engine's
        return f"no pod of {whose} is in a cell: leave --cell out"
    return f"no pod of {whose} is in cell {cell}: look in {some_of([str(one) for one in cells])}"


def options_of(pods: int, tail: int | None, since: float | None, *, previous: bool) -> dict[str, str]:
    """What the API server is asked for, of each of so many pods. `since` in seconds."""
    if tail is None and pods > 1:
        tail = TAIL_OF_SEVERAL
    return {
        **({} if tail is None else {"tailLines": str(tail)}),
        **({} if since is None else {"sinceSeconds": str(int(since))}),
        **({"previous": "true"} if previous else {}),
    }


def line_of(pod: PodState, line: bytes, among: Sequence[PodState]) -> str:
    """A line as it is shown: with the name of its pod where there are several."""
    text = line.decode(errors="replace").rstrip("\r")
    return f"{pod.name}: {text}" if len(among) > 1 else text
