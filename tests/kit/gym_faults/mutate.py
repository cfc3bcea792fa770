"""`make mutants`: does the random machine, alone, find each mutation of the product?

Each is applied to a copy of the tree, and the machine runs there until it finds something, at most for `N` examples
and `SECONDS` seconds of computing. A mutation counts as caught only where an invariant was violated: running out of
time, or a tree that does not even start, is a miss. `ONLY=` runs those whose names hold a text.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from gym_faults.mutants import MUTANTS, Mutant

PROJECT = Path(__file__).resolve().parents[3]
PRODUCT = Path("servers/gym_servers")
AT_ONCE = 2
EXAMPLES = 2000
SECONDS = 900
PATIENCE = 10  # a busy machine needs so many times as long as it computes


class NotApplicable(Exception):
    """The product has changed: the mutation's text is not there exactly once."""


@dataclass(frozen=True)
class Result:
    name: str
    caught: bool
    seconds: float
    by: str


def mutated(source: str, mutant: Mutant) -> str:
    """Raises NotApplicable."""
    found = source.count(mutant.old)
    if found != 1:
        raise NotApplicable(
            f"mutant {mutant.name!r}: its text is found {found} times in {PRODUCT / mutant.file}, not once; "
            "write it anew in gym_faults/mutants.py"
        )
    return source.replace(mutant.old, mutant.new)


def try_mutant(mutant: Mutant, examples: int, seconds: int) -> Result:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gym-mutant-") as folder:
        tree = Path(folder)
        for part in ("servers", "tests/kit"):
            shutil.copytree(PROJECT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        file = tree / PRODUCT / mutant.file
        file.write_text(mutated(file.read_text(), mutant))
        environment = {
            **os.environ,
            "PYTHONPATH": f"{tree / 'servers'}:{tree / 'tests/kit'}",
            "N": str(examples),
            "FIRST": "1",
            "CPU_SECONDS": str(seconds),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            ended = subprocess.run(
                [sys.executable, "-m", "gym_faults.run"],
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=seconds * PATIENCE,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Result(mutant.name, False, seconds * PATIENCE, "out of time")
    lines = (ended.stdout + ended.stderr).splitlines()
    found = [line for line in lines if "Violation: " in line]
    said = found[-1].partition("Violation: ")[2] if found else "".join(lines[-1:])
    by = said or f"out of time: {seconds} s of computing"
    return Result(mutant.name, bool(found), round(time.monotonic() - began, 1), by[:300])


def main() -> int:
    """Exit code 0 if all are caught."""
    only = os.environ.get("ONLY", "")
    wanted: Sequence[Mutant] = [mutant for mutant in MUTANTS if only in mutant.name]
    try:
        for mutant in wanted:
            mutated((PROJECT / PRODUCT / mutant.file).read_text(), mutant)
    except NotApplicable as error:
        print(error, file=sys.stderr)
        return 2
    examples, seconds = int(os.environ.get("N", EXAMPLES)), int(os.environ.get("SECONDS", SECONDS))

    def attempt(mutant: Mutant) -> Result:
        result = try_mutant(mutant, examples, seconds)
        print(
            f"{'caught' if result.caught else 'MISSED'} {result.seconds:6.1f} s  {result.name}: {result.by}",
            flush=True,
        )
        return result

    with ThreadPoolExecutor(AT_ONCE) as threads:
        results = list(threads.map(attempt, wanted))
    missed = [result.name for result in results if not result.caught]
    build = PROJECT / "build"
    build.mkdir(exist_ok=True)
    document = {
        "caught": len(results) - len(missed),
        "missed": missed,
        "examples": examples,
        "mutants": [asdict(result) for result in results],
    }
    (build / "mutants.json").write_text(json.dumps(document, indent=1) + "\n")
    print(f"caught {len(results) - len(missed)}, missed {len(missed)}{': ' + ', '.join(missed) if missed else ''}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
