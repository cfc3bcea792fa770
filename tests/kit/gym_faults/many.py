"""`make faults N=10000 PROCESSES=2`: the long run, its sequences dealt to processes; each draws its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time

POLL_SECONDS = 1.0


def shares(examples: int, processes: int) -> list[int]:
    """How many sequences each process plays: as equal as they can be, and none for a process without any."""
    each, more = divmod(examples, processes)
    return [count for index in range(processes) if (count := each + (index < more))]


def main() -> int:
    """Exit code 0 if no process found anything. The first that does ends the others."""
    examples = int(os.environ.get("N", "1000"))
    processes = int(os.environ.get("PROCESSES") or os.cpu_count() or 1)
    if examples < 1 or processes < 1:
        print("N and PROCESSES are at least 1", file=sys.stderr)
        return 2
    running = [
        subprocess.Popen([sys.executable, "-W", "error", "-m", "gym_faults.run"], env={**os.environ, "N": str(count)})
        for count in shares(examples, processes)
    ]
    try:
        while any(process.poll() is None for process in running) and not any(one.poll() for one in running):
            time.sleep(POLL_SECONDS)
    finally:
        for process in running:
            process.terminate()
            process.wait()
    if any(process.returncode for process in running):
        return 1
    print(f"{examples} sequences: nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
