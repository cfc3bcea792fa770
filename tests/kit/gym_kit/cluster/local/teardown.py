"""Undoes a start, from its record alone: the same path whether the node was stopped, killed or never came up.

Nothing in a run folder is kept, so programs are killed outright, in an order in which none can restart or re-create
what was just removed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from gym_kit.cluster.local import host
from gym_kit.cluster.local.components import belongs_to
from gym_kit.cluster.local.record import Record, boot_id
from gym_kit.procs import end, find


def take_down(record: Record) -> None:
    """Raises KitError if something cannot be removed; the record stays then, so that it can be tried again."""
    if record.boot == boot_id():
        _end_processes(record)
        host.unmount_below(record.run)
        if record.network:
            host.remove_network()
        host.remove_cgroups(record.cgroups)
        host.set_sysctls(record.sysctls)
    if record.kind == "node":
        host.remove_traces_outside(record.run, record.folders)
    _delete(record.run)


def _end_processes(record: Record) -> None:
    # A start that was killed between starting a program and recording it: the command line still tells.
    found = find(lambda argv: belongs_to(argv, record.run))
    shims = find(lambda argv: belongs_to(argv, record.run) and Path(argv[0]).name.startswith("containerd-shim"))
    programs = dict.fromkeys([*record.processes.values(), *found])
    end([process for process in programs if process not in shims], grace=0)
    # Containers only now, when no kubelet is left to replace them; a fork may slip through one look.
    while containers := host.processes_in(record.cgroups):
        end(containers, grace=0)
    # And again for shims: containerd may have been starting one.
    end(list(dict.fromkeys([*shims, *find(lambda argv: belongs_to(argv, record.run))])), grace=0)


def _delete(run: Path) -> None:
    # The record goes last: while anything is left, a later tear-down can still find it.
    for entry in run.iterdir():
        if entry.name != "record.json":
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    shutil.rmtree(run)
