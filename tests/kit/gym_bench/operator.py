"""`make bench-operator`: measures, prints a table, writes `build/bench/operator.json`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Final

from gym_bench.measure import Bench
from gym_bench.options import from_environment
from gym_bench.report import document, table
from gym_kit.errors import KitError
from gym_kit.progress import Progress

OUTPUT: Final = Path("build/bench/operator.json")


def main() -> int:
    """Exit code 0 if it was measured, whatever the figures are."""
    try:
        options, before = from_environment(os.environ), os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="gym-bench-") as folder:
            points = asyncio.run(Bench(options, Progress.to_stderr(), Path(folder)).points())
    except KitError as error:
        print(f"bench-operator: {error}", file=sys.stderr)
        return 1
    load = {"cpus": float(os.cpu_count() or 1), "load_before": before, "load_after": os.getloadavg()[0]}
    found = document(options, points, load)
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(json.dumps(found, indent=2) + "\n")
    print(table(found))
    print(f"figures: {OUTPUT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
