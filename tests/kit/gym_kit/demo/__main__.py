"""`python -m gym_kit.demo`: plays the demonstration, prints its account, writes `build/demo/report.json`."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gym_kit.demo.options import from_environment
from gym_kit.demo.report import report
from gym_kit.demo.scenario import Scenario
from gym_kit.demo.stage import STACK, grounds, staged
from gym_kit.demo.table import Watch
from gym_kit.errors import KitError
from gym_kit.progress import Progress


def main() -> int:
    """Exit code 0 only if everything that was promised was seen."""
    with ExitStack() as ending:
        return _demonstrated(ending)


def _demonstrated(ending: ExitStack) -> int:
    try:
        options, progress = from_environment(os.environ), Progress.to_stderr()
        with (
            tempfile.TemporaryDirectory(prefix="gym-demo-") as folder,
            grounds(options.cluster, progress, Path(folder), keep=options.keep, policy=options.policy) as ready,
            staged(ready, options, progress) as stage,
            Watch() as watch,
        ):
            if options.keep:  # told also where the demonstration fails: then people want to look all the more
                ending.callback(print, way_to(ready.cluster.kubeconfig, stage.kube.namespace))
            scenario = Scenario(stage, options, watch)
            played = scenario.play()
            watch.note("every row is there; measuring a bare restart of the same pods")
            played.bare_restart_seconds = scenario.bare_restart()
            counted = report(stage, options, played)
    except KitError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "report.json"
    path.write_text(json.dumps(counted, indent=2) + "\n")
    print(told(counted))
    print(f"report: {path}")
    return 0 if counted["ok"] else 1


def told(counted: dict[str, Any]) -> str:
    """The account for a person."""
    rollouts, kill, calls = counted["rollouts"], counted["kill"], counted["tool_calls"]
    checkpoint, model = counted["checkpoint"], counted["model"]
    lines = [
        f"Kubernetes {counted['cluster']['kubernetes']} ({counted['cluster']['provider']})",
        f"rollouts    {rollouts['rows']} of {rollouts['expected']} rows, mean reward {rollouts['reward_mean']}; "
        f"{rollouts['continued']} continued, {rollouts['restarted']} started over; attempts {rollouts['attempts']}",
        f"checkpoint  {checkpoint['name']} {checkpoint['phase']}: {checkpoint['episodes']} episodes, "
        f"{checkpoint['bytes']} bytes, paused {checkpoint['pause_seconds']} s",
        f"kill        {kill['target']}: continued after {kill['recovery_seconds']} s "
        f"(the same pods restarted bare: {kill['bare_restart_seconds']} s)",
        f"tool calls  {calls['effective']} of {calls['expected']} took effect, {calls['duplicated']} twice, "
        f"{calls['lost']} lost",
        f"tokens      {model['tokens_generated']} generated, {model['tokens_needed_without_kill']} without the kill; "
        f"{model['tokens_kept_of_calls_in_progress']} kept of calls that were under way at a cut",
    ]
    lines += [f"PROBLEM     {problem}" for problem in counted["problems"]]
    lines.append("OK" if counted["ok"] else "NOT OK")
    return "\n".join(lines)


def way_to(kubeconfig: Path, namespace: str) -> str:
    """What to paste into a shell to see what is left up."""
    return f"""\
left up, until `make down` removes it all; to see it:
  export KUBECONFIG={shlex.quote(str(kubeconfig))}
  kubectl gym status {STACK} -n {namespace}"""


if __name__ == "__main__":
    sys.exit(main())
