"""What the kernel knows about a process: its memory and the CPU time it has used."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MIB = 1024 * 1024


@dataclass(frozen=True)
class Usage:
    """`rss` and `peak` in bytes, `cpu` in seconds since the process began."""

    rss: int
    peak: int
    cpu: float


def usage(pid: int) -> Usage:
    """Of a process that runs. Raises OSError where there is none."""
    folder = Path(f"/proc/{pid}")
    return parse((folder / "status").read_text(), (folder / "stat").read_text(), os.sysconf("SC_CLK_TCK"))


def parse(status: str, stat: str, ticks: int) -> Usage:
    """Out of `/proc/PID/status` and `/proc/PID/stat`; `ticks` is how many make a second."""

    def kibibytes(name: str) -> int:
        found = re.search(rf"^{name}:\s+(\d+) kB$", status, re.MULTILINE)
        return 1024 * int(found[1]) if found else 0

    fields = stat[stat.rindex(")") + 2 :].split()
    return Usage(kibibytes("VmRSS"), kibibytes("VmHWM"), (int(fields[11]) + int(fields[12])) / ticks)
