"""The account of a demonstration: counted from journals, rows and checkpoints, never from what the servers say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gym_kit.demo.kube import Object
from gym_kit.demo.options import Options
from gym_kit.demo.scenario import Played, first_token
from gym_kit.demo.stage import Stage
from gym_servers.capture.staging import unpack
from gym_servers.proof.account import Account, account
from gym_servers.proof.history import Cut, read_cut, sort_journal
from gym_servers.storage.cells import published
from gym_servers.storage.leftovers import CUTS
from gym_servers.storage.store import ObjectStore

Entry = Mapping[str, Any]
MAX_RECOVERY_RATIO = 2.5


class Scene(Protocol):
    """Where a stack ran: `expected` rollouts, and the bucket's objects below a prefix."""

    @property
    def expected(self) -> int: ...

    def store(self, prefix: str) -> ObjectStore: ...


def report(stage: Stage, options: Options, played: Played) -> dict[str, Any]:
    """Count a run. `ok` is true only if everything that was promised was seen."""
    cluster = stage.grounds.cluster
    entries = stage.entries()
    counted = counted_run(stage, played.stack, entries)
    status = played.checkpoint["status"]
    recoveries = [seconds for kill in played.kills if (seconds := recovery_seconds(kill, entries)) is not None]
    problems = [*counted.problems, *_missed(counted, options, played, status, recoveries)]
    if options.engine == "pod":
        problems += _not_cut(engine_cuts(stage, checkpoint_folder(played.stack)))
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


def counted_run(stage: Scene, stack: Object, entries: Sequence[Entry], folders: Sequence[str] = ()) -> Account:
    """Count what a stack of one cell has done. `folders`: where the checkpoints of other stacks are that it may have
    continued from, as `checkpoint_folder` names them."""
    metadata = stack["metadata"]
    rows = read_rows(stage.store(f"{metadata['namespace']}/{metadata['name']}/output"))
    recoveries = stack["status"]["cells"][0].get("recoveries") or []
    cuts = restored_cuts(stage, [*folders, checkpoint_folder(stack)], recoveries)
    return account(stage.expected, rows, sort_journal(entries), cuts)


def checkpoint_folder(stack: Object) -> str:
    """Where in the bucket the checkpoints of a stack's only cell are."""
    return f"{stack['metadata']['namespace']}/checkpoints/{stack['metadata']['uid']}/cell-0"


def read_rows(output: ObjectStore) -> list[dict[str, Any]]:
    """Every row object in the output, whatever the merged file says."""
    return [json.loads(output.get(key)) for key in sorted(output.list("rows"))]


def restored_cuts(stage: Scene, folders: Sequence[str], recoveries: Sequence[Object]) -> dict[int, Cut]:
    """Cell attempt -> what the checkpoint that it continued from says."""
    by_id = {
        publication.checkpoint_id: (f"{folder}/{key}", publication)
        for folder in folders
        for key, publication, _ in published(stage.store(folder))
    }
    found = {recovery["attempt"]: by_id.get(recovery.get("checkpoint") or "") for recovery in recoveries}
    return {attempt: read_cut(stage.store(cut[0]), cut[1]) for attempt, cut in found.items() if cut is not None}


@dataclass(frozen=True)
class EngineCut:
    """Of one published checkpoint: tokens that the engine's side has staged for it, and those that it holds of calls
    in progress."""

    checkpoint: str
    staged: int
    held: int


def engine_cuts(stage: Scene, folder: str) -> list[EngineCut]:
    """Of each published checkpoint in a cell's folder, as the objects there say. What was staged stays for an hour at
    least."""
    cell, found = stage.store(folder), []
    for key, publication, _ in published(cell):
        staged = [unpack(cell.get(name)) for name in cell.list(f"{CUTS}/{publication.checkpoint_id}")]
        cut = read_cut(stage.store(f"{folder}/{key}"), publication)
        found.append(
            EngineCut(
                publication.name,
                sum(len(tokens.ids) for streams in staged for tokens in streams.values()),
                sum(sum(prefixes.values()) for prefixes in cut.prefixes.values()),
            )
        )
    return found


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
    # A checkpoint that is taken at any moment may find no call in progress.
    if options.policy == "vllm" and options.during != "checkpoint" and not counted.tokens_kept:
        missed.append("no token was kept of a call that was under way at a cut")
    if options.kill == "operator" and played.interrupted not in ("Succeeded", "Failed"):
        missed.append("the interrupted checkpoint did not end")
    return missed


def _not_cut(cuts: Sequence[EngineCut]) -> list[str]:
    missed = [
        f"the engine had {cut.staged} tokens at the cut of checkpoint {cut.checkpoint}, which holds {cut.held}"
        for cut in cuts
        if cut.held < cut.staged
    ]
    return missed if any(cut.staged for cut in cuts) else ["no checkpoint was cut at the engine"]
