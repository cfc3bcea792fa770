"""Starting programs of a run one by one, each recorded at once, and waiting with an eye on their health."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gym_kit.cluster.client import wait_until
from gym_kit.cluster.local import render
from gym_kit.cluster.local.components import Component
from gym_kit.cluster.local.record import Record, read
from gym_kit.cluster.local.teardown import take_down
from gym_kit.errors import KitError
from gym_kit.paths import private_folder, state_folder
from gym_kit.procs import is_alive, spawn
from gym_kit.run import last_lines


def new_run_folder() -> Path:
    run = private_folder(state_folder()) / f"cluster-{secrets.token_hex(3)}"
    run.mkdir(mode=0o700)
    (run / "log").mkdir()
    return run


def write_kubeconfig(run: Path, name: str, server: str) -> None:
    pki = run / "pki"
    parts = ((pki / file).read_bytes() for file in ("ca.crt", f"{name}.crt", f"{name}.key"))
    file = run / f"{name}.kubeconfig"
    file.write_text(render.kubeconfig(server, *parts))
    file.chmod(0o600)


def start(record: Record, components: Iterable[Component]) -> Record:
    for component in components:
        process = spawn(component.argv, log_of(record.run, component.name))
        record = replace(record, processes={**record.processes, component.name: process}).save()
    return record


def wait_healthy(record: Record, what: str, holds: Callable[[], bool], seconds: float) -> None:
    """Waits for `holds`. Raises KitError, with the log of the program to blame, if one ends meanwhile."""

    def holds_and_all_live() -> bool:
        for name, process in record.processes.items():
            if not is_alive(process):
                raise KitError(
                    f"{name} ended while the cluster came up; its log ends with\n{_tail(record.run, name)}"
                )
        return holds()

    wait_until(what, holds_and_all_live, seconds)


@contextmanager
def undone_on_failure(run: Path) -> Iterator[None]:
    """Takes down what the block has started if it fails; the logs are kept until the next failure, for a look."""
    try:
        yield
    except KitError as failed:
        for earlier in run.parent.glob("failed-*"):
            shutil.rmtree(earlier, ignore_errors=True)
        kept = run.with_name(f"failed-{run.name}")
        (run / "log").rename(kept)
        take_down(read(run))
        raise KitError(f"{failed}\nAll logs of this start: {kept}") from failed
    except BaseException:
        take_down(read(run))
        raise


def log_of(run: Path, name: str) -> Path:
    return run / "log" / f"{name}.log"


def _tail(run: Path, name: str) -> str:
    return last_lines(log_of(run, name).read_text(errors="replace"))
