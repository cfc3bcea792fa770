"""The account of a demonstration: counted from journals, rows and checkpoints, never from what the servers say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gym_kit.demo.kube import Object
from gym_kit.demo.options import Options
from gym_kit.demo.scenario import Played, first_token
from gym_kit.demo.stage import STACK, Stage
from gym_servers.proof.account import Account, account
from gym_servers.proof.history import Cut, read_cut, sort_journal
from gym_servers.storage.cells import published

Entry = Mapping[str, Any]
MAX_RECOVERY_RATIO = 2.5


def report(stage: Stage, options: Options, played: Played) -> dict[str, Any]:
    """Count a run. `ok` is true only if everything that was promised was seen."""
    cluster = stage.grounds.cluster
    entries = stage.entries()
    rows = read_rows(stage)
    counted = account(stage.expected, rows, sort_journal(entries), restored_cuts(stage, played.stack))
    status = played.checkpoint["status"]
    recoveries = [seconds for kill in played.kills if (seconds := recovery_seconds(kill, entries)) is not None]
    problems = [*counted.problems, *_missed(counted, options, played, status, recoveries)]
    return {
        "cluster": {"provider": cluster.provider, "kubernetes": cluster.kubernetes_version},
        **counted.document(),
        "checkpoint": {
            "name": played.checkpoint["metadata"]["name"],
            "phase": status["phase"],
            "uri": status.get("uri"),
            "episodes": status.get("episodes"),
            "bytes": status.get("bytes"),
            "pause_seconds": status.get("pauseSeconds"),
        },
        "kill": {
            "target": options.kill,
            "how": options.how,
            "recovery_seconds": round(max(recoveries), 2) if recoveries else None,
            "recoveries": [round(seconds, 2) for seconds in recoveries],
            "bare_restart_seconds": round(played.bare_restart_seconds, 2),
            "interrupted_checkpoint": played.interrupted or None,
        },
        "problems": problems,
        "ok": not problems,
    }


def read_rows(stage: Stage) -> list[dict[str, Any]]:
    """Every row object in the output, whatever the merged file says."""
    store = stage.store(f"{stage.kube.namespace}/{STACK}/output")
    return [json.loads(store.get(key)) for key in sorted(store.list("rows"))]


def restored_cuts(stage: Stage, stack: Object) -> dict[int, Cut]:
    """Cell attempt -> what the checkpoint that it continued from says."""
    cell = stage.store(f"{stage.kube.namespace}/checkpoints/{stack['metadata']['uid']}/cell-0")
    by_id = {publication.checkpoint_id: (key, publication) for key, publication, _ in published(cell)}
    cuts: dict[int, Cut] = {}
    for recovery in stack["status"]["cells"][0].get("recoveries") or []:
        if (found := by_id.get(recovery.get("checkpoint") or "")) is not None:
            key, publication = found
            prefix = cell.uri.split("/", 3)[3]
            cuts[recovery["attempt"]] = read_cut(stage.store(f"{prefix}/{key}"), publication)
    return cuts


def recovery_seconds(kill: tuple[float, int], entries: Sequence[Entry]) -> float | None:
    """From the delete or upgrade to the first token of a model call under a later attempt; None if there was none."""
    when, attempt = kill
    first = first_token(entries, when, attempt + 1)
    return None if first is None else first - when


def _missed(
    counted: Account, options: Options, played: Played, status: Object, recoveries: Sequence[float]
) -> list[str]:
    missed = []
    if counted.continued == 0:
        missed.append("no rollout was continued")
    if status["phase"] != "Succeeded":
        missed.append(f"the checkpoint is {status['phase']}")
    if not recoveries:
        missed.append("no model call was seen after the kill")
    elif (options.how, options.during) == ("force", "work") and max(
        recoveries
    ) > MAX_RECOVERY_RATIO * played.bare_restart_seconds:
        missed.append(
            f"recovery took {max(recoveries):.1f} s, more than {MAX_RECOVERY_RATIO} times a bare restart "
            f"({played.bare_restart_seconds:.1f} s)"
        )
    if options.how != "force" and counted.restarted:
        missed.append(f"{counted.restarted} rollouts started over, though their pods were not killed")
    if options.kill == "operator" and played.interrupted not in ("Succeeded", "Failed"):
        missed.append("the interrupted checkpoint did not end")
    return missed
