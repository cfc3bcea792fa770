"""`make test`: every suite this machine can run, and an account of what ran and what could not.

The suites run even if an earlier one failed, so that one run shows everything. `N=` makes the long variants longer.
Two suites run side by side. The cluster has the machine to itself, since its pods need all of it. What mostly waits,
for an API server that is away or an operator that starts, runs beside vLLM, which is left out where it cannot be
installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from gym_kit import image, vllm
from gym_kit.cluster import ensure, kind
from gym_kit.cluster.local import provider as local
from gym_kit.errors import KitError
from gym_kit.image import PROJECT
from gym_kit.progress import Progress

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Suite:
    """`command` is run in the project's root, with a program of `programs`; a pytest suite is counted test by test.
    `paths` are where Python finds the project, in place of how it was installed."""

    name: str
    command: tuple[str, ...]
    programs: Path = BIN
    paths: tuple[str, ...] = ()

    @property
    def is_pytest(self) -> bool:
        return self.command[0] == "pytest"


BESIDE = (  # the longest first
    Suite("operated", ("pytest", "tests/operated")),
    Suite("servers", ("pytest", "tests/servers")),
    Suite("processes", ("pytest", "tests/processes")),
    Suite("charts", ("pytest", "tests/charts")),
    Suite("faults", ("pytest", "tests/faults")),
    Suite("unit", ("pytest", "tests/unit")),
    Suite("types", ("mypy",)),
    Suite("format", ("ruff", "format", "--check", "--quiet", ".")),
    Suite("lint", ("ruff", "check", "--quiet", ".")),
    Suite("imports", ("lint-imports",)),
    Suite("generated", ("python", "-m", "gym_operator.crds", "--check")),
)
AT_ONCE = 2
API_SERVER_TESTS = ("tests/cluster/test_api_server_faults.py", "tests/cluster/test_killed_operators.py")
CLUSTER = Suite(
    "cluster", ("pytest", "tests/cluster", "tests/bench", *(f"--ignore={file}" for file in API_SERVER_TESTS))
)
OUTAGE = Suite("outage", ("pytest", *API_SERVER_TESTS))
VLLM = Suite("vllm", ("pytest", "tests/vllm"), PROJECT / vllm.LINK / "bin", ("servers", "tests/kit"))


@dataclass
class Tally:
    """What came of the suites so far; those that run beside each other add to it from threads of their own."""

    counts: Counter[str] = field(default_factory=Counter)
    ran: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    could_not: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, suite: Suite, passed: bool, counts: Counter[str]) -> None:
        with self.lock:
            self.ran.append(suite.name)
            self.counts.update(counts)
            if not passed:
                self.failed.append(suite.name)


def main() -> int:
    """Exit code 0 if every suite ran and passed; a suite that could not run is named, and fails the run. vLLM's is
    left out, and named, where this machine cannot have it."""
    tally, progress = Tally(), Progress.to_stderr()
    started = time.monotonic()
    with progress.step("suites that need no cluster"):
        _run_beside(BESIDE, tally, progress)
    problem = _prepared(progress)
    last = []
    if problem is not None:
        tally.could_not += [f"{suite.name} ({problem})" for suite in (CLUSTER, OUTAGE)]
    else:
        with progress.step(f"suite {CLUSTER.name}"):
            _run(CLUSTER, tally)
        last.append(OUTAGE)
    if (reason := vllm.missing(progress)) is not None:
        tally.left_out.append(f"{VLLM.name} ({reason})")
    else:
        last.append(VLLM)
    with progress.step(f"suites {' and '.join(suite.name for suite in last)}"):
        _run_beside(last, tally, progress)
    if local.down(progress):
        progress.note("the local node is removed")
    if not kind.docker_answers():
        progress.note("kind was not tried: no Docker engine answers here; the cluster suite ran on the local node")
    counts = tally.counts
    print(f"failed: {', '.join(tally.failed) or 'none'}; {time.monotonic() - started:.0f} s")
    print(f"tests: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    print(
        f"ran: {', '.join(tally.ran)}; could not run: {'; '.join(tally.could_not) or 'nothing'}; "
        f"left out: {'; '.join(tally.left_out) or 'nothing'}"
    )
    return 1 if tally.failed or tally.could_not else 0


def _prepared(progress: Progress) -> str | None:
    """Build the image and bring a cluster up for the suites that need one; why not, if it cannot be."""
    try:
        with progress.step("image"):
            built = image.build(progress)
        with progress.step("cluster"):
            ensure("auto", progress).load_image(built.archive)
    except KitError as error:
        return str(error)
    return None


def _run_beside(suites: Sequence[Suite], tally: Tally, progress: Progress) -> None:
    """`AT_ONCE` at a time. What a suite prints comes out when it has ended: two at once could not be read."""

    def drive(suite: Suite) -> None:
        started = time.monotonic()
        with tempfile.TemporaryFile() as output:
            _run(suite, tally, output)
            output.seek(0)
            with tally.lock:
                progress.note(f"suite {suite.name}: {time.monotonic() - started:.0f} s")
                sys.stdout.write(output.read().decode(errors="replace"))
                sys.stdout.flush()

    with ThreadPoolExecutor(AT_ONCE) as threads:
        list(threads.map(drive, suites))  # one that could not be run at all ends the run here


def _run(suite: Suite, tally: Tally, output: IO[bytes] | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="gym-suite-") as folder:
        results = Path(folder) / "results.xml"
        command = [str(suite.programs / suite.command[0]), *suite.command[1:]]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(suite.paths)} if suite.paths else None
        if suite.is_pytest:
            command += ["-q", f"--junitxml={results}"]
        ended = subprocess.run(
            command,
            cwd=PROJECT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        )
        passed = ended.returncode == 0
        if suite.is_pytest and results.exists():
            counts = count(results)
        else:
            counts = Counter({"passed" if passed else "failed": 1})
        tally.add(suite, passed, counts)


def count(results: Path) -> Counter[str]:
    """passed, failed and skipped of a JUnit XML file that pytest wrote just now."""
    counts: Counter[str] = Counter()
    for case in ElementTree.parse(results).iter("testcase"):
        kinds = {child.tag for child in case}
        bad = bool(kinds & {"failure", "error"})
        counts["failed" if bad else "skipped" if "skipped" in kinds else "passed"] += 1
    return counts


if __name__ == "__main__":
    sys.exit(main())
