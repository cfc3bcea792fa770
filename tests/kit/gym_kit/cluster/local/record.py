"""What a start has done to this machine, written down before or right after it is done: tear-down works from it.

One JSON file per run folder. A resource is recorded before it is made, so a start that is killed half-way leaves a
record that names too much rather than too little; removing what is not there is no error.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from gym_kit.paths import state_folder
from gym_kit.procs import ProcessId, is_alive

FILE = "record.json"


@dataclass(frozen=True)
class Record:
    """`boot` tells a record of before the last reboot, when all but the files is gone anyway.

    `owner` is the process whose end also ends the run (API-only servers); None: the run lives until taken down.
    """

    run: Path
    kind: Literal["node", "api"]
    boot: str
    ready: bool = False
    owner: ProcessId | None = None
    processes: dict[str, ProcessId] = field(default_factory=dict)
    network: bool = False
    cgroups: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    sysctls: dict[str, str] = field(default_factory=dict)

    @property
    def kubeconfig(self) -> Path:
        return self.run / "admin.kubeconfig"

    def save(self) -> Record:
        """Replaces the file in one step and returns itself."""
        scratch = self.run / f".{FILE}"
        scratch.write_text(to_json(self))
        scratch.rename(self.run / FILE)
        return self


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def to_json(record: Record) -> str:
    return json.dumps({**asdict(record), "run": str(record.run)}, indent=1)


def from_json(text: str) -> Record:
    """Raises ValueError, KeyError or TypeError for a file that this package did not write."""
    raw: dict[str, Any] = json.loads(text)
    owner = raw["owner"]
    return Record(
        run=Path(raw["run"]),
        kind=raw["kind"],
        boot=raw["boot"],
        ready=raw["ready"],
        owner=ProcessId(**owner) if owner else None,
        processes={name: ProcessId(**process) for name, process in raw["processes"].items()},
        network=raw["network"],
        cgroups=tuple(raw["cgroups"]),
        folders=tuple(raw["folders"]),
        sysctls=dict(raw["sysctls"]),
    )


def all_records() -> list[Record]:
    """Records of every run folder; a folder that was killed before its first record holds nothing to undo."""
    found = []
    for file in sorted(state_folder().glob(f"cluster-*/{FILE}")):
        # Another process may take it down between the two looks.
        with suppress(FileNotFoundError):
            found.append(read(file.parent))
    return found


def read(run: Path) -> Record:
    """The record on disk, which knows more than one in memory from before the last program was started."""
    return from_json((run / FILE).read_text())


def is_running(record: Record) -> bool:
    """Whether it came up and every one of its programs still lives."""
    return record.ready and record.boot == boot_id() and all(map(is_alive, record.processes.values()))


def is_abandoned(record: Record) -> bool:
    """Whether nobody can want it any more: an API server whose process is gone, or anything of an earlier boot."""
    if record.boot != boot_id():
        return True
    return record.owner is not None and not is_alive(record.owner)
