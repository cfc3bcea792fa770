"""Many random sequences in one process, other ones each time. `make test` runs a few, always the same."""

from __future__ import annotations

import os
import resource
import sys
import time
from typing import ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from gym_faults.machine import Faults

STEPS = 22

SHORT = settings(
    max_examples=45,
    stateful_step_count=STEPS,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


PROGRESS_SECONDS = 30.0


class Counted(Faults):
    """Says how far it is; what was played to shorten a failure counts too."""

    played: ClassVar[int] = 0
    began: ClassVar[float] = time.monotonic()
    said: ClassVar[float] = began

    def teardown(self) -> None:
        super().teardown()
        cls, now = type(self), time.monotonic()
        cls.played += 1
        if now - cls.said >= PROGRESS_SECONDS:
            cls.said = now
            print(
                f"{cls.played} sequences in {now - cls.began:.0f} s (process {os.getpid()})",
                file=sys.stderr,
                flush=True,
            )


def main() -> int:
    examples = int(os.environ.get("N", "1000"))
    long = settings(SHORT, max_examples=examples, derandomize=False)
    if seconds := os.environ.get("CPU_SECONDS"):
        resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))  # the machine may be busy with others
    if os.environ.get("FIRST"):
        # The first sequence that fails, as it was found: for whoever wants to know only whether there is one.
        long = settings(long, phases=[Phase.generate], report_multiple_bugs=False)
    run_state_machine_as_test(Counted, settings=long)
    print(f"{examples} examples: nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
