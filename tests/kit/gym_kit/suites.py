"""`make test`: every suite this machine can run, one after the other, and an account of what ran and what could not.

The suites run even if an earlier one failed, so that one run shows everything. `N=` makes the long variants longer.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gym_kit import image
from gym_kit.cluster import ensure, kind
from gym_kit.cluster.local import provider as local
from gym_kit.errors import KitError
from gym_kit.image import PROJECT
from gym_kit.progress import Progress

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Suite:
    """`command` is run in the project's root; a pytest suite is counted test by test."""

    name: str
    command: tuple[str, ...]
    needs_cluster: bool = False

    @property
    def is_pytest(self) -> bool:
        return self.command[0] == "pytest"


SUITES = (
    Suite("format", ("ruff", "format", "--check", "--quiet", ".")),
    Suite("lint", ("ruff", "check", "--quiet", ".")),
    Suite("types", ("mypy",)),
    Suite("imports", ("lint-imports",)),
    Suite("generated", ("python", "-m", "gym_operator.crds", "--check")),
    Suite("unit", ("pytest", "tests/unit")),
    Suite("servers", ("pytest", "tests/servers")),
    Suite("charts", ("pytest", "tests/charts")),
    Suite("processes", ("pytest", "tests/processes")),
    Suite("cluster", ("pytest", "tests/cluster"), needs_cluster=True),
)


@dataclass
class Tally:
    """What came of the suites so far."""

    counts: Counter[str] = field(default_factory=Counter)
    ran: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    could_not: list[str] = field(default_factory=list)


def main() -> int:
    """Exit code 0 if every suite ran and passed; a suite that could not run is named, and fails the run."""
    tally, progress = Tally(), Progress.to_stderr()
    started = time.monotonic()
    for suite in SUITES:
        problem = _prepared(progress) if suite.needs_cluster else None
        if problem is not None:
            tally.could_not.append(f"{suite.name} ({problem})")
            continue
        _run(suite, tally, progress)
    if not kind.docker_answers():
        progress.note("kind was not tried: no Docker engine answers here; the cluster suite ran on the local node")
    if local.down(progress):
        progress.note("the local node is removed")
    counts = tally.counts
    print(f"failed: {', '.join(tally.failed) or 'none'}; {time.monotonic() - started:.0f} s")
    print(f"tests: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    print(f"ran: {', '.join(tally.ran)}; could not run: {'; '.join(tally.could_not) or 'nothing'}")
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


def _run(suite: Suite, tally: Tally, progress: Progress) -> None:
    with tempfile.TemporaryDirectory(prefix="gym-suite-") as folder, progress.step(f"suite {suite.name}"):
        results = Path(folder) / "results.xml"
        command = [str(BIN / suite.command[0]), *suite.command[1:]]
        if suite.is_pytest:
            command += ["-q", f"--junitxml={results}"]
        code = subprocess.run(command, cwd=PROJECT, stdin=subprocess.DEVNULL, check=False).returncode
        tally.ran.append(suite.name)
        if code != 0:
            tally.failed.append(suite.name)
        if suite.is_pytest and results.exists():
            tally.counts.update(count(results))
        else:
            tally.counts["passed" if code == 0 else "failed"] += 1


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
